"""A log of events on a state, as data; running it gives the same tokens and block tables each time."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from fnllm import state as edits
from fnllm.engines import Engine
from fnllm.state import State


class Event(NamedTuple):
    """One call on a state: its name, and the arguments after the state."""

    name: str
    args: tuple = ()
    options: tuple[tuple[str, Any], ...] = ()


def event(name: str, *args: Any, **options: Any) -> Event:
    """An entry of a log, such as `event("add", prompt, sampling, seed=1)`, `event("step")` or `event("fork", 0)`.

    Lists and iterators are copied. Raises ValueError for an unknown name and TypeError for arguments that the named
    function does not take. "add" takes the arguments of `Engine.request`, other names those of the function of fnllm.
    """
    if name not in EVENTS:
        close = difflib.get_close_matches(name, EVENTS, n=1)
        advice = f"did you mean {close[0]!r}?" if close else f"known: {sorted(EVENTS)}"
        raise ValueError(f"unknown event {name!r}; {advice}")
    check_arguments(name, args, options)
    return Event(name, tuple(map(as_now, args)), tuple((key, as_now(value)) for key, value in options.items()))


def as_now(x: Any) -> Any:
    """A series as it is now: its caller may change it later, and an iterator gives its items only once."""
    if isinstance(x, str | bytes | Mapping) or not isinstance(x, Iterable) or getattr(x, "ndim", 1) == 0:
        return x
    listed = getattr(x, "tolist", None)  # of arrays and tensors, whose items may be views
    return tuple(x if listed is None else listed())


def check_arguments(name: str, args: tuple, options: Mapping[str, Any]) -> None:
    """Raise TypeError for what an event of this name does not take after its state."""
    known = inspect.signature(EVENTS[name])
    own = [p for key, p in known.parameters.items() if key not in ("self", "engine", "state")]
    taken = known.replace(parameters=own, return_annotation=inspect.Signature.empty)
    try:
        taken.bind(*args, **options)
    except TypeError as error:
        raise TypeError(f"event {name!r} takes {taken} after the state: {error}") from None


def apply(engine: Engine, state: State, entry: Event) -> tuple[State, Any]:
    """Run one event: the new state and its result (an id for add and fork, a `StepEvents` for step, otherwise None)."""
    if not isinstance(entry, Event):
        raise TypeError(f"a log is a list of fnllm.event(...), found {entry!r}")
    result = EVENTS[entry.name](engine, state, *entry.args, **dict(entry.options))
    return result if isinstance(result, tuple) else (result, None)


def replay(engine: Engine, log: Iterable[Event], state: State | None = None) -> tuple[State, list[Any]]:
    """Run a log from a state (None: an empty one): the last state, and the result of each event.

    Equal states and logs give equal block tables. They give equal tokens under numerics="batch_invariant"; in the
    default mode, as far as equal batches round equally. This holds only while no other engine or call steps on the same
    machine: recomputing blocks that others overwrote takes steps, so that an entry such as "append" finds fewer tokens.
    """
    state, results = engine.init() if state is None else state, []
    for entry in log:
        state, result = apply(engine, state, entry)
        results.append(result)
    return state, results


@functools.wraps(Engine.request)
def _add(engine: Engine, state: State, *args: Any, **options: Any) -> tuple[State, int]:
    return edits.add(state, engine.request(*args, **options))


@functools.wraps(Engine.step)
def _step(engine: Engine, state: State) -> tuple[State, Any]:
    return engine.step(state)


def _edit(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(engine: Engine, state: State, *args: Any, **options: Any) -> Any:
        return function(state, *args, **options)

    return run


EVENTS: dict[str, Callable[..., Any]] = {
    "add": _add,
    "step": _step,
    "fork": _edit(edits.fork),
    "append": _edit(edits.append),
    "truncate": _edit(edits.truncate),
    "finish": _edit(edits.finish),
    "abort": _edit(edits.abort),
}
