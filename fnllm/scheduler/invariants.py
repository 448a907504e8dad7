"""`check`: every invariant of a state, written as plainly as possible and apart from the code that keeps them."""

from collections import Counter
from typing import Any

from .config import blocks_for, length_limit, max_running
from .line import iterate
from .pool import NOT_READY, idle
from .request import Sequence, key_of, known, root
from .rows import EMPTY, begin_block, in_flight
from .state import SchedulerState, shares


def check(state: SchedulerState) -> None:
    """Raises AssertionError with a sentence if any invariant of the state does not hold; costs O(state)."""
    _check_places(state)
    _check_blocks(state)
    _check_prefixes(state)
    _check_numbers(state)
    for seq_id, sequence in state.sequences.items():
        _check_sequence(state, seq_id, sequence)


def _check_places(state: SchedulerState) -> None:
    """Every sequence is in exactly one place: a row, the waiting line, or kept."""
    rows = {int(seq_id): row for row, seq_id in enumerate(state.rows.seq_id) if seq_id != EMPTY}
    line = list(iterate(state.waiting))
    assert len(line) == len(set(line)) == len(state.waiting), f"the waiting line {line} disagrees with its length"
    assert len(rows) == state.running <= max_running(state.config), f"{len(rows)} rows in use, {state.running} counted"
    kept = {seq_id for seq_id, sequence in state.sequences.items() if sequence.reason is not None}
    assert len(rows) + len(line) + len(kept) == len(state.sequences), "a sequence is in two places or in none"
    assert set(rows) | set(line) | kept == set(state.sequences), "rows, line and kept do not make up the sequences"
    assert all(state.sequences[seq_id].row == row for seq_id, row in rows.items()), "a row is not its sequence's"
    assert all(state.sequences[seq_id].row == EMPTY for seq_id in (*line, *kept)), "a row is left behind"
    assert list(state.prefilling) == sorted(set(state.prefilling)) and set(state.prefilling) <= set(rows)
    _check_roster(state)
    warm = {seq_id for seq_id in line if state.sequences[seq_id].table}
    assert warm == set(state.warm), f"waiting with blocks: {warm}, noted: {set(state.warm)}"
    assert state.next_commit <= state.next_step


def _check_roster(state: SchedulerState) -> None:
    """The roster, if there is one, names the rows that decode in the next step and knows how long."""
    roster, rows = state.roster, state.rows
    if roster is None or state.next_step >= roster.until:
        return
    left = {
        row: int(rows.limit[row] - rows.computed[row] - 1)
        for row in range(len(rows.seq_id))
        if rows.seq_id[row] != EMPTY and rows.decoding[row] and rows.computed[row] + 1 < rows.limit[row]
    }
    assert roster.rows.tolist() == list(left), f"the roster has rows {roster.rows} instead of {list(left)}"
    assert roster.seq_ids.tolist() == [int(rows.seq_id[row]) for row in left]
    assert not left or roster.until == state.next_step + min(left.values()), "the roster's end is wrong"
    for step in range(state.next_step, state.next_step + state.config.block_size):
        ahead = step - state.next_step
        first = [row for row in left if (int(rows.computed[row]) + ahead) % state.config.block_size == 0]
        found, ids = begin_block(roster, step)
        assert found.tolist() == first, f"in plan {step} rows {first} begin a block, the roster says {found}"
        assert ids.tolist() == [int(rows.seq_id[row]) for row in first]


def _check_blocks(state: SchedulerState) -> None:
    """free + held + cached-only = all; references = tables; no copy's target is read by another."""
    pool = state.pool
    tables = Counter(block for _, sequence in state.sequences.items() for block in sequence.table)
    for _, sequence in state.sequences.items():
        assert len(set(sequence.table)) == len(sequence.table), f"a table names a block twice: {sequence.table}"
    free, cached = set(iterate(pool.free)), set(iterate(pool.cached))
    free |= set(range(pool.fresh, pool.num_blocks))
    held = {block for block, entry in pool.blocks.items() if entry.refs > 0}
    assert not free & cached and not free & held and not cached & held, "a block is in two places"
    assert free | cached | held == set(range(pool.num_blocks)), "a block is in no place"
    assert idle(pool) == len(free) + len(cached)
    assert held == set(tables), f"held {sorted(held)} but tables name {sorted(tables)}"
    for block, entry in pool.blocks.items():
        assert entry.refs == tables[block], f"block {block}: {entry.refs} references, {tables[block]} tables"
        assert entry.refs > 0 or entry.key is not None, f"block {block} is held by nothing"
    sources, targets = {source for source, _ in state.copies}, [target for _, target in state.copies]
    independent = not sources & set(targets) and len(set(targets)) == len(targets)
    assert independent, f"copies depend on each other: {state.copies}"
    for target in targets:
        assert pool.blocks[target] == (1, None), f"block {target} is to be copied into and is shared"


def _check_prefixes(state: SchedulerState) -> None:
    """The prefix map and the blocks agree, and what is announced will be computed by a running sequence."""
    pool = state.pool
    carried = {entry.key: block for block, entry in pool.blocks.items() if entry.key is not None}
    assert len(carried) == sum(entry.key is not None for _, entry in pool.blocks.items()), "two blocks carry one prefix"
    ready = {key: entry.block for key, entry in pool.prefix.items() if entry.block != NOT_READY}
    assert ready == carried, "the prefix map and the blocks disagree"
    for key, entry in pool.prefix.items():
        assert entry.number < pool.next_number and len(key[1]) == 4 * state.config.block_size
        assert (entry.block == NOT_READY) == (entry.owner >= 0)
        if entry.block == NOT_READY:
            owner: Sequence = state.sequences[entry.owner]
            assert owner.row >= 0, f"sequence {entry.owner} announced a block and does not run"
            announced = range(int(state.rows.filled[owner.row]), len(owner.numbers))
            assert any(key_of(owner, index) == key for index in announced), f"nobody will publish {key}"


def _check_numbers(state: SchedulerState) -> None:
    """A number stands for one content: the root and all tokens up to the end of a block."""
    contents: dict[Any, int] = {}  # (parent's content, tokens) -> content
    of_number: dict[int, int] = {}
    of_block: dict[int, int] = {}
    for seq_id, sequence in state.sequences.items():
        content: Any = root(sequence)
        for index, number in enumerate(sequence.numbers):
            content = contents.setdefault((content, sequence.blocks[index]), len(contents))
            assert of_number.setdefault(number, content) == content, f"number {number} stands for two prefixes"
            if index < len(sequence.table):
                of_block.setdefault(sequence.table[index], content)
                message = f"block {sequence.table[index]} of sequence {seq_id} is in the table of another prefix"
                assert of_block[sequence.table[index]] == content, message
    for key, entry in state.pool.prefix.items():
        parent = of_number.get(key[0], -1) if isinstance(key[0], int) else key[0]
        content = contents.get((parent, key[1]))
        if content is not None:
            assert of_number.setdefault(entry.number, content) == content, f"{key} has the number of another prefix"
            assert of_block.get(entry.block, content) == content, f"{key} leads to a block of another prefix"


def _check_sequence(state: SchedulerState, seq_id: int, sequence: Sequence) -> None:
    """Counts, blocks and shared prefixes of one sequence."""
    size, rows, row, label = state.config.block_size, state.rows, sequence.row, f"sequence {seq_id}"
    assert all(len(block) == 4 * size for block in sequence.blocks), f"{label} has a short token block"
    if row >= 0:
        length, computed, pending = int(rows.known[row]), int(rows.computed[row]), in_flight(rows, row)
        filled, limit = int(rows.filled[row]), int(rows.limit[row])
        assert 0 <= length - size * len(sequence.blocks) <= size, f"{label} has tokens in no place"
        assert limit == sequence.limit and rows.joined[row] == sequence.joined < state.next_step
        assert computed >= length - 1 if rows.decoding[row] else computed <= length, f"{label} is out of step"
        if length > known(sequence):  # it has sampled: then all blocks but the one of its last token are filled
            assert filled == (length - 1) // size, f"{label} has {filled} filled blocks with {length} tokens"
        unscheduled = not rows.decoding[row] and computed < length
        assert unscheduled == (seq_id in state.prefilling), f"{label} has prompt tokens nobody will schedule"
    else:
        length, computed, pending, filled = known(sequence), sequence.computed, sequence.pending, sequence.filled
        assert len(sequence.tail) < 4 * size, f"{label} has an unfilled block"
        assert computed <= max(0, length + pending - 1), f"{label} would have nothing to compute"
    assert length + pending <= max(sequence.limit, length) and length <= length_limit(state.config)
    assert pending >= 0 and sequence.prompt_len <= length
    assert len(sequence.table) == blocks_for(computed, size), (
        f"{label} holds {len(sequence.table)} blocks for {computed} computed tokens"
    )
    assert filled * size <= computed
    if not shares(state, sequence):
        assert not sequence.numbers, f"{label} does not share and has prefix numbers"
        return
    assert len(sequence.numbers) == filled or row >= 0 and len(sequence.numbers) >= filled
