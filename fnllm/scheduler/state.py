"""The scheduler's state, the plan of a step and the events of its commit, all immutable values.

Axes: B entries of a plan; see `rows` for the others.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from .config import SchedulerConfig
from .line import Line
from .pmap import Map
from .pool import Pool
from .recent import sampled
from .request import Sequence, known
from .rows import Roster, Rows, empty_rows


class Join(NamedTuple):
    """A sequence gets a row: the device sets the row's length and block table."""

    row: int
    seq_id: int
    length: int  # tokens whose keys and values are in the cache already
    block_table: Int32[np.ndarray, " M"]  # all its blocks, those of this step's tokens included
    cached: int  # of `length`, tokens found in the prefix cache just now
    first: bool  # whether the sequence (or its turn after an `append`) begins here


@dataclass(frozen=True, eq=False)
class Plan:
    """One step of the device, which carries out in this order: copies, joins, table updates, then the entries.

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
    """The end of a sequence: reason "stop" with the stop id, or "length" or another reason without one."""

    seq_id: int
    reason: str
    stop_id: int | None


@dataclass(frozen=True, eq=False)
class Events:
    """The results of a commit: accepted tokens in plan order, sequences that ended, and prefix hits of new ones.

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
    """Everything the scheduler knows. Any state stays valid and can be continued in several ways."""

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


def init(config: SchedulerConfig) -> SchedulerState:
    """An empty scheduler."""
    rows = empty_rows(config.max_num_seqs, config.block_size)
    return SchedulerState(config, Map(), Line(), Map(), rows, Pool(config.num_blocks))


def tail_of(state: SchedulerState, sequence: Sequence) -> bytes:
    """The known tokens of a running sequence after its full blocks, packed as int32."""
    count = int(state.rows.known[sequence.row]) - known(sequence)
    if count == 0:  # nothing is sampled in this row yet, or since its last full block
        return sequence.tail
    (tokens,) = sampled(state.rows.recent, np.array([sequence.row]), state.next_commit)
    return sequence.tail + tokens[-4 * count :]


def shares(state: SchedulerState, sequence: Sequence) -> bool:
    """Whether a sequence takes part in the prefix cache."""
    return state.config.prefix_cache and sequence.request.use_cache
