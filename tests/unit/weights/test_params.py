"""The check of a tree: each error names the place, what was expected and what was found."""

import pytest
import torch

from fnllm_weights import LayerParams, Params, ParamTree, check_params, load
from fnllm_weights.params import as_dtype, walk
from fnllm_weights.shard import WHOLE, leaves


@pytest.fixture
def params(oracle) -> Params:
    return load(oracle / "qwen3-bias")


def changed(params: Params, index: int, **leaves) -> Params:
    """The params with leaves of one layer replaced; None takes one away."""
    layers = list(params.tree["layers"])
    layer = {**layers[index], **leaves}
    layers[index] = {name: tensor for name, tensor in layer.items() if tensor is not None}
    return params._replace(tree={**params.tree, "layers": layers})


def test_good_params_come_back(params):
    assert check_params(params) is params


def test_params_are_shown_in_a_line_without_their_tensors(params):
    shown = repr(params._replace(workspace={"a machine": params.tree}))
    assert "Qwen3ForCausalLM of 3 layers" in shown and "hidden_size=48" in shown and len(shown) < 200


@pytest.mark.parametrize(
    ("leaf", "tensor", "message"),
    [
        ("post_norm", torch.zeros(9), r"^params.layers\[1\].post_norm: expected Float\[H\]=\(48,\), found \(9,\)$"),
        ("qkv", torch.zeros(48, 128), r"layers\[1\].qkv: expected Float\[QKV H\]=\(128, 48\), found \(48, 128\)"),
        ("down", None, r"layers\[1\].down: expected Float\[H I\]=\(48, 96\), found nothing"),
        ("router", torch.zeros(2, 48), r"layers\[1\].router: Qwen3ForCausalLM has no such tensor.* of your own needs"),
        ("o_bias", torch.zeros(48, dtype=torch.int64), r"layers\[1\].o_bias: .*, found torch.int64"),
        ("o_bias", [0.0] * 48, r"layers\[1\].o_bias: .*, found list, which only a swapped function can read"),
        (
            "o",
            torch.zeros(48, 64, dtype=torch.float16),
            r"layers\[1\].o: expected dtype torch.float32 as params.embed has",
        ),
        (
            "o",
            torch.zeros(48, 64, device="meta"),
            r"layers\[1\].o: expected device cpu as params.embed has, found meta",
        ),
    ],
)
def test_the_place_is_named(params, leaf, tensor, message):
    with pytest.raises(ValueError, match=message):
        check_params(changed(params, 1, **{leaf: tensor}))


def test_layers_are_counted(params):
    with pytest.raises(ValueError, match="params.layers: expected 3 layers, found 2"):
        check_params(params._replace(tree={**params.tree, "layers": params.tree["layers"][:2]}))


def test_a_tied_head_must_be_the_embedding(oracle):
    params = load(oracle / "qwen3-tiny")
    with pytest.raises(
        ValueError, match="params.lm_head: expected the tensor of params.embed.*a copy; put that there, or"
    ):
        check_params(params._replace(tree={**params.tree, "lm_head": params.tree["embed"].clone()}))


def test_a_shard_is_checked_with_its_own_sizes(oracle):
    check_params(load(oracle / "qwen3-odd", rank=3, size=4))
    with pytest.raises(ValueError, match=r"params.embed: expected Float\[V H\]=\(151, 36\), found \(38, 36\)"):
        check_params(load(oracle / "qwen3-odd", rank=3, size=4)._replace(shard=WHOLE))


def test_every_leaf_has_a_declared_shape(oracle):
    """The types that document the tree and the table that fills it name the same leaves with as many axes."""
    seen = set()
    for name in ("qwen3-bias", "qwen3-moe-mixed", "llama-tiny"):
        for leaf in leaves(load(oracle / name).config):
            hints = (LayerParams if leaf.path[0] == "layers" else ParamTree).__annotations__
            assert len(hints[leaf.path[-1]].dim_str.split()) == len(leaf.shape)
            seen.add(leaf.path[-1])
    assert {*LayerParams.__annotations__, *ParamTree.__annotations__} - seen == {"layers", "gate_up_bias", "down_bias"}


def test_walk_names_every_tensor(oracle):
    params = load(oracle / "qwen3-tiny")
    assert {path for path, _ in walk(params.tree)} == {leaf.path for leaf in leaves(params.config)} | {("lm_head",)}


def test_dtype_names():
    assert as_dtype("bfloat16") == as_dtype("torch.bfloat16") == as_dtype(torch.bfloat16) == torch.bfloat16
    with pytest.raises(ValueError, match="dtype='fp8' is not supported; use one of float32, float16, bfloat16"):
        as_dtype("fp8")
