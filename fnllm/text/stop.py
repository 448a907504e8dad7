"""Stop strings in text that comes in pieces: found across pieces, and text that may belong to one is held back.

The rule: the stop string whose last character comes first wins, the longer one if two end together. So the result
does not depend on how the text was cut into pieces. Text ends before the stop string (after it with `include`);
token ids are kept up to and including the one that completed it.
"""

from collections.abc import Sequence
from typing import NamedTuple


class StopState(NamedTuple):
    """What is looked for, and the text held back because it may be the beginning of it."""

    stops: tuple[str, ...]
    include: bool = False
    held: str = ""
    matched: str | None = None


def start(stops: Sequence[str], include: bool = False) -> StopState:
    """The state before the first piece; `stops` are not empty strings."""
    return StopState(tuple(stops), include)


def push(state: StopState, text: str, armed: bool = True) -> tuple[StopState, str]:
    """Take a piece of text; return what can be shown. `state.matched` then says whether a stop string is complete.

    With `armed` false (fewer tokens than min_tokens) a stop string that ends in this piece is text like any other.
    After a match nothing more is shown.
    """
    stops, include, held, matched = state
    if matched is not None or not text:
        return state, ""
    if not stops:
        return state, text
    buffer = held + text
    match = _first_match(stops, buffer, len(held)) if armed else None
    if match is not None:
        begin, stop = match
        return StopState(stops, include, "", stop), buffer[: begin + len(stop) if include else begin]
    shown = len(buffer) - held_length(stops, buffer)
    if shown == len(buffer) and not held:
        return state, buffer
    return StopState(stops, include, buffer[shown:]), buffer[:shown]


def flush(state: StopState) -> str:
    """The text still held back, once no more will come."""
    return state.held


def held_length(stops: Sequence[str], text: str) -> int:
    """Length of the longest end of the text that a stop string, longer than it, begins with.

    >>> held_length(("bc", "abd"), "xab")
    2
    """
    longest = 0
    for stop in stops:
        at = max(0, len(text) - len(stop) + 1)
        while (at := text.find(stop[0], at)) >= 0:
            if stop.startswith(text[at:]):
                longest = max(longest, len(text) - at)
                break
            at += 1
    return longest


def _first_match(stops: Sequence[str], buffer: str, old: int) -> tuple[int, str] | None:
    """(begin, stop) of the match that ends first, among those that end after the first `old` characters."""
    best: tuple[int, int, str] | None = None
    for stop in stops:
        begin = buffer.find(stop, max(0, old - len(stop) + 1))
        if begin >= 0 and (best is None or (begin + len(stop), begin) < best[:2]):
            best = (begin + len(stop), begin, stop)
    return None if best is None else (best[1], best[2])
