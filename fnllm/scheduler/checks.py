"""Checks at the door, shared by the values of this package."""

import struct
from collections.abc import Iterable
from typing import Any

import numpy as np


def is_int(value: Any) -> bool:
    """Whether `value` is a whole number by type: an int or a numpy integer, and no bool."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


def pack_tokens(tokens: Iterable[int], name: str) -> bytes:
    """Token ids as packed int32, the form in which sequences and the prefix map hold them.

    Raises ValueError or TypeError naming the first id that is not an integer in [0, 2**31).
    """
    tokens = tuple(tokens)
    try:
        packed = struct.pack(f"={len(tokens)}i", *tokens)
        if not packed or np.frombuffer(packed, np.int32).min() >= 0:
            return packed
    except struct.error:
        pass  # found below, where it can be named
    for index, token in enumerate(tokens):
        if not hasattr(token, "__index__"):
            raise TypeError(f"{name}[{index}]={token!r} is not an integer token id")
        if not 0 <= token < 2**31:
            raise ValueError(f"{name}[{index}]={token} is not a token id: ids are in [0, 2**31)")
    raise TypeError(f"{name} is not a series of integer token ids")
