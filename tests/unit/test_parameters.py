"""Parameters made by hand: errors in them are named before anything runs."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tiny_models import GREEDY, tiny

import fnllm
from fnllm_weights import Params, Shard

SMALL = {"max_model_len": 40, "max_num_seqs": 4, "block_size": 4, "num_blocks": 30}
USUAL = fnllm.Layers()


def made(tree) -> Params:
    return Params(tiny().config, None, tree, Shard(), {})


def changed(**leaves) -> Params:
    """Params with leaves of layer 1 replaced; None takes one away."""
    layers = list(tiny().tree["layers"])
    layers[1] = {name: leaf for name, leaf in {**layers[1], **leaves}.items() if leaf is not None}
    return made({**tiny().tree, "layers": layers})


def without(name: str) -> Params:
    return made({key: part for key, part in tiny().tree.items() if key != name})


WRONG = {
    "a missing leaf": (changed(down=None), r"params.layers\[1\].down: expected Float\[H I\]=\(24, 40\), found nothing"),
    "an optional leaf": (changed(q_norm=None), r"params.layers\[1\].q_norm: expected Float\[D\]=\(8,\), found nothing"),
    "no embedding": (without("embed"), r"params.embed: expected Float\[V H\]=\(41, 24\), found nothing"),
    "no norm": (without("norm"), r"params.norm: .* found nothing"),
    "no head": (without("lm_head"), r"params.lm_head: .* found nothing"),
    "no layers": (without("layers"), "params.layers: expected a list of 2 layers, found nothing"),
    "a shape": (changed(o=torch.zeros(24, 31)), r"layers\[1\].o: expected Float\[H ND\]=\(24, 32\), found \(24, 31\)"),
    "a dtype": (changed(o=torch.zeros(24, 32).half()), r"layers\[1\].o: expected dtype torch.float32 as params.embed"),
    "integers": (changed(o=torch.zeros(24, 32).int()), r"layers\[1\].o: .*, found torch.int32"),
    "no tensor": (changed(o=[1.0]), r"layers\[1\].o: .*, found list"),
    "another name": (changed(q_bias=torch.zeros(32)), r"layers\[1\].q_bias: Qwen3.* has no .*, only down, gate_"),
    "another part": (made({**tiny().tree, "head": torch.zeros(3)}), "params.head: .*, only embed, lm_head, norm$"),
    "one layer": (made({**tiny().tree, "layers": tiny().tree["layers"][:1]}), "layers: expected 2 layers, found 1"),
    "layers by name": (made({**tiny().tree, "layers": {}}), "params.layers: expected a list of 2 layers, found dict"),
    "a layer": (made({**tiny().tree, "layers": [0, 1]}), r"params.layers\[0\]: expected a dict of tensors, found int"),
    "no tree": (made([tiny().tree]), "params.tree: expected a dict with .*, found list"),
}  # fmt: skip


@pytest.mark.parametrize("call", [
    lambda params: fnllm.generate(params, [[1, 2, 3]], GREEDY, **SMALL),
    lambda params: fnllm.stream(params, [[1, 2, 3]], GREEDY, **SMALL),
    lambda params: fnllm.engine(params, **SMALL),
    lambda params: fnllm.score(params, [[1, 2, 3]]),
], ids=["generate", "stream", "engine", "score"])  # fmt: skip
@pytest.mark.parametrize("case", WRONG)
def test_the_leaf_is_named_before_anything_is_built(case, call):
    params, message = WRONG[case]
    params = params._replace(workspace={})
    with pytest.raises(ValueError, match=message):
        call(params)
    assert not params.workspace


def test_other_fields_are_named():
    with pytest.raises(TypeError, match=r"^params.config must be a ModelConfig, found dict"):
        fnllm.engine(Params({}, None, tiny().tree))
    with pytest.raises(TypeError, match=r"^params.shard must be a Shard, found tuple \(0, 1\)"):
        fnllm.engine(Params(tiny().config, None, tiny().tree, (0, 1)))


def test_a_good_tree_runs():
    params = changed()
    done = fnllm.generate(params, [[1, 2, 3]], GREEDY, **SMALL)[0]
    assert done.token_ids == fnllm.generate(tiny(), [[1, 2, 3]], GREEDY, **SMALL)[0].token_ids


class Half(NamedTuple):
    """A weight in two parts."""

    left: torch.Tensor
    right: torch.Tensor


def halves(weight: torch.Tensor) -> Half:
    return Half(weight / 2, weight / 2)


def test_a_function_of_ones_own_reads_what_it_likes():
    """Other leaves, none of the usual ones, or weights of another form: only what the usual functions read is asked."""
    wanted = fnllm.generate(tiny(), [[1, 2, 3]], GREEDY, **SMALL)[0].token_ids
    layers = [
        {("mine" if name == "down" else name): leaf for name, leaf in layer.items()} for layer in tiny().tree["layers"]
    ]

    def mlp(p, x, ctx):
        return fnllm.layers.mlp({**p, "down": p["mine"]} if "mine" in p else p, x, ctx)

    renamed = made({**tiny().tree, "layers": layers})
    assert fnllm.generate(renamed, [[1, 2, 3]], GREEDY, layers=USUAL._replace(mlp=mlp), **SMALL)[0].token_ids == wanted
    with pytest.raises(ValueError, match=r"layers\[0\].mine: "):
        fnllm.generate(renamed, [[1, 2, 3]], GREEDY, layers=USUAL._replace(lm_head=lambda p, x, ctx: x @ p.T), **SMALL)
    with pytest.raises(ValueError, match=r"layers\[1\].q_norm: .* found nothing"):
        fnllm.generate(changed(q_norm=None), [[1, 2, 3]], GREEDY, layers=USUAL._replace(mlp=mlp), **SMALL)


def test_an_embedding_of_another_form():
    params = made({**tiny().tree, "embed": halves(tiny().tree["embed"])})

    def embed(p, ids, ctx):
        return F.embedding(ids, p.left) + F.embedding(ids, p.right)

    done = fnllm.generate(params, [[1, 2, 3]], GREEDY, layers=USUAL._replace(embed=embed), **SMALL)[0]
    assert done.token_ids == fnllm.generate(tiny(), [[1, 2, 3]], GREEDY, **SMALL)[0].token_ids
    with pytest.raises(ValueError, match="params.embed: .*, found Half"):
        fnllm.generate(params, [[1, 2, 3]], GREEDY, **SMALL)
