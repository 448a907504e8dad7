"""Checks of arguments, shared by the values of this package."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


def is_int(value: Any) -> bool:
    """Whether `value` is a whole number by type: an int or a numpy integer, and no bool."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class TokenIds(Sequence[int]):
    """Token ids that were looked through, kept as int32 alone. They equal, and print as, the tuple of those integers.

    A long prompt's integers as Python objects take far longer to pass on, and the garbage collector walks over them.
    Raises ValueError for bytes that are not int32 numbers of 0 and above.
    """

    packed: bytes

    def __post_init__(self) -> None:
        if len(self.packed) % 4 or (self.packed and np.minimum.reduce(np.frombuffer(self.packed, np.int32)) < 0):
            raise ValueError("packed must be int32 numbers of 0 and above; make token ids with token_ids()")

    def __len__(self) -> int:
        return len(self.packed) // 4

    def __iter__(self) -> Iterator[int]:
        return iter(memoryview(self.packed).cast("i"))

    def __getitem__(self, index: Any) -> Any:
        found = memoryview(self.packed).cast("i")[index]
        return tuple(found) if isinstance(index, slice) else found

    def __eq__(self, other: object) -> bool:
        return self.packed == other.packed if isinstance(other, TokenIds) else tuple(self) == other

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


def token_ids(tokens: list[Any] | tuple[Any, ...], limit: int) -> TokenIds | None:
    """Integers as token ids, or None where one is no integer or not in [0, limit); no Python step for each.

    limit: at most 2**31.
    """
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError):
        return None
    if packed and np.maximum.reduce(np.frombuffer(packed, np.uint32)) >= limit:
        return None
    return TokenIds(packed.tobytes())


def pack_tokens(tokens: Iterable[int], name: str) -> bytes:
    """Token ids as packed int32, the form in which sequences and the prefix map hold them.

    Raises ValueError or TypeError naming the first id that is not an integer in [0, 2**31).
    """
    if isinstance(tokens, TokenIds):
        return tokens.packed
    tokens = tuple(tokens)
    found = token_ids(tokens, 2**31)
    if found is not None:
        return found.packed
    for index, token in enumerate(tokens):
        if not hasattr(token, "__index__"):
            raise TypeError(f"{name}[{index}]={token!r} is not an integer token id")
        if not 0 <= token < 2**31:
            raise ValueError(f"{name}[{index}]={token} is not a token id: ids are in [0, 2**31)")
    raise TypeError(f"{name} is not a series of integer token ids")
