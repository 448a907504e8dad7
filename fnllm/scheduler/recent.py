"""The tokens that the running rows got in the last commits: a block's worth of each, so that a full block can be read.

A decode step writes one token to every row and reads S tokens of the few rows whose block is full. An array of rows by
S tokens would be copied whole in every step; here a step copies a small part, and what is older is kept by row.
"""

from math import gcd
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int32

LINES = 8  # commits in `Recent.lines`, if it divides S: fewer are cheaper to write and more are cheaper to read


class Recent(NamedTuple):
    """Tokens by commit and row; where a row got none, what stands there means nothing.

    Commit p is line p % L of `lines` until the next L commits begin.
    """

    lines: Int32[np.ndarray, "L R"]
    past: tuple[
        bytes, ...
    ]  # the S commits before those, oldest first; each has L tokens of row 0, then L of row 1, ...


def no_tokens(rows: int, block_size: int) -> Recent:
    """As many rows without tokens."""
    lines = np.zeros((gcd(block_size, LINES), rows), np.int32)
    lines.setflags(write=False)
    return Recent(lines, (lines.tobytes(),) * (block_size // len(lines)))


def record(recent: Recent, rows: slice | Int[np.ndarray, " N"], tokens: Int32[np.ndarray, " N"], commit: int) -> Recent:
    """With the tokens that a commit, the one after the last, brings to these rows."""
    lines, past = recent.lines.copy(), recent.past
    line = commit % len(lines)
    lines[line, rows] = tokens
    lines.setflags(write=False)
    if line == len(lines) - 1:
        past = past[1:] + (lines.T.tobytes(),)
    return Recent(lines, past)


def sampled(recent: Recent, rows: Int[np.ndarray, " N"], next_commit: int) -> list[bytes]:
    """The tokens that each of these rows got in the last S commits, oldest first, packed as int32.

    >>> recent = no_tokens(rows=3, block_size=2)
    >>> for commit in range(5):
    ...     recent = record(recent, slice(0, 3), np.array([commit, 10 + commit, 20 + commit], np.int32), commit)
    >>> [np.frombuffer(tokens, np.int32).tolist() for tokens in sampled(recent, np.array([1, 2]), next_commit=5)]
    [[13, 14], [23, 24]]
    """
    count = len(recent.lines)
    new = 4 * (next_commit % count)  # bytes of a row in `lines`
    # At the start of new lines the old ones are the last of `past`.
    lines = recent.lines[: new // 4].take(rows, axis=1).T.tobytes()
    width = 4 * count
    return [
        b"".join([chunk[row * width : (row + 1) * width] for chunk in recent.past])[new:]
        + lines[place * new : (place + 1) * new]
        for place, row in enumerate(rows.tolist())
    ]
