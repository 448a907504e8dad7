"""`schedule`: which tokens of which sequences the next step computes."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from .admit import Entrant, admit
from .config import blocks_for, max_running
from .evolve import evolve
from .pool import idle, take
from .request import slice_tokens
from .residency import reclaim_newest
from .state import EMPTY, Join, Plan, Roster, Rows, SchedulerState, read_only, update_rows

NONE = read_only(np.zeros(0, np.int32))
NEVER = 2**62


class Work(NamedTuple):
    """What the running sequences would do in the next step, and the blocks that takes."""

    roster: Roster
    starts: Int32[np.ndarray, " D"]  # of the roster's rows
    grow: np.ndarray  # places in the roster of those whose token begins a block
    prefill: list[tuple[int, int, int]]  # (row, start, chunk)
    blocks: int
    reserved: int  # blocks that the rest of these prompts will need


def schedule(state: SchedulerState) -> tuple[SchedulerState, Plan | None]:
    """The plan of the next step, or None when there is nothing to compute before a commit.

    Every running sequence that can decode does; prompts share the rest of the token budget, oldest first, then waiting
    sequences are admitted. When the running sequences need more blocks than are idle, the newest gives up its own.
    May be called again before the plan is committed; tokens that are not known yet count as pending.
    """
    work = _wanted(state)
    while work.blocks > idle(state.pool):
        state = reclaim_newest(state)
        work = _wanted(state)
    state, updates = _grow_tables(state, work) if work.blocks else (state, [])
    prefill, entrants = work.prefill, []
    if state.waiting and state.running < max_running(state.config):
        used = len(work.starts) + sum(chunk for _, _, chunk in prefill)
        state, entrants = admit(state, state.config.max_num_batched_tokens - used, work.reserved)
        prefill = prefill + [(entrant.row, entrant.start, entrant.chunk) for entrant in entrants]
    if not prefill and not len(work.starts):
        return state, None
    return _issue(state, work, prefill, entrants, updates)


def _wanted(state: SchedulerState) -> Work:
    rows, config, size = state.rows, state.config, state.config.block_size
    roster = state.roster
    if roster is None or state.next_step >= roster.until:
        roster = _make_roster(rows, state.next_step)
    starts = rows.computed[roster.index]
    grow = (starts % size == 0).nonzero()[0]
    blocks, reserved, prefill = len(grow), 0, []
    budget = config.max_num_batched_tokens - len(starts)
    for seq_id in state.prefilling:
        row = state.sequences[seq_id].row
        start, known = int(rows.computed[row]), int(rows.known[row])
        chunk = min(known - start, budget, config.max_chunk or known)
        held, after = blocks_for(start, size), blocks_for(start + chunk, size)
        blocks += after - held
        reserved += blocks_for(known, size) - after
        budget -= chunk
        if chunk:
            prefill.append((row, start, chunk))
    return Work(roster, starts, grow, prefill, blocks, reserved)


def _make_roster(rows: Rows, step: int) -> Roster:
    left = rows.limit - rows.computed - 1  # tokens that may still be sampled
    taken = ((rows.seq_id != EMPTY) & rows.decoding & (left > 0)).nonzero()[0].astype(np.int32)
    count = len(taken)
    contiguous = count > 0 and taken[0] == 0 and taken[-1] == count - 1
    return Roster(
        index=slice(0, count) if contiguous else taken,
        tails=taken.astype(np.intp) * rows.tail.shape[1],
        rows=read_only(taken),
        seq_ids=read_only(rows.seq_id[taken]),
        query_lens=read_only(np.ones(count, np.int32)),
        samples=read_only(np.ones(count, bool)),
        until=step + int(left[taken].min()) if count else NEVER,
    )


def _grow_tables(state: SchedulerState, work: Work) -> tuple[SchedulerState, list[tuple[int, int, int]]]:
    """Takes the blocks that running sequences need and returns the (row, column, block) of each."""
    size, ids = state.config.block_size, state.rows.seq_id
    pool, fresh = take(state.pool, work.blocks)
    grow = work.grow
    needs = list(zip(work.roster.rows[grow].tolist(), work.roster.seq_ids[grow].tolist(), [1] * len(grow), strict=True))
    for row, start, chunk in work.prefill:
        needs.append((row, int(ids[row]), blocks_for(start + chunk, size) - blocks_for(start, size)))
    sequences, updates, used = state.sequences.mutate(), [], 0
    for row, seq_id, count in needs:
        if count:
            sequence = sequences[seq_id]
            table, own, used = sequence.table, fresh[used : used + count], used + count
            updates += [(row, column, block) for column, block in enumerate(own, len(table))]
            sequences[seq_id] = evolve(sequence, table=(*table, *own))
    return evolve(state, pool=pool, sequences=sequences.finish()), updates


def _issue(
    state: SchedulerState,
    work: Work,
    prefill: list[tuple[int, int, int]],
    entrants: list[Entrant],
    updates: list[tuple[int, int, int]],
) -> tuple[SchedulerState, Plan]:
    """Counts the work as done and writes it down."""
    rows, roster = state.rows, work.roster
    computed = rows.computed.copy()
    computed[roster.index] += 1
    columns: dict[str, np.ndarray] = {"computed": computed}
    changes: dict[str, Any] = {"roster": roster}
    taken, seq_ids, starts, lens, samples = roster.rows, roster.seq_ids, work.starts, roster.query_lens, roster.samples
    tokens = NONE
    if prefill:
        row, start, chunk = np.array(prefill, np.int32).T
        known = rows.known[row]
        computed[row] = ends = start + chunk
        sampling = (ends == known) & (known < rows.limit[row])
        tokens = np.frombuffer(b"".join(_prompt_tokens(state, *entry) for entry in prefill), np.int32)
        taken, seq_ids = np.concatenate([taken, row]), np.concatenate([seq_ids, rows.seq_id[row]])
        starts, lens = np.concatenate([starts, start]), np.concatenate([lens, chunk])
        samples = np.concatenate([samples, sampling])
        columns["decoding"] = rows.decoding.copy()
        columns["decoding"][row] = sampling
        done = set(rows.seq_id[row[ends == known]].tolist())
        changes["prefilling"] = tuple(seq_id for seq_id in state.prefilling if seq_id not in done)
        changes["roster"] = None if sampling.any() else roster
    updated, at, blocks = _columns(updates, 3)
    sources, targets = _columns(state.copies, 2)
    plan = Plan(
        step=state.next_step,
        rows=read_only(taken),
        seq_ids=read_only(seq_ids),
        starts=read_only(starts),
        query_lens=read_only(lens),
        num_decode=len(work.starts),
        prefill_tokens=tokens,
        samples=read_only(samples),
        joins=tuple(_join(state, entrant) for entrant in entrants),
        table_updates=(updated, at, blocks),
        copies=(sources, targets),
    )
    counters = state.counters
    counters = evolve(
        counters,
        prefill_tokens=counters.prefill_tokens + len(tokens),
        decode_tokens=counters.decode_tokens + len(work.starts),
        cached_tokens=counters.cached_tokens + sum(entrant.cached for entrant in entrants),
    )
    changes |= {"rows": update_rows(rows, **columns), "copies": (), "counters": counters}
    return evolve(state, next_step=state.next_step + 1, **changes), plan


def _prompt_tokens(state: SchedulerState, row: int, start: int, chunk: int) -> bytes:
    sequence = state.sequences[int(state.rows.seq_id[row])]
    return slice_tokens(sequence, start, start + chunk, state.config.block_size)


def _join(state: SchedulerState, entrant: Entrant) -> Join:
    table = read_only(np.array(state.sequences[entrant.seq_id].table, np.int32))
    return Join(entrant.row, entrant.seq_id, entrant.start, table, entrant.cached, entrant.first)


def _columns(entries: list[tuple[int, ...]] | tuple[tuple[int, ...], ...], width: int) -> tuple[np.ndarray, ...]:
    if not entries:
        return (NONE,) * width
    return tuple(read_only(column) for column in np.array(entries, np.int32).T.copy())
