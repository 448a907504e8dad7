"""A progress line on the terminal, with prefill and decode tokens/s (effect: prints)."""

import shutil
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

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
    return (
        f"{progress.finished}/{progress.requests} [{'#' * full:20}] "
        f"prefill {rate(progress.prefill_tokens, progress.prefill_seconds)}, "
        f"decode {rate(progress.decode_tokens, progress.decode_seconds)}, {progress.decode_tokens:,} new tokens"
    )[:width]


def rate(tokens: int, seconds: float) -> str:
    """Tokens per second as a person reads it; a dash when there is nothing to divide."""
    if tokens == 0 or seconds <= 0:
        return "- tok/s"
    value = tokens / seconds
    return f"{value:,.0f} tok/s" if value >= 10 or value == int(value) else f"{value:.1f} tok/s"


def is_terminal(stream: Any = None) -> bool:
    """Whether someone watches the stream (stderr if none is given): then a line may be redrawn on it."""
    stream = sys.stderr if stream is None else stream
    return stream is not None and getattr(stream, "isatty", lambda: False)()


def say(line: str) -> None:
    """Tell a person at a terminal what is being built."""
    if is_terminal():
        print(f"fnllm: {line}", file=sys.stderr)


def quiet(line: str) -> None:
    """Say nothing: another rank builds the same and tells of it."""


class Meter:
    """The progress of one call, drawn on stderr as steps come.

    Draws at most ten times a second, so that it costs a running step a comparison.
    """

    def __init__(self, requests: int, stream: Any = None):
        self.stream = sys.stderr if stream is None else stream
        self.progress, self.left = Progress(requests=requests), requests
        self.at = self.drawn = time.monotonic()

    def step(self, plan: Plan, *, left: int) -> None:
        """Take in one step, after which `left` requests are not done."""
        now = time.monotonic()
        self.progress = advance(
            self.progress,
            seconds=now - self.at,
            prefill=int(plan.query_lens.sum()) - plan.num_decode,
            decode=int(plan.samples.sum()),
            finished=self.left - left,
        )
        self.left, self.at = left, now
        if now - self.drawn >= REDRAW_SECONDS:
            self.drawn = now
            self._draw("")

    def close(self) -> None:
        """Leave the last state of the line on the terminal."""
        self._draw("\n")

    def _draw(self, ending: str) -> None:
        width = shutil.get_terminal_size((80, 24)).columns - 1
        self.stream.write(f"\r\x1b[K{line(self.progress, width)}{ending}")
        self.stream.flush()
