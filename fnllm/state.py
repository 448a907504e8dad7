"""The engine's state as a value, and the pure functions that edit it between steps."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fnllm import scheduler
from fnllm.prompts import check_ids
from fnllm.sampler import child_seed
from fnllm.sampling import check_seed
from fnllm.scheduler import Request, SchedulerState


@dataclass(frozen=True)
class State:
    """All requests of an engine and where their cache blocks lie; any state may be kept and continued later.

    `clock` says up to which step of the machine the cache holds what this state expects of it.
    """

    scheduler: SchedulerState
    clock: int = 0
    variant: Any = None  # the layers, edits and captures that compute what the cache holds
    vocab_size: int | None = None  # tokens that are appended must be below it
    machine: str = ""  # whose cache that is


def add(state: State, request: Request) -> tuple[State, int]:
    """Queue a request; returns its sequence's id. Raises ValueError if it can never fit."""
    return _with_id(state, scheduler.add(state.scheduler, request))


def fork(state: State, seq_id: int, *, seed: int | None = None) -> tuple[State, int]:
    """A second sequence with the same tokens, sharing full blocks; returns its id.

    A draw depends on seed, position and logits alone: without a seed of its own the fork goes on as its parent does.
    """
    if seed is not None:
        seed = check_seed("seed", seed)
    planned, new_id = scheduler.fork(state.scheduler, seq_id)
    if seed is not None:
        sequence = planned.sequences[new_id]
        request = replace(sequence.request, payload=sequence.request.payload._replace(seed=child_seed(seed, 0)))
        planned = replace(planned, sequences=planned.sequences.set(new_id, replace(sequence, request=request)))
    return replace(state, scheduler=planned), new_id


def append(state: State, seq_id: int, tokens: Sequence[int] = (), *, max_tokens: int | None = None) -> State:
    """Put tokens behind a sequence and let it go on, for `max_tokens` more (None: as its request says).

    Raises ValueError for ids outside the vocabulary, and for more tokens than can ever run.
    """
    if not isinstance(tokens, Iterable):
        raise TypeError(f"tokens must be a list of token ids, found {type(tokens).__name__} {tokens!r}")
    tokens = tuple(tokens)
    if tokens and state.vocab_size is not None:
        tokens = check_ids("tokens", tokens, state.vocab_size)
    return replace(state, scheduler=scheduler.append(state.scheduler, seq_id, tokens, max_tokens))


def truncate(state: State, seq_id: int, length: int) -> State:
    """Cut a sequence back to its first `length` tokens."""
    return replace(state, scheduler=scheduler.truncate(state.scheduler, seq_id, length))


def finish(state: State, seq_id: int, reason: str) -> State:
    """End a sequence; a kept one stays addressable."""
    return replace(state, scheduler=scheduler.finish(state.scheduler, seq_id, reason))


def abort(state: State, seq_id: int) -> State:
    """Drop a sequence and everything known of it."""
    return replace(state, scheduler=scheduler.abort(state.scheduler, seq_id))


def tokens(state: State, seq_id: int) -> tuple[int, ...]:
    """The known tokens of a sequence, prompt and output."""
    return scheduler.tokens(state.scheduler, seq_id)


def show(state: State) -> str:
    """Block tables, and who shares what, for a person to read."""
    return scheduler.show(state.scheduler)


def _with_id(state: State, result: tuple[SchedulerState, int]) -> tuple[State, int]:
    return replace(state, scheduler=result[0]), result[1]
