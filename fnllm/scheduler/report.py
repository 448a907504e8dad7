"""A state for people to read: `show` gives it as text, `metrics` counts it."""

from dataclasses import dataclass

from .config import length_limit
from .line import iterate
from .pool import idle
from .request import Sequence, known
from .rows import in_flight
from .state import Counters, SchedulerState


@dataclass(frozen=True)
class Metrics:
    """Gauges of a state and its counters since `init`; blocks are free, cached-only or held and add up to all."""

    running: int
    waiting: int
    kept: int
    blocks_free: int
    blocks_cached: int
    blocks_held: int
    evictions: int
    in_flight: int  # plans not committed
    counters: Counters


def metrics(state: SchedulerState) -> Metrics:
    """How full the scheduler is and what it has done."""
    pool = state.pool
    return Metrics(
        running=state.running,
        waiting=len(state.waiting),
        kept=len(state.sequences) - state.running - len(state.waiting),
        blocks_free=idle(pool) - len(pool.cached),
        blocks_cached=len(pool.cached),
        blocks_held=pool.num_blocks - idle(pool),
        evictions=pool.evictions,
        in_flight=state.next_step - state.next_commit,
        counters=state.counters,
    )


def show(state: SchedulerState) -> str:
    """Block tables and who shares what, one line a sequence.

    A block is written with the number of tables it is in if more than one (`3x2`), and with a star once other prompts
    may find it; `~` marks one that the next plan fills by a copy.
    """
    now, size = metrics(state), state.config.block_size
    lines = [
        f"plan {state.next_step}, {now.in_flight} in flight; "
        f"{now.running} running, {now.waiting} waiting, {now.kept} kept",
        f"blocks of {size}: {now.blocks_held} held + {now.blocks_cached} cached-only + {now.blocks_free} free"
        f" = {state.config.num_blocks}; length limit {length_limit(state.config)}",
    ]
    running = sorted((sequence.row, seq_id) for seq_id, sequence in state.sequences.items() if sequence.row >= 0)
    lines += [_line(state, seq_id, f"row {row}") for row, seq_id in running]
    lines += [_line(state, seq_id, "waiting") for seq_id in iterate(state.waiting)]
    kept = sorted(seq_id for seq_id, sequence in state.sequences.items() if sequence.reason is not None)
    lines += [_line(state, seq_id, f"kept ({state.sequences[seq_id].reason})") for seq_id in kept]
    holders: dict[int, list[int]] = {}
    for seq_id in sorted(state.sequences):
        for block in state.sequences[seq_id].table:
            holders.setdefault(block, []).append(seq_id)
    groups: dict[tuple[int, ...], list[int]] = {}
    for block, ids in sorted(holders.items()):
        if len(ids) > 1:
            groups.setdefault(tuple(ids), []).append(block)
    for ids, blocks in groups.items():
        lines.append(f"shared by {', '.join(map(str, ids))}: blocks {', '.join(map(str, blocks))}")
    if len(state.pool.cached):
        lines.append(f"cached-only, next to be evicted first: {' '.join(map(str, iterate(state.pool.cached)))}")
    if state.copies:
        lines.append("copies: " + ", ".join(f"{source} to {target}" for source, target in state.copies))
    return "\n".join(lines)


def _line(state: SchedulerState, seq_id: int, place: str) -> str:
    sequence: Sequence = state.sequences[seq_id]
    rows, row = state.rows, sequence.row
    length = int(rows.known[row]) if row >= 0 else known(sequence)
    computed = int(rows.computed[row]) if row >= 0 else sequence.computed
    pending = in_flight(rows, row) if row >= 0 else sequence.pending
    counts = f"{length} tokens" + (f" + {pending} in flight" if pending else "") + f", {computed} computed"
    return f"  seq {seq_id} [{place}] {counts}: {' '.join(_block(state, block) for block in sequence.table) or '-'}"


def _block(state: SchedulerState, block: int) -> str:
    entry = state.pool.blocks[block]
    copied = "~" if any(target == block for _, target in state.copies) else ""
    return f"{block}{f'x{entry.refs}' if entry.refs > 1 else ''}{'*' if entry.key is not None else ''}{copied}"
