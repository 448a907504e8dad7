"""`commit`: the sampled tokens of a step come in; blocks it filled become shareable; sequences end."""

from dataclasses import replace

import numpy as np
from jaxtyping import Bool, Int32, Integer

from .lifecycle import end
from .pool import publish
from .request import Sequence, cut_tokens, key_of, known
from .residency import store
from .state import Events, Finished, Plan, SchedulerState, shares, update_rows


def commit(state: SchedulerState, plan: Plan, tokens: Integer[np.ndarray, " B"]) -> tuple[SchedulerState, Events]:
    """Accepts the tokens that the device sampled for `plan`, one for each entry (ignored where nothing is sampled).

    Tokens of sequences that have ended, or were truncated or appended to since the plan, are dropped; those of
    preempted ones are kept. Raises ValueError unless plans come in their order with a token for each entry.
    """
    if plan.step != state.next_commit:
        raise ValueError(f"plan.step={plan.step} is out of turn: the next plan to commit is {state.next_commit}")
    tokens = np.asarray(tokens)
    if tokens.shape != plan.rows.shape or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"tokens has shape {tokens.shape} and dtype {tokens.dtype}; "
            f"plan {plan.step} needs an integer for each of its {len(plan.rows)} entries"
        )
    rows, taken, ends = state.rows, plan.rows, plan.starts + plan.query_lens
    here = (rows.seq_id[taken] == plan.seq_ids) & (rows.joined[taken] <= plan.step)
    state = replace(_fill_blocks(state, plan, ends, here), next_commit=plan.step + 1)
    # The row of an entry that is no longer there may belong to another sequence: from here on only `here` entries
    # touch the arrays, the others are looked up one by one.
    accepted = here & plan.samples
    state, candidates = _accept(state, plan, tokens, ends, here, accepted)
    finished = []
    for index in candidates.tolist():
        seq_id, token = int(plan.seq_ids[index]), int(tokens[index]) if accepted[index] else None
        sequence: Sequence = state.sequences[seq_id]
        ending = _ending(sequence, int(state.rows.known[sequence.row]), token)
        if ending is not None:
            finished.append(Finished(seq_id, *ending))
    if finished:
        state = end(state, {seq_id: reason for seq_id, reason, _ in finished})
    if not here.all():
        for index in np.flatnonzero(plan.samples & ~here).tolist():
            state, accepted[index], late = _accept_late(state, plan, index, int(tokens[index]))
            finished += [late] if late else []
    counters = state.counters._replace(
        accepted_tokens=state.counters.accepted_tokens + int(np.count_nonzero(accepted)),
        finished=state.counters.finished + len(finished),
    )
    events = Events(
        step=plan.step,
        seq_ids=plan.seq_ids[accepted],
        tokens=tokens[accepted].astype(np.int32),
        finished=tuple(finished),
        cached=tuple((join.seq_id, join.cached) for join in plan.joins if join.first),
    )
    return replace(state, counters=counters), events


def _fill_blocks(
    state: SchedulerState, plan: Plan, ends: Int32[np.ndarray, " B"], here: Bool[np.ndarray, " B"]
) -> SchedulerState:
    """Moves the tokens of each block that the step has filled into its sequence and publishes the block."""
    rows, size = state.rows, state.config.block_size
    full = ends // size
    crossing = np.flatnonzero(here & (full > rows.filled[plan.rows]))
    if not crossing.size:
        return state
    taken = plan.rows[crossing]
    sequences, filled, items, moved = state.sequences.mutate(), rows.filled.copy(), [], []
    for row, seq_id, last in zip(taken.tolist(), plan.seq_ids[crossing].tolist(), full[crossing].tolist(), strict=True):
        sequence: Sequence = sequences[seq_id]
        if len(sequence.blocks) < last:  # the block was completed by sampled tokens: they are the row's tail
            sequence = sequence._replace(blocks=(*sequence.blocks, rows.tail[row].tobytes()))
        numbers = sequence.numbers
        first = int(filled[row]) if shares(state, sequence) else last
        for index in range(first, last):
            announced = numbers[index] if index < len(numbers) else -1
            items.append((key_of(sequence, index), sequence.table[index], announced))
        moved.append((seq_id, sequence, last - first, last))
    filled[taken] = full[crossing]
    pool, given = publish(state.pool, items)
    position = 0
    for seq_id, sequence, count, last in moved:
        position += count
        if count and len(sequence.numbers) < last:
            sequence = sequence._replace(numbers=(*sequence.numbers, given[position - 1]))
        sequences[seq_id] = sequence
    return replace(state, sequences=sequences.finish(), pool=pool, rows=update_rows(rows, filled=filled))


def _accept(
    state: SchedulerState,
    plan: Plan,
    tokens: Integer[np.ndarray, " B"],
    ends: Int32[np.ndarray, " B"],
    here: Bool[np.ndarray, " B"],
    accepted: Bool[np.ndarray, " B"],
) -> tuple[SchedulerState, Integer[np.ndarray, " E"]]:
    """Writes accepted tokens into the rows, and returns the entries whose sequence may have ended."""
    rows, taken = state.rows, plan.rows
    complete = here & (ends >= rows.known[taken])
    known, ends_by_id = rows.known, np.zeros(0, bool)
    if accepted.any():
        row, new = (taken, tokens) if accepted.all() else (taken[accepted], tokens[accepted])
        known, pending, tail = rows.known.copy(), rows.pending.copy(), rows.tail.copy()
        at = known[row]
        tail[row, at % state.config.block_size] = new
        known[row] = at + 1
        pending[row] -= 1
        rows = update_rows(rows, known=known, pending=pending, tail=tail)
        ends_by_id = accepted & _among(tokens, rows.stop_ids)
    over = complete & (known[taken] >= rows.limit[taken])
    return replace(state, rows=rows), np.flatnonzero(over | ends_by_id if ends_by_id.size else over)


def _among(tokens: Integer[np.ndarray, " B"], ids: Int32[np.ndarray, " K"]) -> Bool[np.ndarray, " B"]:
    """Where a token is one of the sorted `ids`."""
    if not ids.size:
        return np.zeros(len(tokens), bool)
    return ids[np.minimum(np.searchsorted(ids, tokens), len(ids) - 1)] == tokens


def _ending(sequence: Sequence, length: int, token: int | None) -> tuple[str, int | None] | None:
    """Why a sequence of `length` known tokens ends, if it does; `token` is the last one if it was sampled just now."""
    request = sequence.request
    if token is not None and token in request.stop_token_ids and length - 1 - sequence.prompt_len >= request.min_tokens:
        return "stop", token
    return ("length", None) if length >= sequence.limit else None


def _accept_late(
    state: SchedulerState, plan: Plan, index: int, token: int
) -> tuple[SchedulerState, bool, Finished | None]:
    """Accepts a token of a sequence that lost its row after the plan was made and waits for it."""
    seq_id = int(plan.seq_ids[index])
    sequence: Sequence | None = state.sequences.get(seq_id)
    if sequence is None or sequence.row >= 0 or not sequence.pending or sequence.joined > plan.step:
        return state, False, None
    blocks, tail = cut_tokens(sequence.tail + np.int32(token).tobytes(), state.config.block_size)
    sequence = sequence._replace(blocks=sequence.blocks + blocks, tail=tail, pending=sequence.pending - 1)
    state = store(state, seq_id, sequence)
    ending = _ending(sequence, known(sequence), token)
    if ending is None:
        return state, True, None
    return end(state, {seq_id: ending[0]}), True, Finished(seq_id, *ending)
