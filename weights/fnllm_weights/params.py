"""Params: config, tokenizer and this rank's tree of tensors; its shapes as types, and a check of a tree against them.

Axes: H hidden, N query heads, K KV heads, D head dim, I MLP width, V vocabulary rows, E experts. Sizes are this rank's;
QKV = (N + 2 K) D rows: all query heads, then all key heads, then all value heads; two_I: gate rows, then up rows.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, get_type_hints

import torch
from jaxtyping import Float
from torch import Tensor

from .config import ModelConfig
from .shard import WHOLE, Path, Shard, leaves, path_name

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


class EveryLayer(TypedDict):
    """What each decoder layer has."""

    input_norm: Float[Tensor, " H"]
    qkv: Float[Tensor, "QKV H"]
    o: Float[Tensor, "H ND"]
    post_norm: Float[Tensor, " H"]


class LayerParams(EveryLayer, total=False):
    """One decoder layer; dense layers have gate_up and down, sparse ones router and experts."""

    qkv_bias: Float[Tensor, " QKV"]
    q_norm: Float[Tensor, " D"]
    k_norm: Float[Tensor, " D"]
    o_bias: Float[Tensor, " H"]
    gate_up: Float[Tensor, "two_I H"]
    gate_up_bias: Float[Tensor, " two_I"]
    down: Float[Tensor, "H I"]
    down_bias: Float[Tensor, " H"]
    router: Float[Tensor, "E H"]
    experts_gate_up: Float[Tensor, "E two_I H"]
    experts_down: Float[Tensor, "E H I"]


class ParamTree(TypedDict):
    """The whole model; with tied embeddings lm_head is the same tensor as embed."""

    embed: Float[Tensor, "V H"]
    layers: list[LayerParams]
    norm: Float[Tensor, " H"]
    lm_head: Float[Tensor, "V H"]


class Params(NamedTuple):
    """What `load` returns and `generate` takes; only `tree` enters the compiled step."""

    config: ModelConfig
    tokenizer: "Tokenizer | None"
    tree: ParamTree
    shard: Shard = WHOLE
    workspace: dict | None = None  # engines built for these params, so that a second generate builds nothing


def build_tree(config: ModelConfig, tensors: Mapping[Path, Tensor]) -> ParamTree:
    """Nest tensors by their paths; a tied lm_head becomes the embedding tensor itself."""
    layers: list[Any] = [{} for _ in range(config.num_hidden_layers)]
    for path, tensor in tensors.items():
        if len(path) == 3:
            _, index, name = path
            layers[int(index)][name] = tensor
    embed = tensors[("embed",)]
    head = embed if config.tie_word_embeddings else tensors[("lm_head",)]
    return {"embed": embed, "layers": layers, "norm": tensors[("norm",)], "lm_head": head}


def walk(tree: ParamTree) -> Iterator[tuple[Path, Tensor]]:
    """Every (path, tensor) of a tree; a tied head comes twice."""
    parts: dict[str, Any] = {**tree}
    for key, part in parts.items():
        if isinstance(part, Tensor):
            yield (key,), part
            continue
        for index, layer in enumerate(part):
            for name, tensor in layer.items():
                yield (key, index, name), tensor


def check_params(params: Params) -> Params:
    """The params, if each tensor has the shape that config and shard ask for and all share one dtype and device.

    Raises ValueError such as `params.layers[1].post_norm: expected Float[H]=(8,), found (9,)`.
    """
    expected = {leaf.path: leaf.shape for leaf in leaves(params.config, params.shard)}
    if params.config.tie_word_embeddings:
        expected[("lm_head",)] = expected[("embed",)]
    if len(params.tree["layers"]) != params.config.num_hidden_layers:
        raise ValueError(
            f"params.layers: expected {params.config.num_hidden_layers} layers, found {len(params.tree['layers'])}"
        )
    found = dict(walk(params.tree))
    for path in [*expected, *found]:
        name = f"params.{path_name(path)}"
        if path not in expected:
            raise ValueError(f"{name}: {params.config.architecture} has no such tensor with this config")
        rule = f"expected Float[{_axes(path)}]={expected[path]}"
        if path not in found:
            raise ValueError(f"{name}: {rule}, found nothing")
        tensor = found[path]
        if not isinstance(tensor, Tensor) or not tensor.dtype.is_floating_point:
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{name}: {rule}, found {kind}")
        if tuple(tensor.shape) != expected[path]:
            raise ValueError(f"{name}: {rule}, found {tuple(tensor.shape)}")
    _check_alike(found)
    if params.config.tie_word_embeddings and params.tree["lm_head"].data_ptr() != params.tree["embed"].data_ptr():
        raise ValueError("params.lm_head: expected the tensor of params.embed (tie_word_embeddings), found a copy")
    return params


def _check_alike(found: Mapping[Path, Tensor]) -> None:
    first_path, first = next(iter(found.items()))
    for path, tensor in found.items():
        for what in ("dtype", "device"):
            if getattr(tensor, what) != getattr(first, what):
                raise ValueError(
                    f"params.{path_name(path)}: expected {what} {getattr(first, what)} as params."
                    f"{path_name(first_path)} has, found {getattr(tensor, what)}"
                )


def _axes(path: Path) -> str:
    hints = get_type_hints(LayerParams if path[0] == "layers" else ParamTree)
    return hints[str(path[-1])].dim_str


DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "float64")
}  # float64 for checks of gradients


def as_dtype(value: str | torch.dtype) -> torch.dtype:
    """float32, float16, bfloat16 or float64 by name or as a torch.dtype; ValueError for anything else."""
    dtype = DTYPES.get(value.removeprefix("torch.")) if isinstance(value, str) else value
    if dtype is None or dtype not in DTYPES.values():
        raise ValueError(f"dtype={value!r} is not supported; use one of {', '.join(DTYPES)}")
    return dtype
