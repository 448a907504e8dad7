"""How a sequence leaves its row and releases blocks: the moves that all other changes of the state consist of."""

from collections.abc import Iterable

import numpy as np

from .config import blocks_for
from .evolve import evolve
from .line import push_back, push_front
from .pool import drop, idle, take, withdraw
from .request import Sequence, key_of, known
from .rows import EMPTY, in_flight, update_rows
from .state import SchedulerState, tail_of


def find(state: SchedulerState, seq_id: int) -> Sequence:
    """The record of a sequence; raises ValueError if there is none (never issued, ended and not kept, or aborted)."""
    sequence = state.sequences.get(seq_id)
    if sequence is None:
        raise ValueError(
            f"seq_id={seq_id!r} is not in this state: {len(state.sequences)} sequences are, ids below {state.next_id} "
            "were issued; one that was aborted, or ended and is not kept as an engine's requests are, is gone from "
            "here, and a state from before still has it"
        )
    return sequence


def leave(state: SchedulerState, seq_ids: Iterable[int]) -> SchedulerState:
    """Takes running sequences off their rows; they keep their blocks and are in no line until the caller says.

    Counters and tail move from the row arrays into the record. What was announced and is not filled is withdrawn.
    """
    rows, size, pool = state.rows, state.config.block_size, state.pool
    sequences, seq_id, left = state.sequences.mutate(), rows.seq_id.copy(), 0
    for number in seq_ids:
        sequence = sequences[number]
        row, left = sequence.row, left + 1
        filled, blocks = int(rows.filled[row]), sequence.blocks
        if filled < len(sequence.numbers):
            keys = [key_of(sequence, index) for index in range(filled, len(sequence.numbers))]
            pool = withdraw(pool, keys, number)
        tail = tail_of(state, sequence)
        if len(tail) == 4 * size:  # full, and its last token's step is not committed
            blocks, tail = (*blocks, tail), b""
        sequences[number] = evolve(
            sequence,
            blocks=blocks,
            tail=tail,
            numbers=sequence.numbers[:filled],
            filled=filled,
            computed=int(rows.computed[row]),
            pending=in_flight(rows, row),
            row=EMPTY,
        )
        seq_id[row] = EMPTY
    if not left:
        return state
    sequences_now = sequences.finish()
    return evolve(
        state,
        sequences=sequences_now,
        rows=update_rows(rows, seq_id=seq_id),
        pool=pool,
        running=state.running - left,
        prefilling=tuple(number for number in state.prefilling if sequences_now[number].row != EMPTY),
        roster=None,
    )


def drop_blocks(state: SchedulerState, table: tuple[int, ...]) -> SchedulerState:
    """Gives up one reference of each block, and the copies that were to fill a block nobody holds now."""
    pool = drop(state.pool, table)
    copies = tuple(copy for copy in state.copies if copy[1] in pool.blocks) if state.copies else ()
    return evolve(state, pool=pool, copies=copies)


def copy_block(state: SchedulerState, source: int) -> tuple[SchedulerState, int | None]:
    """A new block that the next plan fills with the contents of `source`, or None if there is no suitable one.

    The device makes all copies of a plan at once, so no block may be written by one and read by another: a source that
    is itself still to be copied is read where that copy reads, and a block about to be read is not taken.
    """
    source = next((origin for origin, target in state.copies if target == source), source)
    if not idle(state.pool):
        return state, None
    pool, (target,) = take(state.pool, 1)
    if target == source or any(target == origin for origin, _ in state.copies):
        return state, None
    return evolve(state, pool=pool, copies=(*state.copies, (source, target))), target


def cut_back(state: SchedulerState, sequence: Sequence, computed: int) -> tuple[SchedulerState, Sequence]:
    """A sequence that does not run keeps at most its first `computed` computed tokens and the blocks these need.

    It will write behind them, so a last, partial block that others hold or may find is replaced by a copy; without
    room for one, that block's tokens are computed again.
    """
    size = state.config.block_size
    computed = min(computed, sequence.computed)
    kept = blocks_for(computed, size)
    table, full = sequence.table[:kept], computed // size
    state = drop_blocks(state, sequence.table[kept:])
    if kept > full:
        last = state.pool.blocks[table[-1]]
        if last.refs > 1 or last.key is not None:
            state, own = copy_block(state, table[-1])
            state = drop_blocks(state, table[-1:])
            table = table[:-1] if own is None else (*table[:-1], own)
            computed = full * size if own is None else computed
    filled = min(sequence.filled, full)
    return state, evolve(
        sequence, table=table, numbers=sequence.numbers[:filled], filled=filled, computed=computed, held_up=None
    )


def store(state: SchedulerState, seq_id: int, sequence: Sequence) -> SchedulerState:
    """The state with a changed record of a sequence that does not run."""
    holds, warm = bool(sequence.table), state.warm
    if holds != (seq_id in warm):
        warm = warm.set(seq_id, True) if holds else warm.delete(seq_id)
    return evolve(state, sequences=state.sequences.set(seq_id, sequence), warm=warm)


def queue(state: SchedulerState, seq_id: int, *, front: bool) -> SchedulerState:
    """The state with a sequence put into the waiting line."""
    return evolve(state, waiting=(push_front if front else push_back)(state.waiting, [seq_id]))


def preempt(state: SchedulerState, seq_id: int) -> SchedulerState:
    """Sends a running sequence to the front of the waiting line without its blocks; it is computed again later.

    Tokens that plans in flight sample for it are still accepted, and it waits for them. Nothing changes for a sequence
    that does not run, except that a waiting one gives up the blocks it holds.
    """
    sequence, running = find(state, seq_id), find(state, seq_id).row >= 0
    if running:
        state = leave(state, [seq_id])
        sequence = state.sequences[seq_id]
        counters = evolve(state.counters, preemptions=state.counters.preemptions + 1)
        state = queue(evolve(state, counters=counters), seq_id, front=True)
    if sequence.table:
        state, sequence = cut_back(state, sequence, 0)
    return store(state, seq_id, sequence)


def park(state: SchedulerState, seq_id: int | None = None) -> SchedulerState:
    """Takes a running sequence, or all of them, off its row with its blocks kept; a later plan has a `Join` for it.

    For an engine whose device has lost the rows but not the cache. It waits for its tokens in flight, as in `preempt`;
    the oldest is the first in line. Nothing changes for a sequence that does not run.
    """
    if seq_id is None:
        parked = np.sort(state.rows.seq_id[state.rows.seq_id != EMPTY])[::-1].tolist()
    else:
        parked = [seq_id] if find(state, seq_id).row != EMPTY else []
    state = leave(state, parked)
    for number in parked:
        sequence = state.sequences[number]
        state, sequence = cut_back(state, sequence, known(sequence) + sequence.pending - 1)
        state = queue(store(state, number, sequence), number, front=True)
    return state


def reclaim_newest(state: SchedulerState) -> SchedulerState:
    """Frees the blocks of the newest waiting sequence that holds some, or else preempts the newest running one."""
    if state.warm:
        return preempt(state, max(state.warm))
    return preempt(state, int(np.max(state.rows.seq_id)))
