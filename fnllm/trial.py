"""A trial of swapped functions before they are compiled: what is wrong is said with the function's name.

One eager step on padding, in which every swapped layer function and every edit is watched. It runs once for each
variant of the layers, so steps themselves carry no checks.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fnllm.batch import StepInputs
from fnllm.compiled import Resident
from fnllm.edits import name_of
from fnllm.layers import Layers
from fnllm.step import StepSpec, step

TOKENS = 3


def try_step(tree: dict, resident: Resident, spec: StepSpec, *, traced: bool) -> None:
    """Run the spec's step once on padding, with its swapped functions watched.

    Raises ValueError for a wrong shape, TypeError for a wrong type or dtype or a function that torch.compile cannot
    trace (with `traced`), RuntimeError for a changed argument; errors of the functions themselves come through as they
    are.
    """
    device = resident.rows.length.device
    padding = resident.rows.length.shape[0] - 1
    inputs = StepInputs(
        row=torch.full((TOKENS,), padding, device=device),
        accept=torch.zeros(TOKENS, dtype=torch.bool, device=device),
        cu_seqlens=torch.zeros(TOKENS + 1, dtype=torch.int32, device=device),
        token_ids=torch.zeros(TOKENS, dtype=torch.int64, device=device),
        entry=torch.full((TOKENS,), TOKENS, device=device),
        captured=torch.zeros(1, dtype=torch.int64, device=device),
    )
    edits = tuple(c._replace(apply=watched(f"the edit at {c.site}", c.apply, None, None)) for c in spec.edits)
    spec = replace(spec, layers=watched_layers(spec.layers, traced=traced), edits=edits)
    step(tree, resident.cache, resident.rows, inputs, resident.rope, spec=spec, max_seqlen=TOKENS)


def watched_layers(layers: Layers, *, traced: bool = False) -> Layers:
    """The layers with every swapped function watched."""
    changed = {
        name: watched(f"layers.{name}", mine, EXPECTED[name], layers if traced else None)
        for name, mine, usual in zip(Layers._fields, layers, Layers(), strict=True)
        if mine is not usual
    }
    return layers._replace(**changed)


def watched(
    where: str, function: Callable[..., Any], expected: Callable[..., Any] | None, traced: Layers | None
) -> Callable[..., Any]:
    """The function with its result and its arguments checked; with `traced`, these layers, also whether it compiles."""
    called = f"{where} ({name_of(function)})"

    @functools.wraps(function)
    def run(*args: Any, **named: Any) -> Any:
        before = [(name, x, version(x)) for name, x in leaves(args)]
        y = function(*args, **named)
        for name, x, seen in before:
            if version(x) != seen:
                raise RuntimeError(
                    f"{called} changed its {name} in place; others still read it: return a new tensor "
                    "(x + y, not x += y)"
                )
        if expected is not None:
            compare(called, y, expected(*args))
        if traced is not None:
            trace(called, function, [a._replace(layers=traced) if hasattr(a, "layers") else a for a in args], named)
        return y

    return run


def trace(called: str, function: Callable[..., Any], args: list, named: dict) -> None:
    """Raise TypeError, with the reason, when torch.compile cannot trace the function as a whole."""
    from torch._dynamo.exc import TorchDynamoException  # takes seconds to import

    try:
        torch.compile(function, backend="eager", fullgraph=True)(*args, **named)
    except TorchDynamoException as error:
        reason = " ".join(str(error).split("\n\n")[0].split())
        raise TypeError(
            f"{called} cannot be traced by torch.compile: {reason}. Write it without branches on tensor values, "
            ".item() and effects, or run it as it is with compile='none'"
        ) from error


def compare(called: str, y: Any, wanted: tuple[tuple[int, ...], torch.dtype] | None) -> None:
    """Raise ValueError for another shape, TypeError for another type or dtype; `wanted` None checks nothing."""
    if wanted is None:
        return
    shape, dtype = wanted
    if not isinstance(y, Tensor):
        raise TypeError(f"{called} must return a tensor of shape {shape} and {dtype}, found {type(y).__name__}")
    if tuple(y.shape) != shape:
        raise ValueError(
            f"{called} must return shape {shape} (in this trial of {TOKENS} tokens), found {tuple(y.shape)}; a step "
            "has one row for each of its tokens, and state across steps lives in the cache alone"
        )
    if y.dtype != dtype:
        raise TypeError(f"{called} must return {dtype}, found {y.dtype}; cast the result with .to(x.dtype)")


def version(x: Tensor) -> int:
    """Counts the writes to a tensor's memory."""
    return 0 if x.is_inference() else x._version


def leaves(args: tuple) -> Iterator[tuple[str, Tensor]]:
    """Tensors among a function's arguments, and in dicts among them, with names; what `ctx` holds is not its own."""
    for index, arg in enumerate(args):
        if isinstance(arg, Tensor):
            yield f"argument {index + 1}", arg
        elif isinstance(arg, dict):
            yield from ((f"parameter {key!r}", x) for key, x in arg.items() if isinstance(x, Tensor))


def like(x: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(x.shape), x.dtype


def mapped(p: Any, x: Tensor, ctx: Any) -> tuple[tuple[int, ...], torch.dtype] | None:
    return ((*x.shape[:-1], p.shape[0]), x.dtype) if isinstance(p, Tensor) else None


EXPECTED: dict[str, Callable[..., Any]] = {
    "embed": lambda p, ids, ctx: ((*ids.shape, ctx.config.hidden_size), p.dtype) if isinstance(p, Tensor) else None,
    "norm": lambda p, x, ctx: like(x),
    "linear": mapped,
    "attention": lambda p, x, ctx: like(x),
    "attend": lambda q, k, v, ctx: like(q),
    "mlp": lambda p, x, ctx: like(x),
    "moe": lambda p, x, ctx: like(x),
    "activation": lambda x, ctx: ((*x.shape[:-1], x.shape[-1] // 2), x.dtype),
    "lm_head": mapped,
    "sample": lambda logits, rows, positions: None,
}
