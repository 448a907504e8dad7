"""Checks at the door, shared by the values of this package."""

from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np


def is_int(value: Any) -> bool:
    """Whether `value` is a whole number by type: an int or a numpy integer, and no bool."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


class TokenIds(tuple[int, ...]):
    """Token ids that were looked through, with what was made of them on the way."""

    packed: bytes  # the same as int32


def token_ids(tokens: tuple[int, ...], limit: int) -> TokenIds | None:
    """Integers as token ids, or None where one is none or not in [0, limit); no Python step for each."""
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError):
        return None
    if packed and np.maximum.reduce(np.frombuffer(packed, np.uint32)) >= limit:
        return None
    found = TokenIds(tokens)
    found.packed = packed.tobytes()
    return found


def pack_tokens(tokens: Iterable[int], name: str) -> bytes:
    """Token ids as packed int32, the form in which sequences and the prefix map hold them.

    Raises ValueError or TypeError naming the first id that is not an integer in [0, 2**31).
    """
    tokens = tokens if isinstance(tokens, tuple) else tuple(tokens)
    found = tokens if isinstance(tokens, TokenIds) else token_ids(tokens, 2**31)
    if found is not None:
        return found.packed
    for index, token in enumerate(tokens):
        if not hasattr(token, "__index__"):
            raise TypeError(f"{name}[{index}]={token!r} is not an integer token id")
        if not 0 <= token < 2**31:
            raise ValueError(f"{name}[{index}]={token} is not a token id: ids are in [0, 2**31)")
    raise TypeError(f"{name} is not a series of integer token ids")
