"""`schedule`: which tokens of which sequences the next step computes."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from .admit import Entrant, admit
from .config import blocks_for
from .pool import idle, take
from .request import slice_tokens
from .residency import reclaim_newest
from .state import EMPTY, Join, Plan, SchedulerState, read_only, update_rows

NONE = read_only(np.zeros(0, np.int32))


class Work(NamedTuple):
    """What the running sequences would do in the next step, and the blocks that takes."""

    decode: Int32[np.ndarray, " D"]  # rows that compute the token they sampled last
    grow: Int32[np.ndarray, " G"]  # those of them whose token begins a block
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
    state, updates = _grow_tables(state, work)
    used = len(work.decode) + sum(chunk for _, _, chunk in work.prefill)
    entrants: list[Entrant] = []
    if state.waiting:
        state, entrants = admit(state, state.config.max_num_batched_tokens - used, work.reserved)
    prefill = work.prefill + [(entrant.row, entrant.start, entrant.chunk) for entrant in entrants]
    if not prefill and not work.decode.size:
        return state, None
    return _issue(state, work.decode, prefill, entrants, updates)


def _wanted(state: SchedulerState) -> Work:
    rows, config, size = state.rows, state.config, state.config.block_size
    running = rows.seq_id != EMPTY
    decode = np.flatnonzero(running & rows.decoding & (rows.known + rows.pending < rows.limit))
    grow = decode[rows.computed[decode] % size == 0]
    blocks, reserved, prefill = len(grow), 0, []
    waiting = np.flatnonzero(running & ~rows.decoding & (rows.computed < rows.known))
    budget = config.max_num_batched_tokens - len(decode)
    for row in waiting[np.argsort(rows.seq_id[waiting])].tolist():
        start, known = int(rows.computed[row]), int(rows.known[row])
        chunk = min(known - start, budget, config.max_chunk or known)
        held, after = blocks_for(start, size), blocks_for(start + chunk, size)
        blocks += after - held
        reserved += blocks_for(known, size) - after
        budget -= chunk
        if chunk:
            prefill.append((row, start, chunk))
    return Work(decode.astype(np.int32), grow, prefill, blocks, reserved)


def _grow_tables(state: SchedulerState, work: Work) -> tuple[SchedulerState, list[tuple[int, int, int]]]:
    """Takes the blocks that running sequences need and returns the (row, column, block) of each."""
    if not work.blocks:
        return state, []
    size = state.config.block_size
    pool, fresh = take(state.pool, work.blocks)
    needs = [(row, 1) for row in work.grow.tolist()]
    needs += [(row, blocks_for(start + chunk, size) - blocks_for(start, size)) for row, start, chunk in work.prefill]
    sequences, updates, used = state.sequences.mutate(), [], 0
    ids = state.rows.seq_id
    for row, count in needs:
        if count:
            sequence = sequences[int(ids[row])]
            own, used = fresh[used : used + count], used + count
            updates.extend((row, len(sequence.table) + column, block) for column, block in enumerate(own))
            sequences[int(ids[row])] = sequence._replace(table=(*sequence.table, *own))
    return replace(state, pool=pool, sequences=sequences.finish()), updates


def _issue(
    state: SchedulerState,
    decode: Int32[np.ndarray, " D"],
    prefill: list[tuple[int, int, int]],
    entrants: list[Entrant],
    updates: list[tuple[int, int, int]],
) -> tuple[SchedulerState, Plan]:
    """Counts the work as done and writes it down."""
    rows = state.rows
    taken, chunks, samples, tokens, decoding = decode, np.ones_like(decode), np.ones(len(decode), bool), NONE, None
    if prefill:
        others = np.array(prefill, np.int32)
        row, start, chunk = others.T
        last = start + chunk == rows.known[row]
        tokens = np.frombuffer(b"".join(_prompt_tokens(state, *entry) for entry in prefill), np.int32)
        taken, chunks = np.concatenate([decode, row]), np.concatenate([chunks, chunk])
        samples = np.concatenate([samples, last & (rows.known[row] < rows.limit[row])])
        decoding = rows.decoding.copy()
        decoding[row] = last
    starts = rows.computed[taken]
    computed, pending = rows.computed.copy(), rows.pending.copy()
    computed[taken] += chunks
    pending[taken] += samples
    seq_ids = rows.seq_id[taken]
    columns = {"computed": computed, "pending": pending} | ({} if decoding is None else {"decoding": decoding})
    plan = Plan(
        step=state.next_step,
        rows=read_only(taken),
        seq_ids=read_only(seq_ids),
        starts=read_only(starts),
        query_lens=read_only(chunks),
        num_decode=len(decode),
        prefill_tokens=tokens,
        samples=read_only(samples),
        joins=tuple(_join(state, entrant) for entrant in entrants),
        table_updates=_columns(updates, 3),
        copies=_columns(state.copies, 2),
    )
    counters = state.counters
    counters = counters._replace(
        prefill_tokens=counters.prefill_tokens + len(tokens),
        decode_tokens=counters.decode_tokens + len(decode),
        cached_tokens=counters.cached_tokens + sum(entrant.cached for entrant in entrants),
    )
    return replace(
        state,
        rows=update_rows(rows, **columns),
        copies=(),
        next_step=state.next_step + 1,
        counters=counters,
    ), plan


def _prompt_tokens(state: SchedulerState, row: int, start: int, chunk: int) -> bytes:
    sequence = state.sequences[int(state.rows.seq_id[row])]
    return slice_tokens(sequence, start, start + chunk, state.config.block_size)


def _join(state: SchedulerState, entrant: Entrant) -> Join:
    table = read_only(np.array(state.sequences[entrant.seq_id].table, np.int32))
    return Join(entrant.row, entrant.seq_id, entrant.start, table, entrant.cached, entrant.first)


def _columns(entries: list[tuple[int, ...]] | tuple[tuple[int, ...], ...], width: int) -> tuple[np.ndarray, ...]:
    if not entries:
        return (NONE,) * width
    return tuple(read_only(np.ascontiguousarray(column)) for column in np.array(entries, np.int32).T)
