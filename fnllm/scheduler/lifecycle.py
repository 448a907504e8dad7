"""How sequences come and go: `add`, `finish`, `abort`, and reading what they hold."""

from collections.abc import Collection, Mapping

import numpy as np

from .config import check_prompt_length, length_limit
from .evolve import evolve
from .line import push_back, remove
from .request import Request, Sequence, cut_tokens, slice_tokens
from .request import known as known_tokens
from .residency import drop_blocks, find, leave
from .state import SchedulerState, tail_of

NEW = Sequence(Request((0,), 0), 0, 0, 0, (), b"")  # what all records have in common at first, to be copied quickly


def add(state: SchedulerState, request: Request) -> tuple[SchedulerState, int]:
    """Puts a request at the end of the waiting line and returns its sequence's id.

    Raises ValueError for a prompt that can never be computed, with its length and the effective limit. The output ends
    with reason "length" where prompt and output together reach `length_limit(config)`.
    """
    state, seq_ids = add_all(state, [request])
    return state, seq_ids[0]


def add_all(state: SchedulerState, requests: Collection[Request]) -> tuple[SchedulerState, list[int]]:
    """`add` for several requests in their order, all or none of them, at a fraction of the cost."""
    most = length_limit(state.config)
    seq_ids = list(range(state.next_id, state.next_id + len(requests)))
    sequences = state.sequences.mutate()
    for seq_id, request in zip(seq_ids, requests, strict=True):
        length, new = len(request.prompt), request.max_tokens
        check_prompt_length(state.config, length)
        blocks, tail = cut_tokens(request.packed, state.config.block_size)
        sequences[seq_id] = evolve(
            NEW,
            request=request,
            prompt_len=length,
            max_tokens=new,
            limit=min(length + new, most),
            blocks=blocks,
            tail=tail,
        )
    next_id = state.next_id + len(requests)
    waiting = push_back(state.waiting, seq_ids)
    return evolve(state, sequences=sequences.finish(), waiting=waiting, next_id=next_id), seq_ids


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
