"""Accepting the sampled tokens of a step (`commit`): filled blocks become shareable, sequences end."""

from typing import Any

import numpy as np
from jaxtyping import Bool, Int32, Integer

from .evolve import evolve
from .lifecycle import end
from .pool import publish
from .recent import record, sampled
from .request import Sequence, cut_tokens, known, root
from .residency import store
from .rows import STOP_BITS, begin_block, read_only
from .state import Events, Finished, Plan, SchedulerState, shares

NO_EVENTS = Events(0, np.zeros(0, np.int32), np.zeros(0, np.int32), (), ())


def commit(state: SchedulerState, plan: Plan, tokens: Integer[np.ndarray, " B"]) -> tuple[SchedulerState, Events]:
    """Accepts the tokens that the device sampled for `plan`, one for each entry (ignored where nothing is sampled).

    Tokens of sequences that have ended, or were truncated or appended to since the plan, are dropped; those of
    preempted ones are kept. Raises ValueError unless plans come in their order with a token for each entry.
    """
    tokens = _checked(state, plan, tokens)
    rows, roster, size = state.rows, state.roster, state.config.block_size
    # A token that may stop a sequence; the few that come through are looked at one by one.
    ending = rows.stops.take(tokens & STOP_BITS)
    if roster is not None and plan.rows is roster.rows:
        # Only decode entries, and no row has changed hands since the plan: nothing has to be looked up.
        here = accepted = None
        row, new, length = roster.index, tokens, rows.known + roster.advance
        # A token is the last of a block if the next one begins a block; all blocks before that one are filled.
        full, full_ids = begin_block(roster, plan.step + 1)
        full_blocks = [count + 1 for count in rows.filled.take(full).tolist()]
        if plan.step + 1 >= roster.until:
            ending |= length[row] >= rows.limit[row]
    else:
        # The row of an entry may belong to another sequence by now, or to the same one after a new start.
        here = (rows.seq_id.take(plan.rows) == plan.seq_ids) & (rows.joined.take(plan.rows) <= plan.step)
        accepted = here & plan.samples
        ends, row, new = plan.starts + plan.query_lens, plan.rows[accepted], tokens[accepted]
        length = rows.known.copy()
        length[row] += 1
        filling = (here & (ends // size > rows.filled.take(plan.rows))).nonzero()[0]
        full, full_ids = plan.rows.take(filling), plan.seq_ids.take(filling)
        full_blocks = (ends.take(filling) // size).tolist()
        ending = here & (ends + plan.samples >= rows.limit.take(plan.rows)) | accepted & ending
    changes, columns = _fill_blocks(state, full, full_ids, full_blocks) if len(full) else ({}, {})
    rows = evolve(rows, known=read_only(length), recent=record(rows.recent, row, new, plan.step), **columns)
    counters = evolve(state.counters, accepted_tokens=state.counters.accepted_tokens + len(new))
    state = evolve(state, rows=rows, next_commit=plan.step + 1, counters=counters, **changes)
    finished: list[Finished] = []
    entries = ending.nonzero()[0]
    if entries.size:
        state, finished = _finish(state, plan, tokens, entries)
    if here is not None and np.count_nonzero(here) < len(here):
        state, late, ended = _accept_late(state, plan, tokens, plan.samples & ~here)
        accepted, finished = accepted | late, finished + ended
    events = evolve(
        NO_EVENTS,
        step=plan.step,
        seq_ids=plan.seq_ids if accepted is None else read_only(plan.seq_ids[accepted]),
        tokens=tokens if accepted is None else read_only(tokens[accepted]),
        finished=tuple(finished),
        cached=tuple([(join.seq_id, join.cached) for join in plan.joins if join.first]),
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
    state: SchedulerState,
    taken: Int32[np.ndarray, " E"],
    seq_ids: Int32[np.ndarray, " E"],
    last_blocks: list[int],
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Moves the tokens of blocks that the step has filled into their sequences and publishes the blocks.

    Given are these rows, their sequences, and how many of their blocks are full now. Returns the changed fields of the
    state and of its rows.
    """
    rows = state.rows
    first_blocks, filled = rows.filled.take(taken).tolist(), rows.filled.copy()
    filled.put(taken, last_blocks)
    recent = sampled(rows.recent, taken, state.next_commit)
    sequences, items, moved = state.sequences.mutate(), [], []
    for seq_id, first, last, tokens in zip(seq_ids.tolist(), first_blocks, last_blocks, recent, strict=True):
        sequence: Sequence = sequences[seq_id]
        blocks, tail, numbers, new = sequence.blocks, sequence.tail, sequence.numbers, -1
        if len(blocks) < last:  # the block was completed by sampled tokens
            blocks, tail = blocks + (tail + tokens[len(tail) :],), b""
        if shares(state, sequence):
            for index in range(first, last):
                key = (numbers[index - 1] if index else root(sequence), blocks[index])
                items.append((key, sequence.table[index], numbers[index] if index < len(numbers) else -1, seq_id))
            new = len(items) - 1 if len(numbers) < last else -1
        if blocks is not sequence.blocks:  # a prompt's blocks have their numbers from the start
            moved.append((seq_id, sequence, blocks, tail, new))
    pool, given = publish(state.pool, items)
    for seq_id, sequence, blocks, tail, new in moved:
        numbers = sequence.numbers + (given[new],) if new >= 0 else sequence.numbers
        sequences[seq_id] = evolve(sequence, blocks=blocks, tail=tail, numbers=numbers)
    return {"sequences": sequences.finish(), "pool": pool}, {"filled": read_only(filled)}


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
    return end(state, {seq_id: reason for seq_id, reason, _ in finished}) if finished else state, finished


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
