"""The engine's state as a value, and the pure functions that edit it between steps."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex

from fnllm import scheduler
from fnllm.capture import needs_whole_prompt
from fnllm.prompts import check_ids
from fnllm.rope import longest_shared, turned_otherwise
from fnllm.sampler import child_seed
from fnllm.sampling import check_seed
from fnllm.scheduler import Request, SchedulerState
from fnllm_weights import ModelConfig


@dataclass(frozen=True, repr=False)
class State:
    """All requests of an engine and the cache blocks they use; any state may be kept and continued later.

    `clock` is the last step of the machine that this state knows of; blocks written later are recomputed. `flights` are
    the steps that were launched and not yet collected, oldest first, each as its machine's name and clock.
    """

    scheduler: SchedulerState
    clock: int
    variant: Any  # the layers, edits and captures that compute what the cache holds
    config: ModelConfig  # of the model that computes it
    machine: str  # whose cache that is
    flights: tuple[tuple[str, int], ...] = ()

    def __repr__(self) -> str:
        now = scheduler.metrics(self.scheduler)
        return f"State({now.running} running, {now.waiting} waiting, {now.kept} kept; fnllm.show lists the blocks)"


def add(state: State, request: Request) -> tuple[State, int]:
    """Queue a request made by `engine.request`; returns the new state and the id of its sequence.

    Raises ValueError if the request can never fit, or has token ids that the model does not have.
    """
    check_state(state)
    if not isinstance(request, Request):
        raise TypeError(f"request must be what engine.request returns, found {type(request).__name__}")
    check_ids("prompt", request.prompt, state.config.vocab_size)
    planned, seq_id = scheduler.add(state.scheduler, request)
    return replace(state, scheduler=planned), seq_id


def add_all(state: State, requests: Collection[Request]) -> tuple[State, list[int]]:
    """`add` for several requests in their order, all or none of them, at a fraction of the cost."""
    planned, seq_ids = scheduler.add_all(state.scheduler, requests)
    return replace(state, scheduler=planned), seq_ids


def fork(state: State, seq_id: int, *, seed: SupportsIndex | None = None) -> tuple[State, int]:
    """Copy a sequence, sharing its full cache blocks; returns the new state and the copy's id.

    A drawn token depends only on seed, position and logits, so without a new `seed` the copy continues as its parent.
    The copy of a sequence that has ended has ended too; `append` continues it.
    """
    check_sequence(state, seq_id)
    if seed is not None:
        seed = check_seed("seed", seed)
    planned, new_id = scheduler.fork(state.scheduler, seq_id)
    if seed is not None:
        sequence = planned.sequences[new_id]
        request = replace(sequence.request, payload=sequence.request.payload._replace(seed=child_seed(seed, 0)))
        planned = replace(planned, sequences=planned.sequences.set(new_id, replace(sequence, request=request)))
    return replace(state, scheduler=planned), new_id


def append(state: State, seq_id: int, tokens: Sequence[int] = (), *, max_tokens: int | None = None) -> State:
    """Append tokens to a sequence and let it continue for `max_tokens` more (None: those of its request).

    It continues as if all its tokens were the prompt. If the rope scaling gives a prompt of that length other rotary
    angles, its keys are computed again. Raises ValueError for ids outside the vocabulary, and for more tokens than the
    engine can ever run.
    """
    check_sequence(state, seq_id)
    if not isinstance(tokens, Iterable):
        raise TypeError(f"tokens must be a list of token ids, found {type(tokens).__name__} {tokens!r}")
    tokens = tuple(tokens)
    if tokens:
        tokens = check_ids("tokens", tokens, state.config.vocab_size)
    planned = scheduler.append(state.scheduler, seq_id, tokens, max_tokens)
    planned = with_own_angles(state, planned, seq_id)
    sequence = planned.sequences[seq_id]
    captured = needs_whole_prompt(sequence.request.payload.capture, sequence.prompt_len)
    if captured or not may_share(state.config, sequence.prompt_len):
        # The new tokens are captured, or turned by the new length: they must be computed, not found.
        alone = replace(sequence, request=replace(sequence.request, use_cache=False), numbers=())
        planned = replace(planned, sequences=planned.sequences.set(seq_id, alone))
    return replace(state, scheduler=planned)


def may_share(config: ModelConfig, prompt_length: int) -> bool:
    """Whether a prompt may have keys in common with others."""
    longest = longest_shared(config)
    return longest is None or prompt_length <= longest


def truncate(state: State, seq_id: int, length: int) -> State:
    """Cut a sequence back to its first `length` tokens; it continues from there unless it has ended.

    If this shortens the prompt, its keys may have to be computed again, see `append`. Raises ValueError for a length of
    less than 1 or more than the tokens so far.
    """
    check_sequence(state, seq_id)
    planned = scheduler.truncate(state.scheduler, seq_id, length)
    return replace(state, scheduler=with_own_angles(state, planned, seq_id))


def with_own_angles(state: State, changed: SchedulerState, seq_id: int) -> SchedulerState:
    """The changed state, where the sequence's keys are dropped if a prompt of its new length has other angles.

    After a preemption it would get those angles, and its tokens must not depend on preemption.
    """
    before, after = (one.sequences[seq_id].prompt_len for one in (state.scheduler, changed))
    if turned_otherwise(state.config, before, after):
        return scheduler.preempt(changed, seq_id)
    return changed


def finish(state: State, seq_id: int, reason: str) -> State:
    """End a sequence with a `reason` of your choice; its tokens stay in the state, and `append` continues it.

    Raises ValueError for a sequence that has ended already.
    """
    check_sequence(state, seq_id)
    return replace(state, scheduler=scheduler.finish(state.scheduler, seq_id, reason))


def abort(state: State, seq_id: int) -> State:
    """Remove a sequence from the state, with its tokens."""
    check_sequence(state, seq_id)
    return replace(state, scheduler=scheduler.abort(state.scheduler, seq_id))


def tokens(state: State, seq_id: int) -> tuple[int, ...]:
    """The tokens of a sequence so far: prompt and output."""
    check_sequence(state, seq_id)
    return scheduler.tokens(state.scheduler, seq_id)


def show(state: State) -> str:
    """A readable text of the block tables, and of which sequences share blocks."""
    check_state(state)
    return scheduler.show(state.scheduler)


def check_sequence(state: Any, seq_id: Any) -> None:
    """Raise TypeError unless `state` is a State and `seq_id` an integer."""
    check_state(state)
    if not isinstance(seq_id, SupportsIndex) or isinstance(seq_id, bool):
        raise TypeError(f"seq_id must be an integer, as add and fork return it beside the state; found {seq_id!r}")


def check_state(state: Any) -> None:
    """Raise TypeError unless `state` is a State, and not, say, the pair that a function returned."""
    if not isinstance(state, State):
        advice = ": it comes first in what add, fork and engine.step return" if isinstance(state, tuple) else ""
        raise TypeError(f"state must be a fnllm.State, found {type(state).__name__}{advice}")
