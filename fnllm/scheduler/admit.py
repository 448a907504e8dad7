"""Giving waiting sequences a row: in order, using the prefix cache, within the blocks and the token budget."""

import functools
from collections.abc import Callable, Hashable
from typing import NamedTuple

import numpy as np

from .config import blocks_for, max_running
from .evolve import evolve
from .line import iterate, remove
from .pool import Key, announce, hold, idle, match, take
from .request import Sequence, known, root
from .residency import reclaim_newest
from .rows import EMPTY, STOP_BITS, update_rows
from .state import SchedulerState, shares


class Entrant(NamedTuple):
    """A sequence that gets a row in this step."""

    row: int
    seq_id: int
    start: int  # tokens in the cache already
    chunk: int  # tokens to compute now
    cached: int  # of `start`, found in the prefix cache just now
    first: bool  # whether its turn begins
    sequence: Sequence  # its record from now on
    alike: tuple[int, ...]  # blocks that the entrant before it found too, with this reference to them yet to be counted


class Found(NamedTuple):
    """What the prefix cache has for a sequence: the blocks and numbers of its leading full blocks."""

    blocks: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()
    alike: int = 0  # as many were found, and are held, by the sequence admitted just before
    computing: Key | None = None  # the key after them, if a running sequence is computing it


def admit(
    state: SchedulerState, budget: int, reserved: int, version: Callable[[], Hashable]
) -> tuple[SchedulerState, list[Entrant]]:
    """Gives rows to waiting sequences while rows, `budget` tokens and blocks last.

    A sequence is admitted when all its known tokens fit into idle blocks, beyond `reserved` ones (which running
    prompts still need) and a block for every four running sequences, which grow; if nothing runs, it is admitted in any
    case. One whose next block is just being computed by another is passed over until that block can be shared. So that
    long lines of such sequences cost no time, only as many as there are rows are passed over in a step. One without
    blocks is computed with the weights that `version()` names, also when those before a preemption were others.
    """
    config, size = state.config, state.config.block_size
    rows = (state.rows.seq_id == EMPTY).nonzero()[0].tolist()
    entrants: list[Entrant] = []
    passed, present = 0, functools.cache(version)
    for seq_id in iterate(state.waiting):
        if budget == 0 or state.running >= max_running(config) or passed > config.max_num_seqs:
            break
        sequence: Sequence = state.sequences[seq_id]
        if sequence.pending or _still_computing(state, sequence.held_up):
            passed += 1
            continue
        room = idle(state.pool) - reserved - -(-state.running // 4)
        if state.running and isinstance(sequence.held_up, int) and sequence.held_up > room:
            break
        if not sequence.table:
            sequence = evolve(sequence, version=present())
        found = _cached_prefix(state, sequence, entrants[-1] if entrants else None)
        if found.computing is not None:
            state = _hold_up(state, seq_id, found.computing)
            passed += 1
            continue
        if not state.running:
            state = _make_room(state, seq_id, found)
        elif (needed := _idle_blocks_needed(state, sequence, found)) > room:
            state = _hold_up(state, seq_id, needed)
            break
        start = max(sequence.computed, len(found.blocks) * size)
        chunk = _first_chunk(state, known(sequence) - start, budget)
        if chunk == 0:
            break
        state, entrant = _enter(state, seq_id, sequence, rows[len(entrants)], start, chunk, found)
        entrants.append(entrant)
        reserved += blocks_for(known(sequence), size) - blocks_for(start + chunk, size)
        budget -= chunk
    return _seat(state, entrants) if entrants else state, entrants


def _cached_prefix(state: SchedulerState, sequence: Sequence, before: Entrant | None) -> Found:
    """What the prefix cache has for a sequence without blocks, and the key it should wait for, if any.

    Many prompts begin alike: what was found for the sequence admitted just before is not looked up again.
    """
    if sequence.table or not shares(state, sequence):
        return Found()
    # The last token is computed in any case: its output is what the sequence is for.
    most = (known(sequence) - 1) // state.config.block_size
    blocks, numbers, alike, parent = (), (), 0, root(sequence)
    if before is not None and before.cached:
        other, count = before.sequence, min(before.cached // state.config.block_size, most)
        if count and root(other) == parent and other.blocks[:count] == sequence.blocks[:count]:
            blocks, numbers, alike, parent = other.table[:count], other.numbers[:count], count, other.numbers[count - 1]
    entries, computing = match(state.pool, parent, sequence.blocks[alike:most])
    if entries:
        blocks, numbers = blocks + tuple(e.block for e in entries), numbers + tuple(e.number for e in entries)
    return Found(blocks, numbers, alike, computing)


def _still_computing(state: SchedulerState, key: Key | int | None) -> bool:
    entry = state.pool.prefix.get(key) if isinstance(key, tuple) else None
    return entry is not None and entry.owner >= 0


def _hold_up(state: SchedulerState, seq_id: int, why: Key | int) -> SchedulerState:
    sequence = evolve(state.sequences[seq_id], held_up=why)
    return evolve(state, sequences=state.sequences.set(seq_id, sequence))


def _idle_blocks_needed(state: SchedulerState, sequence: Sequence, found: Found) -> int:
    """Idle blocks that computing all known tokens takes; a found block counts if only the cache has it."""
    revived = sum(state.pool.blocks[block].refs == 0 for block in found.blocks[found.alike :])
    return blocks_for(known(sequence), state.config.block_size) - len(sequence.table) - len(found.blocks) + revived


def _make_room(state: SchedulerState, seq_id: int, found: Found) -> SchedulerState:
    """Takes blocks from other waiting sequences, newest first, until one sequence fits; nothing may be running."""
    sequence = state.sequences[seq_id]
    others = evolve(state, warm=state.warm.delete(seq_id)) if sequence.table else state
    while _idle_blocks_needed(others, sequence, found) > idle(others.pool):
        others = reclaim_newest(others)
    return evolve(others, warm=others.warm.set(seq_id, True)) if sequence.table else others


def _first_chunk(state: SchedulerState, rest: int, budget: int) -> int:
    """Tokens to compute now of `rest` to compute in all; 0 means waiting for a step with more budget."""
    config = state.config
    if config.chunked_prefill or rest > config.max_num_batched_tokens:
        return min(rest, budget, config.max_chunk or rest)
    return rest if rest <= budget else 0


def _enter(
    state: SchedulerState, seq_id: int, sequence: Sequence, row: int, start: int, chunk: int, found: Found
) -> tuple[SchedulerState, Entrant]:
    """Gives a waiting sequence the blocks for its first chunk; `_seat` does the rest, for all entrants at once."""
    size, pool = state.config.block_size, state.pool
    table, numbers, filled = sequence.table + found.blocks, sequence.numbers, sequence.filled
    pool, own = take(hold(pool, found.blocks[found.alike :]), blocks_for(start + chunk, size) - len(table))
    if shares(state, sequence):
        numbers += found.numbers
        filled += len(found.blocks)
        pool, announced = announce(pool, numbers[-1] if numbers else root(sequence), sequence.blocks[filled:], seq_id)
        numbers += announced
    entered = evolve(
        sequence,
        table=table + tuple(own),
        numbers=numbers,
        filled=filled,
        row=row,
        joined=state.next_step,
        held_up=None,
        admitted=True,
    )
    cached, alike = len(found.blocks) * size, found.blocks[: found.alike]
    entrant = Entrant(row, seq_id, start, chunk, cached, not sequence.admitted, entered, alike)
    return evolve(state, pool=pool, running=state.running + 1), entrant


def _seat(state: SchedulerState, entrants: list[Entrant]) -> SchedulerState:
    """Takes the entrants out of the line, counts their references to `alike` blocks, and writes their rows."""
    seq_ids, warm, records = [entrant.seq_id for entrant in entrants], state.warm, state.sequences.mutate()
    for entrant in entrants:
        records[entrant.seq_id] = entrant.sequence
        if entrant.seq_id in warm:
            warm = warm.delete(entrant.seq_id)
    state = evolve(
        state,
        sequences=records.finish(),
        waiting=remove(state.waiting, seq_ids),
        warm=warm,
        pool=hold(state.pool, [block for entrant in entrants for block in entrant.alike]),
    )
    rows, stops = state.rows, state.rows.stops
    names = ("seq_id", "known", "computed", "limit", "filled", "joined", "decoding")
    changed = {name: getattr(rows, name).copy() for name in names}
    for entrant in entrants:
        sequence = entrant.sequence
        values = (
            entrant.seq_id,
            known(sequence),
            entrant.start,
            sequence.limit,
            sequence.filled,
            sequence.joined,
            False,
        )
        for column, value in zip(changed.values(), values, strict=True):
            column[entrant.row] = value
    if not all(stops[bits] for entrant in entrants for bits in _stop_bits(entrant.sequence)):
        # Made anew from all that run, so that it does not fill up over time.
        stops = np.zeros_like(stops)
        for seq_id in changed["seq_id"][changed["seq_id"] != EMPTY].tolist():
            stops[_stop_bits(state.sequences[seq_id])] = True
    prefilling = tuple(sorted((*state.prefilling, *seq_ids)))
    return evolve(state, rows=update_rows(rows, stops=stops, **changed), prefilling=prefilling)


def _stop_bits(sequence: Sequence) -> list[int]:
    return [token & STOP_BITS for token in sequence.request.stop_token_ids]
