"""`schedule`: which tokens of which sequences the next step computes."""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from .admit import Entrant, admit
from .config import blocks_for, max_running
from .evolve import evolve
from .pool import idle, take
from .request import Sequence, slice_tokens
from .residency import reclaim_newest
from .rows import Roster, begin_block, make_roster, read_only, update_rows
from .state import Join, Plan, SchedulerState

NONE = read_only(np.zeros(0, np.int32))
EMPTY_PLAN = Plan(0, NONE, NONE, NONE, NONE, 0, NONE, read_only(np.zeros(0, bool)), (), (NONE,) * 3, (NONE,) * 2)
Updates = tuple[Int32[np.ndarray, " U"], Int32[np.ndarray, " U"], Int32[np.ndarray, " U"]]


class Work(NamedTuple):
    """What the running sequences would do in the next step, and the blocks that takes."""

    roster: Roster
    starts: Int32[np.ndarray, " D"]  # of the roster's rows
    grow: tuple[Int32[np.ndarray, " G"], Int32[np.ndarray, " G"]]  # rows and ids of those whose token begins a block
    prefill: list[tuple[int, int, int]]  # (row, start, chunk)
    blocks: int
    reserved: int  # blocks that the rest of these prompts will need


def schedule(
    state: SchedulerState, version: Callable[[], Hashable] = lambda: None
) -> tuple[SchedulerState, Plan | None]:
    """The plan of the next step, or None when there is nothing to compute before a commit.

    Every running sequence that can decode does; prompts share the rest of the token budget, oldest first, then waiting
    sequences are admitted. When the running sequences need more blocks than are idle, the newest gives up its own.
    May be called again before the plan is committed; tokens that are not known yet count as pending.

    `version()` names the weights that will compute the plan. It is asked, once, if a sequence may get its first block:
    whatever it holds from then on shares with, and is found by, only those whose first block had the same.
    """
    work = _wanted(state)
    while work.blocks > idle(state.pool):
        state = reclaim_newest(state)
        work = _wanted(state)
    state, updates = _grow_tables(state, work) if work.blocks else (state, (NONE,) * 3)
    prefill, entrants = work.prefill, []
    if state.waiting and state.running < max_running(state.config):
        used = len(work.starts) + sum(chunk for _, _, chunk in prefill)
        state, entrants = admit(state, state.config.max_num_batched_tokens - used, work.reserved, version)
        prefill = prefill + [(entrant.row, entrant.start, entrant.chunk) for entrant in entrants]
    if not prefill and not len(work.starts):
        return state, None
    return _issue(state, work, prefill, entrants, updates)


def _wanted(state: SchedulerState) -> Work:
    rows, config, size = state.rows, state.config, state.config.block_size
    roster = state.roster
    if roster is None or state.next_step >= roster.until:
        roster = make_roster(rows, state.next_step, size)
    starts = read_only(rows.computed[roster.index])
    grow = begin_block(roster, state.next_step)
    blocks, reserved, prefill = len(grow[0]), 0, []
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


def _grow_tables(state: SchedulerState, work: Work) -> tuple[SchedulerState, Updates]:
    """Takes the blocks that running sequences need, and returns the row, column and block of each."""
    size, (rows, seq_ids) = state.config.block_size, work.grow
    pool, fresh = take(state.pool, work.blocks)
    sequences, columns = state.sequences.mutate(), []
    for seq_id, block in zip(seq_ids.tolist(), fresh, strict=False):  # the rest is for prompts
        sequence: Sequence = sequences[seq_id]
        columns.append(len(sequence.table))
        sequences[seq_id] = evolve(sequence, table=sequence.table + (block,))
    if len(fresh) > len(columns):
        prompt_rows: list[int] = []
        for row, start, chunk in work.prefill:
            seq_id, first, last = int(state.rows.seq_id[row]), blocks_for(start, size), blocks_for(start + chunk, size)
            own = fresh[len(columns) : len(columns) + last - first]
            prompt_rows += [row] * len(own)
            columns += range(first, last)
            sequences[seq_id] = evolve(sequences[seq_id], table=sequences[seq_id].table + tuple(own))
        rows = read_only(np.concatenate([rows, np.array(prompt_rows, np.int32)]))
    updates = (rows, read_only(np.array(columns, np.int32)), read_only(np.array(fresh, np.int32)))
    return evolve(state, pool=pool, sequences=sequences.finish()), updates


def _issue(
    state: SchedulerState,
    work: Work,
    prefill: list[tuple[int, int, int]],
    entrants: list[Entrant],
    updates: Updates,
) -> tuple[SchedulerState, Plan]:
    """Counts the work as done and writes it down."""
    rows, roster = state.rows, work.roster
    computed = rows.computed + roster.advance
    columns: dict[str, np.ndarray] = {"computed": computed}
    changes: dict[str, Any] = {"roster": roster}
    taken, seq_ids, starts, lens, samples = roster.rows, roster.seq_ids, work.starts, roster.query_lens, roster.samples
    tokens = NONE
    if prefill:
        row, start, chunk = np.array(prefill, np.int32).T
        known = rows.known.take(row)
        computed[row] = ends = start + chunk
        sampling = (ends == known) & (known < rows.limit.take(row))
        tokens = np.frombuffer(b"".join(_prompt_tokens(state, *entry) for entry in prefill), np.int32)
        ids = rows.seq_id.take(row)
        pairs = (taken, row), (seq_ids, ids), (starts, start), (lens, chunk), (samples, sampling)
        taken, seq_ids, starts, lens, samples = (read_only(np.concatenate(pair)) for pair in pairs)
        columns["decoding"] = rows.decoding.copy()
        columns["decoding"][row] = sampling
        done = set(ids[ends == known].tolist())
        changes["prefilling"] = tuple(seq_id for seq_id in state.prefilling if seq_id not in done)
        changes["roster"] = None if sampling.any() else roster
    plan = evolve(
        EMPTY_PLAN,
        step=state.next_step,
        rows=taken,
        seq_ids=seq_ids,
        starts=starts,
        query_lens=lens,
        num_decode=len(work.starts),
        prefill_tokens=tokens,
        samples=samples,
        joins=tuple([_join(state, entrant) for entrant in entrants]),
        table_updates=updates,
        copies=_columns(state.copies),
    )
    counters = state.counters
    counters = evolve(
        counters,
        prefill_tokens=counters.prefill_tokens + len(tokens),
        decode_tokens=counters.decode_tokens + len(work.starts),
        cached_tokens=counters.cached_tokens + sum([entrant.cached for entrant in entrants]),
    )
    changes |= {"rows": update_rows(rows, **columns), "copies": (), "counters": counters}
    return evolve(state, next_step=state.next_step + 1, **changes), plan


def _prompt_tokens(state: SchedulerState, row: int, start: int, chunk: int) -> bytes:
    sequence = state.sequences[int(state.rows.seq_id[row])]
    return slice_tokens(sequence, start, start + chunk, state.config.block_size)


def _join(state: SchedulerState, entrant: Entrant) -> Join:
    table = read_only(np.array(state.sequences[entrant.seq_id].table, np.int32))
    return Join(entrant.row, entrant.seq_id, entrant.start, table, entrant.cached, entrant.first)


def _columns(copies: tuple[tuple[int, int], ...]) -> tuple[Int32[np.ndarray, " C"], Int32[np.ndarray, " C"]]:
    if not copies:
        return NONE, NONE
    sources, targets = np.array(copies, np.int32).T.copy()
    return read_only(sources), read_only(targets)
