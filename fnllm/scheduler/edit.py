"""Changing sequences from outside the step: `fork`, `truncate`, `append`, `invalidate`.

All of them act on the tokens known now. Tokens in flight for a truncated or extended sequence are dropped; a fork of a
sequence with tokens in flight starts from its known ones and samples its own.
"""

import operator
from collections.abc import Iterable

from .checks import is_int, pack_tokens
from .config import blocks_for, describe_prompt_limit, length_limit, prompt_limit
from .evolve import evolve
from .pool import forget, hold
from .request import Sequence, cut_tokens, known
from .residency import cut_back, find, leave, preempt, queue, store
from .state import SchedulerState


def fork(state: SchedulerState, seq_id: int) -> tuple[SchedulerState, int]:
    """A second sequence with the same request, tokens and computed blocks; returns its id.

    Full blocks are shared by reference and the last, partial one is copied by the next plan (computed again if no
    block is idle). The last known token is computed anew, for the fork samples its own successor. The fork goes to the
    front of the waiting line, or to its end if the sequence has not run yet. The fork of a sequence that has ended and
    was kept is such a one itself; `append` continues it.
    """
    sequence, new_id = find(state, seq_id), state.next_id
    state = evolve(state, next_id=new_id + 1)
    running = sequence.row >= 0
    # The parent's record as it would be off its row; the parent itself stays where it is.
    sequence = leave(state, [seq_id]).sequences[seq_id] if running else sequence
    sequence = evolve(sequence, pending=0, held_up=None)
    computed = min(sequence.computed, known(sequence) - 1)
    table = sequence.table[: blocks_for(computed, state.config.block_size)]
    state = evolve(state, pool=hold(state.pool, table))
    state, sequence = cut_back(state, evolve(sequence, table=table), computed)
    state = store(state, new_id, sequence)
    if sequence.reason is None:
        state = queue(state, new_id, front=sequence.admitted)
    return state, new_id


def truncate(state: SchedulerState, seq_id: int, length: int) -> SchedulerState:
    """Cuts a sequence back to its first `length` known tokens, from where it continues.

    A running one gets its row anew in the next plan, from the front of the waiting line; one that has ended and was
    kept stays ended. A prompt longer than `length` becomes that short; the bound on the turn's output stays as it is.
    Raises ValueError unless 1 <= length <= known.
    """
    state, sequence = _detach(state, seq_id)
    if not is_int(length) or not 1 <= length <= known(sequence):
        raise ValueError(
            f"length={length!r} must be an integer in [1, {known(sequence)}], the known tokens of seq_id={seq_id}"
        )
    length = operator.index(length)  # a small one of numpy's would overflow in what is computed with it
    packed = b"".join((*sequence.blocks, sequence.tail))[: 4 * length]
    prompt_len = min(sequence.prompt_len, length)
    return _replace_tokens(state, seq_id, sequence, packed, prompt_len, sequence.max_tokens)


def append(state: SchedulerState, seq_id: int, tokens: Iterable[int], max_tokens: int | None = None) -> SchedulerState:
    """Adds tokens to a sequence and begins a new turn: all its tokens are the prompt of the output that follows.

    `max_tokens` bounds the new output (None: as in the request); `min_tokens` counts anew too. Works on running,
    waiting and kept sequences; a kept one joins the end of the waiting line, a running one the front. `tokens` may be
    empty: the sequence then goes on from what it has. Raises ValueError if the tokens can never be computed.
    """
    packed = pack_tokens(tokens, "tokens")
    state, sequence = _detach(state, seq_id)
    length = known(sequence) + len(packed) // 4
    if length > prompt_limit(state.config):
        raise ValueError(
            f"seq_id={seq_id} would have {length} tokens and could never run: {describe_prompt_limit(state.config)}"
        )
    if max_tokens is None:
        max_tokens = sequence.request.max_tokens
    elif not is_int(max_tokens) or max_tokens < 0:
        raise ValueError(f"max_tokens={max_tokens!r} must be an integer of at least 0, or None")
    ended = sequence.reason is not None
    packed = b"".join((*sequence.blocks, sequence.tail, packed))
    sequence = evolve(sequence, reason=None, admitted=False)
    state = _replace_tokens(state, seq_id, sequence, packed, length, operator.index(max_tokens))
    return queue(state, seq_id, front=False) if ended else state


def _detach(state: SchedulerState, seq_id: int) -> tuple[SchedulerState, Sequence]:
    """Takes a running sequence to the front of the waiting line; tokens in flight for it no longer count."""
    if find(state, seq_id).row >= 0:
        state = queue(leave(state, [seq_id]), seq_id, front=True)
    return state, evolve(state.sequences[seq_id], pending=0)


def _replace_tokens(
    state: SchedulerState, seq_id: int, sequence: Sequence, packed: bytes, prompt_len: int, max_tokens: int
) -> SchedulerState:
    """Gives a sequence that does not run other tokens; what it computed is valid for the tokens both have in common."""
    blocks, tail = cut_tokens(packed, state.config.block_size)
    length = len(packed) // 4
    # Of the old tokens only known ones count as computed, and at least one token must be left to compute.
    state, sequence = cut_back(state, sequence, min(known(sequence), length - 1))
    limit = min(prompt_len + max_tokens, length_limit(state.config))
    changes = {"blocks": blocks, "tail": tail, "prompt_len": prompt_len, "max_tokens": max_tokens, "limit": limit}
    return store(state, seq_id, evolve(sequence, **changes))


def invalidate(state: SchedulerState, blocks: Iterable[int]) -> SchedulerState:
    """Treats the contents of `blocks` as lost: no prefix hit finds them, and sequences that hold one start over.

    Those wait for recompute at the front of the line; tokens in flight for them are still accepted (`truncate` drops
    them). A block about to be copied from a lost one is lost too. Raises ValueError for a number that is no block.
    """
    lost = set(blocks)
    wrong = sorted(block for block in lost if not is_int(block) or not 0 <= block < state.config.num_blocks)
    if wrong:
        raise ValueError(f"blocks={wrong} are not in this cache: blocks are 0 to {state.config.num_blocks - 1}")
    lost |= {target for source, target in state.copies if source in lost}
    state = evolve(state, pool=forget(state.pool, sorted(lost)))
    holders = [seq_id for seq_id, sequence in state.sequences.items() if not lost.isdisjoint(sequence.table)]
    for seq_id in sorted(holders, reverse=True):  # so that the oldest ends up first in line
        state = preempt(state, seq_id)
    return state
