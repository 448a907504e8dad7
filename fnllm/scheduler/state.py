"""The scheduler's state, the plan of a step and the events of its commit, all immutable values.

Axes: R rows (running slots), B entries of a plan, S block size.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int32

from .config import SchedulerConfig
from .evolve import evolve
from .line import Line
from .pmap import Map
from .pool import Pool
from .request import Sequence, known

EMPTY = -1
STOP_BITS = 0xFFFF


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
    tail: Int32[np.ndarray, "R S"]  # the known tokens after its full blocks, from the first one sampled in the row on
    stops: Bool[np.ndarray, " 65536"]  # whether a token with these last 16 bits may be a stop id of one of them


@dataclass(frozen=True, slots=True, eq=False)
class Roster:
    """The rows that decode, as the arrays of a plan; kept from step to step while the rows stay the same.

    A plan of decode entries alone has these very arrays, by which its commit knows that nothing has changed since.
    """

    index: slice | Int32[np.ndarray, " D"]  # the rows in the form that indexes fastest
    tails: Int[np.ndarray, " D"]  # where each row begins in the flattened `Rows.tail`
    rows: Int32[np.ndarray, " D"]
    seq_ids: Int32[np.ndarray, " D"]
    query_lens: Int32[np.ndarray, " D"]  # ones
    samples: Bool[np.ndarray, " D"]  # all true
    until: int  # the first plan in which one of them has no token left to sample


class Join(NamedTuple):
    """A sequence gets a row: the device sets the row's length and block table anew."""

    row: int
    seq_id: int
    length: int  # tokens whose keys and values are in the cache already
    block_table: Int32[np.ndarray, " M"]  # all its blocks, those of this step's tokens included
    cached: int  # of `length`, tokens found in the prefix cache just now
    first: bool  # whether the sequence (or its turn after an `append`) begins here


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One step of the device, which does in this order: copies, joins, table updates, then the entries.

    Entry i computes `query_lens[i]` tokens of row `rows[i]` at positions from `starts[i]` on. The first `num_decode`
    entries compute one token each, the one their row sampled last; the tokens of the others are concatenated in
    `prefill_tokens`. Where `samples` is true the entry's last token yields a new one.
    """

    step: int
    rows: Int32[np.ndarray, " B"]
    seq_ids: Int32[np.ndarray, " B"]
    starts: Int32[np.ndarray, " B"]
    query_lens: Int32[np.ndarray, " B"]
    num_decode: int
    prefill_tokens: Int32[np.ndarray, " T"]
    samples: Bool[np.ndarray, " B"]
    joins: tuple[Join, ...]
    # rows, columns and blocks of new block table entries of sequences without a join
    table_updates: tuple[Int32[np.ndarray, " U"], Int32[np.ndarray, " U"], Int32[np.ndarray, " U"]]
    copies: tuple[Int32[np.ndarray, " C"], Int32[np.ndarray, " C"]]  # source, destination; no block is in both


class Finished(NamedTuple):
    """The end of a sequence: "stop" with the stop id, or "length" without one."""

    seq_id: int
    reason: str
    stop_id: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Events:
    """What a commit brought: the accepted tokens in plan order, who ended, and the prefix hits of those that began.

    `seq_ids` and `tokens` belong together; a sequence has at most one token in a commit. `cached` holds
    (seq_id, prompt tokens found in the prefix cache) of every sequence whose first step this was.
    """

    step: int
    seq_ids: Int32[np.ndarray, " A"]
    tokens: Int32[np.ndarray, " A"]
    finished: tuple[Finished, ...]
    cached: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Counters:
    """Totals since `init`."""

    prefill_tokens: int = 0  # computed from prompts, and again after preemptions
    decode_tokens: int = 0
    cached_tokens: int = 0  # not computed because the prefix cache had them
    accepted_tokens: int = 0
    preemptions: int = 0
    finished: int = 0


@dataclass(frozen=True, eq=False)
class SchedulerState:
    """Everything the scheduler knows. Any state stays valid for ever and can be continued in several ways."""

    config: SchedulerConfig
    sequences: Map  # seq_id -> Sequence
    waiting: Line  # seq_ids in the order of admission
    warm: Map  # seq_id -> True for waiting sequences that hold blocks
    rows: Rows
    pool: Pool
    running: int = 0  # rows in use
    prefilling: tuple[int, ...] = ()  # running sequences with prompt tokens left to schedule, oldest first
    roster: Roster | None = None  # None when it has to be made anew
    copies: tuple[tuple[int, int], ...] = ()  # (source, destination) for the next plan
    next_id: int = 0
    next_step: int = 0
    next_commit: int = 0
    counters: Counters = Counters()


def read_only(array: np.ndarray) -> np.ndarray:
    """The same array, closed to writing."""
    array.setflags(write=False)
    return array


def init(config: SchedulerConfig) -> SchedulerState:
    """An empty scheduler."""
    rows, size = config.max_num_seqs, config.block_size

    def column(fill: int = 0) -> np.ndarray:
        return read_only(np.full(rows, fill, np.int32))

    empty = Rows(
        seq_id=column(EMPTY),
        known=column(),
        computed=column(),
        limit=column(),
        filled=column(),
        joined=column(),
        decoding=read_only(np.zeros(rows, bool)),
        tail=read_only(np.zeros((rows, size), np.int32)),
        stops=read_only(np.zeros(STOP_BITS + 1, bool)),
    )
    return SchedulerState(config, Map(), Line(), Map(), empty, Pool(config.num_blocks))


def in_flight(rows: Rows, row: int) -> int:
    """Tokens of a running sequence sampled in plans that are not committed."""
    return int(rows.computed[row] + 1 - rows.known[row]) if rows.decoding[row] else 0


def tail_of(rows: Rows, sequence: Sequence) -> bytes:
    """The known tokens of a running sequence after its full blocks, packed as int32."""
    if rows.known[sequence.row] == known(sequence):  # nothing is sampled in this row yet
        return sequence.tail
    count = int(rows.known[sequence.row]) - len(sequence.blocks) * rows.tail.shape[1]
    return rows.tail[sequence.row, :count].tobytes()


def update_rows(rows: Rows, **columns: np.ndarray) -> Rows:
    """Rows with other columns, closed to writing."""
    for column in columns.values():
        column.setflags(write=False)
    return evolve(rows, **columns)


def shares(state: SchedulerState, sequence: Sequence) -> bool:
    """Whether a sequence takes part in the prefix cache."""
    return state.config.prefix_cache and sequence.request.use_cache
