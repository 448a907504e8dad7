"""One line on a terminal that says how far a call is, with prefill and decode tokens/s."""

import sys
import time
from dataclasses import dataclass, replace
from typing import TextIO

from fnllm.scheduler import Plan

REDRAW_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What the line shows; change it with `advance`."""

    requests: int  # in the call
    finished: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_seconds: float = 0.0  # of the steps that read prompt tokens
    decode_seconds: float = 0.0  # of the steps that gave new tokens
    drawn_at: float = float("-inf")  # clock of the last redraw


def advance(progress: Progress, *, seconds: float, prefill: int = 0, decode: int = 0, finished: int = 0) -> Progress:
    """The progress after one step: how long it took, prompt tokens read, new tokens, requests that ended.

    A mixed step's time counts for both rates, since both kinds of token waited for it.
    """
    return replace(
        progress,
        finished=progress.finished + finished,
        prefill_tokens=progress.prefill_tokens + prefill,
        decode_tokens=progress.decode_tokens + decode,
        prefill_seconds=progress.prefill_seconds + (seconds if prefill else 0.0),
        decode_seconds=progress.decode_seconds + (seconds if decode else 0.0),
    )


def line(progress: Progress, width: int = 79) -> str:
    """The text of the line, no wider than `width`.

    >>> line(advance(Progress(requests=4), seconds=0.5, prefill=600, decode=3, finished=1))
    '1/4 [#####               ] prefill 1,200 tok/s, decode 6 tok/s, 3 new tokens'
    """
    full = 20 * progress.finished // max(1, progress.requests)
    parts = (f"{progress.finished}/{progress.requests} [{'#' * full:20}] "
             f"prefill {_rate(progress.prefill_tokens, progress.prefill_seconds)}, "
             f"decode {_rate(progress.decode_tokens, progress.decode_seconds)}, "
             f"{progress.decode_tokens:,} new tokens")
    return parts[:width]


def is_terminal(stream: TextIO | None = None) -> bool:
    """Whether a progress line makes sense on the stream (stderr if none is given)."""
    stream = sys.stderr if stream is None else stream
    return stream is not None and getattr(stream, "isatty", lambda: False)()


def draw(progress: Progress, stream: TextIO, now: float | None = None, width: int = 79) -> Progress:
    """Redraw the line, at most ten times a second; return the progress that knows of it."""
    now = time.monotonic() if now is None else now
    if now - progress.drawn_at < REDRAW_SECONDS:
        return progress
    stream.write(f"\r\x1b[K{line(progress, width)}")
    stream.flush()
    return replace(progress, drawn_at=now)


def end(progress: Progress, stream: TextIO, width: int = 79) -> None:
    """Leave the last state of the line on the terminal."""
    stream.write(f"\r\x1b[K{line(progress, width)}\n")
    stream.flush()


def _rate(tokens: int, seconds: float) -> str:
    if tokens == 0 or seconds <= 0:
        return "- tok/s"
    rate = tokens / seconds
    return f"{rate:,.0f} tok/s" if rate >= 10 or rate == int(rate) else f"{rate:.1f} tok/s"


class Meter:
    """The progress of one call, drawn on stderr as steps come (effect: writes there, reads the clock)."""

    def __init__(self, requests: int):
        self.progress, self.left, self.at = Progress(requests=requests), requests, time.monotonic()

    def step(self, plan: Plan, *, left: int) -> None:
        """Take in one step, after which `left` requests are not done."""
        now, tokens = time.monotonic(), int(plan.query_lens.sum())
        self.progress = advance(
            self.progress,
            seconds=now - self.at,
            prefill=tokens - plan.num_decode,
            decode=int(plan.samples.sum()),
            finished=self.left - left,
        )
        self.left, self.at = left, now
        self.progress = draw(self.progress, sys.stderr, now)

    def close(self) -> None:
        end(self.progress, sys.stderr)
