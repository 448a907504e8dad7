"""A caller's request, and the scheduler's record of each sequence."""

import operator
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from .checks import TokenIds, is_int, pack_tokens
from .pool import Key, Parent


@dataclass(frozen=True)
class Request:
    """A prompt and when to stop.

    `max_tokens` is the largest number of new tokens; 0 computes the prompt and ends. A stop id ends the sequence once
    at least `min_tokens` tokens came before it. `cache_key` is what the keys and values depend on besides tokens and
    weights (layers, steering, ...): only requests with equal ones share blocks, so tag each part with its kind, see
    `make_cache_key`. `use_cache=False` neither reads nor publishes shared blocks. With `keep` the sequence stays in the
    state after its end (for `append`, `fork`, `tokens`) until it is aborted, without holding blocks. Raises ValueError
    or TypeError for an empty prompt, invalid ids, and counts that are negative or fractional.
    """

    prompt: tuple[int, ...] | TokenIds
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    cache_key: Hashable = ()
    use_cache: bool = True
    payload: Any = None
    keep: bool = False
    packed: bytes = field(init=False, repr=False, compare=False)  # the prompt as int32

    def __post_init__(self) -> None:
        if len(self.prompt) == 0:
            raise ValueError("prompt is empty: it needs at least one token id")
        for name in ("max_tokens", "min_tokens"):
            value = getattr(self, name)
            if not is_int(value):
                raise TypeError(f"{name}={value!r} must be an integer of at least 0")
            if value < 0:
                raise ValueError(f"{name}={value} must be at least 0")
            object.__setattr__(self, name, operator.index(value))  # a small one of numpy's would overflow in sums
        object.__setattr__(self, "packed", pack_tokens(self.prompt, "prompt"))
        if self.stop_token_ids:
            pack_tokens(self.stop_token_ids, "stop_token_ids")
        if not isinstance(self.prompt, TokenIds):
            object.__setattr__(self, "prompt", tuple(self.prompt))
        object.__setattr__(self, "stop_token_ids", frozenset(self.stop_token_ids))
        hash(self.cache_key)


class CacheKey(tuple):
    """Parts that are compared only if their hashes are equal: == of an object among them may compare its tensors.

    A hash trie would compare keys whose hashes differ, too.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CacheKey) and hash(self) == hash(other) and super().__eq__(other)

    __ne__ = object.__ne__  # by __eq__, which a tuple's own is not
    __hash__ = tuple.__hash__


def make_cache_key(**parts: Hashable) -> CacheKey:
    """A cache key in which every part carries its name and type, so that no two kinds can be taken for each other.

    >>> make_cache_key(params="x") == make_cache_key(steering="x"), make_cache_key(v=1) == make_cache_key(v=True)
    (False, False)
    """
    return CacheKey((name, type(value).__qualname__, value) for name, value in sorted(parts.items()))


@dataclass(frozen=True)
class Sequence:
    """One sequence. While it runs, the counters marked (*) live in the row arrays and are stale here.

    A sequence is running (`row` >= 0), waiting (in the queue, with or without blocks) or kept (`reason` is set).
    """

    request: Request
    prompt_len: int  # tokens before the present turn's output
    max_tokens: int  # output of the present turn at most
    limit: int  # the length at which it ends
    blocks: tuple[bytes, ...]  # the known tokens, one packed int32 array for each full block
    tail: bytes  # (*) the known tokens after those; in a row, as on joining, and empty once they fill a block
    table: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()  # number of each full block's prefix, so far as known; empty if it does not share
    filled: int = 0  # (*) leading blocks of the table whose filling is committed
    computed: int = 0  # (*) tokens whose keys and values are computed or being computed
    pending: int = 0  # (*) tokens sampled in plans that are not committed
    row: int = -1
    joined: int = 0  # the plan in which it last got a row
    held_up: Key | int | None = None  # why it was passed over: a prefix being computed, or the idle blocks it needs
    admitted: bool = False  # whether this turn has been given a row before
    reason: str | None = None
    version: Hashable = None  # of the weights that computed its blocks, from the first one on


def root(sequence: Sequence) -> Parent:
    """The parent of the first block: all that its keys and values depend on besides tokens."""
    return (sequence.request.cache_key, sequence.version)


def key_of(sequence: Sequence, index: int) -> Key:
    """The prefix map's key of a sequence's block; the numbers before it must be known."""
    return (sequence.numbers[index - 1] if index else root(sequence), sequence.blocks[index])


def known(sequence: Sequence) -> int:
    """Tokens with known values in the record: all, unless the sequence runs and has sampled some since it joined."""
    size = len(sequence.blocks[0]) if sequence.blocks else 0
    return (len(sequence.blocks) * size + len(sequence.tail)) // 4


def cut_tokens(packed: bytes, block_size: int) -> tuple[tuple[bytes, ...], bytes]:
    """Packed tokens as full blocks and the rest.

    >>> cut_tokens(bytes(20), 2) == ((bytes(8), bytes(8)), bytes(4))
    True
    """
    width = 4 * block_size
    full = len(packed) // width * width
    return tuple([packed[start : start + width] for start in range(0, full, width)]), packed[full:]


def slice_tokens(sequence: Sequence, start: int, stop: int, block_size: int) -> bytes:
    """Known tokens [start, stop) as packed int32; of a running sequence only those of its full blocks and own tail."""
    first, last = start // block_size, -(-stop // block_size)
    packed = b"".join((*sequence.blocks[first:last], sequence.tail if last > len(sequence.blocks) else b""))
    return packed[4 * (start - first * block_size) : 4 * (stop - first * block_size)]
