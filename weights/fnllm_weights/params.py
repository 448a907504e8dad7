"""Params: config, tokenizer and this rank's tree of tensors; its shapes as types, and a check of a tree against them.

Axes: H hidden, N query heads, K KV heads, D head dim, I MLP width, V vocabulary rows, E experts. Sizes are this rank's;
QKV = (N + 2 K) D rows: all query heads, then all key heads, then all value heads; two_I: gate rows, then up rows.
"""

import functools
from collections.abc import Collection, Iterator, Mapping
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
    """A loaded model, or one rank's shard of it: what `load` returns and `generate` takes.

    A changed model is `params._replace(tree=...)`. Only `tree` enters the compiled step.
    """

    config: ModelConfig
    tokenizer: "Tokenizer | None"
    tree: ParamTree
    shard: Shard = WHOLE
    workspace: dict | None = None  # machines built for these params, reused by later calls; None: built for each call

    def __repr__(self) -> str:
        config = self.config  # of the tensors not even a part: there are hundreds
        return (
            f"Params({config.architecture} of {config.num_hidden_layers} layers, hidden_size={config.hidden_size}, "
            f"vocab_size={config.vocab_size}, rank {self.shard.rank} of {self.shard.size})"
        )


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
    """Every (path, leaf) of a tree; a tied head comes twice."""
    parts: dict[str, Any] = {**tree}
    for key, part in parts.items():
        if key != "layers":
            yield (key,), part
            continue
        for index, layer in enumerate(part):
            for name, leaf in layer.items():
                yield (key, index, name), leaf


def check_params(params: Params) -> Params:
    """Return the params if `check_tree` accepts them and a tied head is the embedding tensor; otherwise ValueError."""
    check_tree(params)
    if params.config.tie_word_embeddings and params.tree["lm_head"].data_ptr() != params.tree["embed"].data_ptr():
        raise ValueError(
            "params.lm_head: expected the tensor of params.embed (tie_word_embeddings), found a copy; put that "
            "there, or set tie_word_embeddings=False in the config"
        )
    return params


def check_tree(
    params: Params, *, optional: Collection[str] = (), of_any_form: Collection[str] = (), more: bool = False
) -> None:
    """Check that each leaf exists and has the shape that config and shard imply, and that all share dtype and device.

    Leaves named in `optional` may be missing, leaves named in `of_any_form` are not checked, and with `more` a layer
    may hold additional leaves. Reads no tensor's values. Raises ValueError such as
    `params.layers[1].post_norm: expected Float[H]=(8,), found (9,)`.
    """
    _check_nesting(params)
    expected, found = _shapes(params.config, params.shard), dict(walk(params.tree))
    for path in (path for path in found if path not in expected):
        if not (more and len(path) == 3):
            known = sorted({str(each[-1]) for each in expected if each[:-1] == path[:-1]})
            own = "; a leaf of your own needs a swapped attention, mlp or moe that reads it, and is saved apart"
            raise ValueError(
                f"params.{path_name(path)}: {params.config.architecture} has no such tensor with this config, only "
                f"{', '.join(known)}{own if len(path) == 3 else ''}"
            )
    checked = {}
    for path, shape in expected.items():
        leaf = found.get(path)
        if path[-1] in (optional if leaf is None else of_any_form):
            continue
        if not isinstance(leaf, Tensor) or leaf.shape != shape or not leaf.dtype.is_floating_point:
            raise ValueError(
                f"params.{path_name(path)}: expected Float[{_axes(path)}]={shape}, found {_form(leaf, shape)}"
            )
        checked[path] = leaf
    if len({(leaf.dtype, leaf.device) for leaf in checked.values()}) > 1:
        _refuse_mixture(checked)


def _check_nesting(params: Params) -> None:
    """Raise ValueError unless the tree is a dict that holds a list of dicts, one for each layer."""
    tree, count = params.tree, params.config.num_hidden_layers
    if not isinstance(tree, Mapping):
        raise ValueError(f"params.tree: expected a dict with embed, layers, norm, lm_head, found {type(tree).__name__}")
    layers = tree.get("layers")
    if not isinstance(layers, list | tuple):
        found = "nothing" if layers is None else type(layers).__name__
        raise ValueError(f"params.layers: expected a list of {count} layers, found {found}")
    if len(layers) != count:
        raise ValueError(f"params.layers: expected {count} layers, found {len(layers)}")
    for index, layer in enumerate(layers):
        if not isinstance(layer, Mapping):
            raise ValueError(f"params.layers[{index}]: expected a dict of tensors, found {type(layer).__name__}")


@functools.lru_cache(maxsize=16)
def _shapes(config: ModelConfig, shard: Shard) -> dict[Path, tuple[int, ...]]:
    """The shape of each leaf of this rank's tree."""
    shapes = {leaf.path: leaf.shape for leaf in leaves(config, shard)}
    if config.tie_word_embeddings:
        shapes[("lm_head",)] = shapes[("embed",)]
    return shapes


def _refuse_mixture(leaves: Mapping[Path, Tensor]) -> None:
    """Raise ValueError for the first leaf of another dtype or device than the first leaf's."""
    first_path, first = next(iter(leaves.items()))
    for path, tensor in leaves.items():
        for what in ("dtype", "device"):
            if getattr(tensor, what) != getattr(first, what):
                raise ValueError(
                    f"params.{path_name(path)}: expected {what} {getattr(first, what)} as params."
                    f"{path_name(first_path)} has, found {getattr(tensor, what)}"
                )


def _form(leaf: Any, shape: tuple[int, ...]) -> Any:
    """What is wrong with a leaf that should be floating-point numbers of a shape."""
    if leaf is None:
        return "nothing"
    if not isinstance(leaf, Tensor):
        return f"{type(leaf).__name__}, which only a swapped function can read"
    return leaf.dtype if tuple(leaf.shape) == shape else tuple(leaf.shape)


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
