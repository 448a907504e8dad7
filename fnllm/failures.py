"""Requests whose next token could not be drawn, and their errors (pure)."""

from collections.abc import Collection

import numpy as np
from jaxtyping import Bool, Int32

from fnllm.edits import name_of
from fnllm.sampler import NAN_ID, NOTHING_ID
from fnllm.sampling import Sampling
from fnllm.scheduler import Plan, SchedulerState


def no_tokens(ids: Int32[np.ndarray, " B"], vocab_size: int) -> Bool[np.ndarray, " B"]:
    """Which ids are no tokens: as unsigned numbers the negative ones lie above all tokens."""
    return ids.view(np.uint32) >= vocab_size


def failures(
    state: SchedulerState, plan: Plan, ids: Int32[np.ndarray, " B"], vocab_size: int, broken: Collection[int]
) -> tuple[tuple[int, Exception], ...]:
    """(sequence, error) of every entry whose sequence waits for this step's token and got none.

    Also for a chunk of a prompt that follows one of the `broken` blocks: computed again, it would fail again.
    """
    found = []
    for entry in np.flatnonzero(no_tokens(ids, vocab_size)).tolist():
        seq_id = int(plan.seq_ids[entry])
        if not awaits(state, plan, seq_id):
            continue
        sequence = state.sequences[seq_id]
        if plan.samples[entry] or not set(broken).isdisjoint(sequence.table):
            place, sampling = int(plan.starts[entry] + plan.query_lens[entry]), sequence.request.payload.sampling
            found.append((seq_id, failure(int(ids[entry]), sampling, plan.step, place, vocab_size)))
    return tuple(found)


def awaits(state: SchedulerState, plan: Plan, seq_id: int) -> bool:
    """Whether `commit` would accept the plan's token of a sequence: it has not ended or been edited since."""
    sequence = state.sequences.get(seq_id)
    if sequence is None or sequence.reason is not None:
        return False
    if sequence.row >= 0:
        return int(state.rows.joined[sequence.row]) <= plan.step
    return sequence.pending > 0 and sequence.joined <= plan.step


def failure(id: int, sampling: Sampling, step: int, place: int, vocab_size: int) -> Exception:
    """The error for a request that got `id` instead of a token."""
    where = f"in step {step}, for the token at position {place},"
    function = sampling.logits_fn
    made = "" if function is None else f", or what logits_fn ({name_of(function)}) made of them,"
    if id == NAN_ID:
        return FloatingPointError(
            f"{where} the logits{made} hold NaN or infinity, so no token can be drawn; a weight, a swapped function or "
            "an edit makes them, and errors='return' with capture='layers.*.resid_post' shows where they begin"
            + ("; to force a token give all others -inf" if function else "")
        )
    if id == NOTHING_ID:
        return ValueError(
            f"{where} every token of the vocabulary has logit -inf, so none can be drawn; logits_fn, logit_bias and "
            "min_tokens together must leave one"
        )
    return ValueError(
        f"{where} layers.sample drew {id}; token ids are 0 to {vocab_size - 1}, and -1 says that a row's logits are NaN"
    )
