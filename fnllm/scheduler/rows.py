"""The running sequences as arrays, one place for each, so that a step costs a few array operations.

Axes: R rows (running slots), D rows that decode, S block size.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int, Int32

from .evolve import evolve
from .recent import Recent, no_tokens

EMPTY = -1
STOP_BITS = 0x1FFF  # the table of stop ids then stays in the fastest cache, and few other tokens come through
NEVER = 2**62


@dataclass(frozen=True, eq=False)
class Rows:
    """The running sequences as arrays, so that a step costs a few array operations and not one loop over sequences.

    Published arrays are read-only; a function that changes one copies it first.
    """

    seq_id: Int32[np.ndarray, " R"]  # EMPTY where nothing runs; the other fields of such a row mean nothing
    known: Int32[np.ndarray, " R"]  # tokens with known values
    computed: Int32[np.ndarray, " R"]  # tokens whose keys and values are computed or being computed
    limit: Int32[np.ndarray, " R"]  # the length at which the sequence ends
    filled: Int32[np.ndarray, " R"]  # leading blocks whose filling is committed
    joined: Int32[np.ndarray, " R"]  # the plan in which the sequence got the row
    decoding: Bool[np.ndarray, " R"]  # its prompt is done: its next input token is one that the device sampled
    recent: Recent  # the tokens of the last commits; a row has one in each from the first that it sampled
    stops: Bool[np.ndarray, " 8192"]  # whether a token with these last 13 bits may be a stop id of one of them


@dataclass(frozen=True, slots=True, eq=False)
class Roster:
    """The rows that decode, as the arrays of a plan; kept from step to step while the rows stay the same.

    A plan of decode entries alone has these very arrays, by which its commit knows that nothing has changed since.
    Every row is one token further in each step, so which of them begin a block in a step is known beforehand.
    """

    index: slice | Int[np.ndarray, " D"]  # the rows in the form that indexes fastest
    rows: Int32[np.ndarray, " D"]
    seq_ids: Int32[np.ndarray, " D"]
    query_lens: Int32[np.ndarray, " D"]  # ones
    samples: Bool[np.ndarray, " D"]  # all true
    advance: Int32[np.ndarray, " R"]  # tokens of each row in a step: one of these rows, none of the others
    until: int  # the first plan in which one of them has no token left to sample
    # The same rows and ids, sorted by the step (modulo S) in which their token begins a block; and where each of these
    # S steps begins in them, and the end.
    phase_rows: Int32[np.ndarray, " D"]
    phase_ids: Int32[np.ndarray, " D"]
    phases: tuple[int, ...]


def read_only(array: np.ndarray) -> np.ndarray:
    """The same array, closed to writing."""
    array.setflags(write=False)
    return array


def empty_rows(count: int, block_size: int) -> Rows:
    """Rows in which nothing runs."""

    def column(fill: int = 0) -> np.ndarray:
        return read_only(np.full(count, fill, np.int32))

    return Rows(
        seq_id=column(EMPTY),
        known=column(),
        computed=column(),
        limit=column(),
        filled=column(),
        joined=column(),
        decoding=read_only(np.zeros(count, bool)),
        recent=no_tokens(count, block_size),
        stops=read_only(np.zeros(STOP_BITS + 1, bool)),
    )


def update_rows(rows: Rows, **columns: np.ndarray) -> Rows:
    """Rows with other columns, closed to writing."""
    for column in columns.values():
        column.setflags(write=False)
    return evolve(rows, **columns)


def in_flight(rows: Rows, row: int) -> int:
    """Tokens of a running sequence sampled in plans that are not committed."""
    return int(rows.computed[row] + 1 - rows.known[row]) if rows.decoding[row] else 0


def make_roster(rows: Rows, step: int, block_size: int) -> Roster:
    """The rows that decode in plan `step`."""
    left = rows.limit - rows.computed - 1  # tokens that may still be sampled
    decoding = (rows.seq_id != EMPTY) & rows.decoding & (left > 0)
    taken = decoding.nonzero()[0]
    count = len(taken)
    contiguous = count > 0 and taken[-1] == count - 1
    seq_ids = rows.seq_id.take(taken)
    phase = (step - rows.computed.take(taken)) % block_size
    order = phase.argsort(kind="stable")
    ends = np.bincount(phase, minlength=block_size).cumsum()
    roster_rows = taken.astype(np.int32)
    return Roster(
        index=slice(0, count) if contiguous else taken,
        rows=read_only(roster_rows),
        seq_ids=read_only(seq_ids),
        query_lens=read_only(np.ones(count, np.int32)),
        samples=read_only(np.ones(count, bool)),
        advance=read_only(decoding.astype(np.int32)),
        until=step + int(left.take(taken).min()) if count else NEVER,
        phase_rows=read_only(roster_rows.take(order)),
        phase_ids=read_only(seq_ids.take(order)),
        phases=(0, *ends.tolist()),
    )


def begin_block(roster: Roster, step: int) -> tuple[Int32[np.ndarray, " N"], Int32[np.ndarray, " N"]]:
    """Rows, in ascending order, and ids of the sequences whose token in plan `step` is the first of a block."""
    phase = step % (len(roster.phases) - 1)
    first, last = roster.phases[phase], roster.phases[phase + 1]
    return roster.phase_rows[first:last], roster.phase_ids[first:last]
