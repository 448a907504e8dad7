"""A trial of swapped functions before they are compiled; errors name the function.

Two eager steps on padding, one with prefill chunks and one of decode, check every swapped layer function and every
edit. They run once for each set of layers, so the steps themselves carry no checks. A `logits_fn` is tried alone,
before its request is queued.
"""

import functools
import inspect
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fnllm.batch import StepInputs
from fnllm.buckets import padding
from fnllm.compiled import Resident
from fnllm.context import Context
from fnllm.edits import Channel, name_of
from fnllm.held import writes_to
from fnllm.layers import Layers
from fnllm.rows import send
from fnllm.sampler import History, Sampled, SamplerFeatures
from fnllm.step import StepSpec, step
from fnllm_weights import ParamTree

TOKENS = 3


def try_step(tree: ParamTree, resident: Resident, spec: StepSpec, *, traced: bool) -> None:
    """Run the spec's step on padding, with prefill chunks and as a decode step, with its swapped functions watched.

    Raises ValueError for a wrong shape, TypeError for a wrong type or dtype or a function that torch.compile cannot
    trace (with `traced`), RuntimeError for a changed argument; errors of the functions themselves come through as they
    are.
    """
    cache, rows, rope = resident
    reached: set[str] = set()
    edits = watched_edits(spec.edits, reached, spec.layers if traced else None)
    trial = replace(spec, layers=watched_layers(spec.layers, traced=traced), edits=edits)
    sites = (*spec.capture, *(channel.site for channel in spec.edits))
    for tokens in (TOKENS, None):
        host = padding(TOKENS, tokens, 1, rows.length.shape[0] - 1)
        inputs = StepInputs(*(None if x is None else send(torch.from_numpy(x), rows.length.device) for x in host))
        reached.clear()
        _, output = step(tree, cache, rows, inputs, rope, spec=trial, max_seqlen=TOKENS)
        check_reached(spec.layers, sites, reached | output.captured.keys())


def try_logits_fn(function: Callable[..., Any], vocab_size: int, device: torch.device, *, traced: bool) -> None:
    """Call a request's logits_fn on some logits and a history of one token each; raises as `try_step`."""
    logits = torch.linspace(-4, 4, TOKENS * vocab_size, dtype=torch.float32, device=device).view(TOKENS, vocab_size)
    one = torch.ones(TOKENS, dtype=torch.int64, device=device)
    history = History(torch.zeros(TOKENS, 8, dtype=torch.int32, device=device), one, one.clone())
    with torch.no_grad():
        watched("logits_fn", function, lambda logits, history: like(logits), Layers() if traced else None)(
            logits, history
        )


def watched_layers(layers: Layers, *, traced: bool = False) -> Layers:
    """The layers with every swapped function watched."""
    changed = {
        name: watched(f"layers.{name}", mine, EXPECTED[name], layers if traced else None)
        for name, mine in layers.swapped().items()
    }
    return layers._replace(**changed)


def watched_edits(channels: Sequence[Channel], reached: set[str], traced: Layers | None = None) -> tuple[Channel, ...]:
    """The channels with every function watched; the sites at which one is called are put into `reached`."""

    def watch(channel: Channel) -> Channel:
        run = watched(f"the edit at {channel.site}", channel.apply, None, traced)

        @functools.wraps(channel.apply)
        def apply(x: Tensor, ctx: Any, *values: Tensor) -> Tensor:
            reached.add(channel.site)
            return run(x, ctx, *values)

        return channel._replace(apply=apply)

    return tuple(watch(channel) for channel in channels)


def check_reached(layers: Layers, sites: Iterable[str], reached: Collection[str]) -> None:
    """Raise ValueError for a site that a swapped attention leaves out: there nothing is captured, and no edit acts."""
    for site in sites:
        if site not in reached:
            name = site.rpartition(".")[2]
            raise ValueError(
                f"nothing passes the site {site}: layers.attention ({name_of(layers.attention)}) leaves it out; add "
                f"{name} = ctx.tap({name!r}, {name}) to that function, or capture and edit at another site"
            )


def watched(
    where: str, function: Callable[..., Any], expected: Callable[..., Any] | None, traced: Layers | None
) -> Callable[..., Any]:
    """The function with its result and its arguments checked; with `traced`, these layers, also whether it compiles."""
    called = f"{where} ({name_of(function)})"
    check_trace = None if traced is None else tracer(called, function, traced)

    @functools.wraps(function)
    def run(*args: Any, **named: Any) -> Any:
        before = [(name, x, writes_to(x)) for name, x in leaves(args)]
        y = call(called, function, expected, args, named)
        for name, x, seen in before:
            if writes_to(x) != seen:
                raise RuntimeError(
                    f"{called} changed its {name} in place, which other functions still read: return a new tensor "
                    "(x + y, not x += y)"
                )
        if expected is compare_sampled:
            compare_sampled(called, y, *args, **named)
        elif expected is not None:
            compare(called, y, expected(*args))
        if check_trace is not None:
            check_trace(*args, **named)
        return y

    return run


def call(
    called: str, function: Callable[..., Any], expected: Callable[..., Any] | None, args: tuple, named: dict
) -> Any:
    """The function's result; TypeError that says how it is called when it takes other arguments."""
    try:
        return function(*args, **named)
    except TypeError:
        try:
            inspect.signature(function).bind(*args, **named)
        except TypeError as error:
            raise TypeError(f"{called} is called with {form_of(expected)}: {error}") from None
        except ValueError:  # a builtin that does not tell
            pass
        raise


def form_of(expected: Callable[..., Any] | None) -> str:
    """The arguments of a watched function, as its definition names them."""
    if expected is None:
        return "(x, ctx, *values)"
    return "(logits, rows, positions, **settings)" if expected is compare_sampled else str(inspect.signature(expected))


def tracer(called: str, function: Callable[..., Any], layers: Layers) -> Callable[..., None]:
    """Raises TypeError, with the reason, when torch.compile cannot trace the function as a whole for some arguments.

    As in a step, which calls these `layers`, the layer's index is a constant: a function that looks something up by it
    is traced for each layer.
    """
    from torch._dynamo.exc import TorchDynamoException  # takes seconds to import
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # may come through unwrapped

    def run(*args: Any, **named: Any) -> Any:
        return function(*args, **named)

    # A code object of its own, since torch.compile counts recompilations by it and takes what differs from one caller's
    # sizes for changing. There may be as many as layers.
    own = types.FunctionType(run.__code__.replace(), run.__globals__, "traced", None, run.__closure__)
    compiled = torch.compile(own, backend="eager", fullgraph=True, dynamic=False)
    unlimited = {"recompile_limit": 10**6, "accumulated_recompile_limit": 10**6}

    def trace(*args: Any, **named: Any) -> None:
        try:
            with torch._dynamo.config.patch(unlimited):
                compiled(*(unwatched(x, layers) if isinstance(x, Context) else x for x in args), **named)
        except (TorchDynamoException, GuardOnDataDependentSymNode) as error:
            reason = " ".join(str(error).split("\n\n")[0].split())
            raise TypeError(
                f"{called} cannot be traced by torch.compile: {reason}. Write it without branches on tensor values, "
                ".item() and effects, or run it as it is with compile='none'"
            ) from error

    return trace


def unwatched(ctx: Context, layers: Layers) -> Context:
    """The context with the functions themselves, and without the eager step's plan of attention, which is no input."""
    edits = tuple(edit._replace(apply=edit.apply.__wrapped__) for edit in ctx.taps.edits)
    return ctx._replace(layers=layers, metadata=None, taps=ctx.taps._replace(edits=edits))


def compare(called: str, y: Any, wanted: tuple[tuple[int, ...], torch.dtype] | None) -> None:
    """Raise ValueError for another shape, TypeError for another type or dtype; `wanted` None checks nothing."""
    if wanted is None:
        return
    shape, dtype = wanted
    if not isinstance(y, Tensor):
        raise TypeError(f"{called} must return a tensor of shape {shape} and {dtype}, found {type(y).__name__}")
    if tuple(y.shape) != shape:
        unseen = "; these are padding, which is no sequence's: cu_seqlens counts none of them, and each has its row"
        raise ValueError(
            f"{called} must return shape {shape} (in this trial of {TOKENS} tokens), found {tuple(y.shape)}; a step "
            "has one row for each of its tokens, and state across steps lives in the cache alone"
            f"{unseen if y.shape[:1] == (0,) else ''}"
        )
    if y.dtype != dtype:
        raise TypeError(f"{called} must return {dtype}, found {y.dtype}; cast the result with .to(x.dtype)")


def compare_sampled(called: str, y: Any, logits: Tensor, *args: Any, features: SamplerFeatures, **named: Any) -> None:
    """Raise TypeError or ValueError unless `y` is what `sample` returns for these logits."""
    if not isinstance(y, Sampled):
        raise TypeError(f"{called} must return a fnllm.sampler.Sampled, found {type(y).__name__}; as in Sampled(ids)")
    rows, floating = logits.shape[0], torch.promote_types(logits.dtype, torch.float32)
    compare(f"{called}: Sampled.ids", y.ids, ((rows,), torch.int64))
    if features.logprobs is not None:
        compare(f"{called}: Sampled.logprob, which logprobs needs,", y.logprob, ((rows,), floating))
    if features.logprobs:
        width = min(features.logprobs, y.top_ids.shape[-1]) if isinstance(y.top_ids, Tensor) else features.logprobs
        compare(f"{called}: Sampled.top_ids", y.top_ids, ((rows, width), torch.int64))
        compare(f"{called}: Sampled.top_logprobs", y.top_logprobs, ((rows, width), floating))


def leaves(args: tuple) -> Iterator[tuple[str, Tensor]]:
    """Tensors among a function's arguments, in dicts and in a history among them, with names; what `ctx` holds is not
    its own."""
    for index, arg in enumerate(args):
        if isinstance(arg, Tensor):
            yield f"argument {index + 1}", arg
        elif isinstance(arg, dict):
            yield from ((f"parameter {key!r}", x) for key, x in arg.items() if isinstance(x, Tensor))
        elif isinstance(arg, History):
            yield from ((f"history.{name}", x) for name, x in zip(arg._fields, arg, strict=True))


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
    "sample": compare_sampled,
}
