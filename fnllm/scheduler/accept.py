"""`commit`: the sampled tokens of a step come in; blocks it filled become shareable; sequences end."""

from typing import Any

import numpy as np
from jaxtyping import Bool, Int32, Integer

from .evolve import evolve
from .lifecycle import end
from .pool import publish
from .request import Sequence, cut_tokens, known, root
from .residency import store
from .state import STOP_BITS, Events, Finished, Plan, SchedulerState, read_only, shares, update_rows


def commit(state: SchedulerState, plan: Plan, tokens: Integer[np.ndarray, " B"]) -> tuple[SchedulerState, Events]:
    """Accepts the tokens that the device sampled for `plan`, one for each entry (ignored where nothing is sampled).

    Tokens of sequences that have ended, or were truncated or appended to since the plan, are dropped; those of
    preempted ones are kept. Raises ValueError unless plans come in their order with a token for each entry.
    """
    tokens = _checked(state, plan, tokens)
    rows, roster, ends, size = state.rows, state.roster, plan.starts + plan.query_lens, state.config.block_size
    # A token that may stop a sequence; the few that come through are looked at one by one.
    stopping = rows.stops[tokens & STOP_BITS]
    if roster is not None and plan.rows is roster.rows:
        # Only decode entries, and no row has changed hands since the plan: nothing has to be looked up.
        here = accepted = None
        row, tails, at, new = roster.index, roster.tails, ends, tokens
        places = at % size
        crossing = (places == 0).nonzero()[0]
        ending = stopping if plan.step + 1 < roster.until else stopping | (ends + 1 >= rows.limit[row])
    else:
        # The row of an entry may belong to another sequence by now, or to the same one after a new start.
        here = (rows.seq_id[plan.rows] == plan.seq_ids) & (rows.joined[plan.rows] <= plan.step)
        accepted = here & plan.samples
        row, at, new = plan.rows[accepted], ends[accepted], tokens[accepted]
        tails, places = row.astype(np.intp) * size, at % size
        crossing = (here & (ends // size > rows.filled[plan.rows])).nonzero()[0]
        ending = here & (ends + plan.samples >= rows.limit[plan.rows]) | accepted & stopping
    changes, columns = _fill_blocks(state, plan, ends, crossing) if crossing.size else ({}, {})
    tail, length = rows.tail.copy(), rows.known.copy()
    tail.reshape(-1)[tails + places] = new
    if accepted is not None:
        for entry in accepted[plan.num_decode :].nonzero()[0].tolist():  # the first tokens of their rows
            sequence: Sequence = state.sequences[int(plan.seq_ids[plan.num_decode + entry])]
            tail[sequence.row, : len(sequence.tail) // 4] = np.frombuffer(sequence.tail, np.int32)
    length[row] = at + 1
    rows = update_rows(rows, tail=tail, known=length, **columns)
    counters = evolve(state.counters, accepted_tokens=state.counters.accepted_tokens + len(new))
    state = evolve(state, rows=rows, next_commit=plan.step + 1, counters=counters, **changes)
    finished: list[Finished] = []
    entries = ending.nonzero()[0]
    if entries.size:
        state, finished = _finish(state, plan, tokens, entries)
    if here is not None and not here.all():
        state, late, ended = _accept_late(state, plan, tokens, plan.samples & ~here)
        accepted, finished = accepted | late, finished + ended
    events = Events(
        step=plan.step,
        seq_ids=plan.seq_ids if accepted is None else read_only(plan.seq_ids[accepted]),
        tokens=tokens if accepted is None else read_only(tokens[accepted]),
        finished=tuple(finished),
        cached=tuple((join.seq_id, join.cached) for join in plan.joins if join.first),
    )
    return state, events


def _checked(state: SchedulerState, plan: Plan, tokens: Integer[np.ndarray, " B"]) -> Int32[np.ndarray, " B"]:
    """A copy of the tokens as int32, if this plan's turn has come and they fit it."""
    if plan.step != state.next_commit:
        raise ValueError(f"plan.step={plan.step} is out of turn: the next plan to commit is {state.next_commit}")
    tokens = np.asarray(tokens)
    if tokens.shape != plan.rows.shape or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"tokens has shape {tokens.shape} and dtype {tokens.dtype}; "
            f"plan {plan.step} needs an integer for each of its {len(plan.rows)} entries"
        )
    return read_only(tokens.astype(np.int32))


def _fill_blocks(
    state: SchedulerState, plan: Plan, ends: Int32[np.ndarray, " B"], crossing: Integer[np.ndarray, " E"]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Moves the tokens of each block that the step has filled into its sequence and publishes the block.

    Returns the changed fields of the state and of its rows, for the entries `crossing`.
    """
    taken, last_blocks = plan.rows[crossing], ends[crossing] // state.config.block_size
    filled = state.rows.filled.copy()
    filled[taken] = last_blocks
    first_blocks = state.rows.filled[taken].tolist()
    sequences, items, moved = state.sequences.mutate(), [], []
    for row, seq_id, first, last in zip(
        taken.tolist(), plan.seq_ids[crossing].tolist(), first_blocks, last_blocks.tolist(), strict=True
    ):
        sequence: Sequence = sequences[seq_id]
        blocks, tail, numbers, new = sequence.blocks, sequence.tail, sequence.numbers, -1
        if len(blocks) < last:  # the block was completed by sampled tokens: they are the row's tail
            blocks, tail = (*blocks, state.rows.tail[row].tobytes()), b""
        if shares(state, sequence):
            for index in range(first, last):
                key = (numbers[index - 1] if index else root(sequence), blocks[index])
                items.append((key, sequence.table[index], numbers[index] if index < len(numbers) else -1, seq_id))
            new = len(items) - 1 if len(numbers) < last else -1
        if new >= 0 or blocks is not sequence.blocks:
            moved.append((seq_id, sequence, blocks, tail, new))
    pool, given = publish(state.pool, items)
    for seq_id, sequence, blocks, tail, new in moved:
        numbers = (*sequence.numbers, given[new]) if new >= 0 else sequence.numbers
        sequences[seq_id] = evolve(sequence, blocks=blocks, tail=tail, numbers=numbers)
    return {"sequences": sequences.finish(), "pool": pool}, {"filled": filled}


def _ending(sequence: Sequence, length: int, token: int | None) -> tuple[str, int | None] | None:
    """Why a sequence of `length` known tokens ends, if it does; `token` is the last one if it was sampled just now."""
    request = sequence.request
    if token is not None and token in request.stop_token_ids and length - 1 - sequence.prompt_len >= request.min_tokens:
        return "stop", token
    return ("length", None) if length >= sequence.limit else None


def _finish(
    state: SchedulerState, plan: Plan, tokens: Int32[np.ndarray, " B"], entries: Integer[np.ndarray, " E"]
) -> tuple[SchedulerState, list[Finished]]:
    """Ends those of the entries' sequences that really stop: a stop id may be another request's, or come too early."""
    finished = []
    for entry in entries.tolist():
        seq_id = int(plan.seq_ids[entry])
        sequence: Sequence = state.sequences[seq_id]
        length = int(state.rows.known[sequence.row])
        ending = _ending(sequence, length, int(tokens[entry]) if plan.samples[entry] else None)
        if ending is not None:
            finished.append(Finished(seq_id, *ending))
    return end(state, {seq_id: reason for seq_id, reason, _ in finished}), finished


def _accept_late(
    state: SchedulerState,
    plan: Plan,
    tokens: Int32[np.ndarray, " B"],
    gone: Bool[np.ndarray, " B"],
) -> tuple[SchedulerState, Bool[np.ndarray, " B"], list[Finished]]:
    """Accepts the tokens of sequences that lost their row after the plan and wait for them, and says which."""
    finished, accepted = [], np.zeros_like(gone)
    for entry in gone.nonzero()[0].tolist():
        seq_id, token = int(plan.seq_ids[entry]), int(tokens[entry])
        sequence: Sequence | None = state.sequences.get(seq_id)
        if sequence is None or sequence.row >= 0 or not sequence.pending or sequence.joined > plan.step:
            continue
        accepted[entry] = True
        blocks, tail = cut_tokens(sequence.tail + np.int32(token).tobytes(), state.config.block_size)
        sequence = evolve(sequence, blocks=sequence.blocks + blocks, tail=tail, pending=sequence.pending - 1)
        state = store(state, seq_id, sequence)
        counters = evolve(state.counters, accepted_tokens=state.counters.accepted_tokens + 1)
        state = evolve(state, counters=counters)
        ending = _ending(sequence, known(sequence), token)
        if ending is not None:
            state = end(state, {seq_id: ending[0]})
            finished.append(Finished(seq_id, *ending))
    return state, accepted, finished
