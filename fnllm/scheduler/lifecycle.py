"""How sequences come and go: `add`, `finish`, `abort`, and reading what they hold."""

from collections.abc import Mapping

import numpy as np

from .config import describe_prompt_limit, length_limit, prompt_limit
from .evolve import evolve
from .line import remove
from .request import Request, Sequence, cut_tokens, slice_tokens
from .request import known as known_tokens
from .residency import drop_blocks, find, leave, queue, store
from .state import SchedulerState, tail_of


def add(state: SchedulerState, request: Request) -> tuple[SchedulerState, int]:
    """Puts a request at the end of the waiting line and returns its sequence's id.

    Raises ValueError for a prompt that can never be computed, with its length and the effective limit. The output ends
    with reason "length" where prompt and output together reach `length_limit(config)`.
    """
    length, most = len(request.prompt), prompt_limit(state.config)
    if length > most:
        raise ValueError(f"prompt has {length} tokens and can never run: {describe_prompt_limit(state.config)}")
    blocks, tail = cut_tokens(request.packed, state.config.block_size)
    limit = min(length + request.max_tokens, length_limit(state.config))
    seq_id = state.next_id
    state = evolve(state, next_id=seq_id + 1)
    state = store(state, seq_id, Sequence(request, length, request.max_tokens, limit, blocks, tail))
    return queue(state, seq_id, front=False), seq_id


def end(state: SchedulerState, reasons: Mapping[int, str]) -> SchedulerState:
    """Ends sequences wherever they are: rows and blocks are given back, tokens in flight for them will be dropped."""
    records = {seq_id: state.sequences[seq_id] for seq_id in reasons}
    state = leave(state, [seq_id for seq_id, record in records.items() if record.row >= 0])
    queued = [seq_id for seq_id in reasons if seq_id in state.waiting]
    sequences, warm = state.sequences.mutate(), state.warm.mutate()
    for seq_id, reason in reasons.items():
        sequence: Sequence = sequences[seq_id]
        state = drop_blocks(state, sequence.table) if sequence.table else state
        if seq_id in warm:
            del warm[seq_id]
        if sequence.request.keep:
            sequences[seq_id] = evolve(
                sequence, table=(), numbers=(), filled=0, computed=0, pending=0, held_up=None, reason=reason
            )
        else:
            del sequences[seq_id]
    counters = evolve(state.counters, finished=state.counters.finished + len(reasons))
    return evolve(
        state,
        sequences=sequences.finish(),
        warm=warm.finish(),
        waiting=remove(state.waiting, queued),
        counters=counters,
    )


def finish(state: SchedulerState, seq_id: int, reason: str) -> SchedulerState:
    """Ends a running or waiting sequence for a reason of the caller's, such as a stop string.

    Tokens still in flight for it are dropped when their plans are committed. Raises ValueError if it is not there or
    has ended already.
    """
    sequence = find(state, seq_id)
    if sequence.reason is not None:
        raise ValueError(f"seq_id={seq_id} has ended already, with reason {sequence.reason!r}")
    return end(state, {seq_id: reason})


def abort(state: SchedulerState, seq_id: int) -> SchedulerState:
    """Ends a sequence with reason "abort" and forgets it, also one that was kept; ValueError if it is not there."""
    sequence = find(state, seq_id)
    if sequence.reason is None:
        state = end(state, {seq_id: "abort"})
    return evolve(state, sequences=state.sequences.delete(seq_id)) if seq_id in state.sequences else state


def packed_tokens(state: SchedulerState, seq_id: int) -> bytes:
    """The known tokens of a sequence as packed int32."""
    sequence, size = find(state, seq_id), state.config.block_size
    if sequence.row < 0:
        return slice_tokens(sequence, 0, known_tokens(sequence), size)
    return b"".join(sequence.blocks) + tail_of(state, sequence)


def tokens(state: SchedulerState, seq_id: int) -> tuple[int, ...]:
    """The known tokens of a sequence, prompt first; tokens in flight are not among them."""
    return tuple(np.frombuffer(packed_tokens(state, seq_id), np.int32).tolist())
