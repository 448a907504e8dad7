"""One line on a terminal that says how far a call is, with prefill and decode tokens/s."""

import shutil
import sys
import time
from dataclasses import dataclass, replace
from typing import TextIO

REDRAW_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What the line shows; change it with `advance`."""

    requests: int  # in the call
    finished: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_seconds: float = 0.0  # of the steps that read prompt tokens
    decode_seconds: float = 0.0  # of the steps that gave new tokens


def advance(counts: Counts, *, seconds: float, prefill: int = 0, decode: int = 0, finished: int = 0) -> Counts:
    """The counts after one step: how long it took, prompt tokens read, new tokens, requests that ended.

    A mixed step's time counts for both rates, since both kinds of token waited for it.
    """
    return replace(
        counts,
        finished=counts.finished + finished,
        prefill_tokens=counts.prefill_tokens + prefill,
        decode_tokens=counts.decode_tokens + decode,
        prefill_seconds=counts.prefill_seconds + (seconds if prefill else 0.0),
        decode_seconds=counts.decode_seconds + (seconds if decode else 0.0),
    )


def line(counts: Counts, width: int = 79) -> str:
    """The text of the line, no wider than `width`.

    >>> line(advance(Counts(requests=4), seconds=0.5, prefill=600, decode=3, finished=1))
    '1/4 [#####               ] prefill 1,200 tok/s, decode 6 tok/s, 3 new tokens'
    """
    full = 20 * counts.finished // max(1, counts.requests)
    return (
        f"{counts.finished}/{counts.requests} [{'#' * full:20}] "
        f"prefill {rate(counts.prefill_tokens, counts.prefill_seconds)}, "
        f"decode {rate(counts.decode_tokens, counts.decode_seconds)}, {counts.decode_tokens:,} new tokens"
    )[:width]


def rate(tokens: int, seconds: float) -> str:
    """Tokens per second as a person reads it; a dash when there is nothing to divide."""
    if tokens == 0 or seconds <= 0:
        return "- tok/s"
    value = tokens / seconds
    return f"{value:,.0f} tok/s" if value >= 10 or value == int(value) else f"{value:.1f} tok/s"


def is_terminal(stream: TextIO | None) -> bool:
    """Whether someone watches the stream: then a line may be redrawn on it."""
    return stream is not None and getattr(stream, "isatty", lambda: False)()


class Progress:
    """The line on a terminal (effect); without a terminal it writes nothing.

    Draws at most ten times a second, so that it costs a running step a comparison.
    """

    def __init__(self, requests: int, stream: TextIO | None = None):
        self.stream = sys.stderr if stream is None else stream
        self.shows = is_terminal(self.stream)
        self.counts = Counts(requests=requests)
        self.last = time.monotonic()
        self.drawn = self.last

    def update(self, prefill: int, decode: int, running: int) -> None:
        """Take a step that just ended: prompt tokens read, new tokens, requests that have not ended."""
        now = time.monotonic()
        finished = self.counts.requests - running - self.counts.finished
        self.counts = advance(self.counts, seconds=now - self.last, prefill=prefill, decode=decode, finished=finished)
        self.last = now
        if self.shows and now - self.drawn >= REDRAW_SECONDS:
            self.drawn = now
            self._draw("")

    def close(self) -> None:
        """Leave the last state of the line on the terminal."""
        if self.shows:
            self._draw("\n")

    def _draw(self, ending: str) -> None:
        width = shutil.get_terminal_size((80, 24)).columns - 1
        self.stream.write(f"\r\x1b[K{line(self.counts, width)}{ending}")
        self.stream.flush()
