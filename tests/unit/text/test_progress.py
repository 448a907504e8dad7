"""The progress line: rates, width, redraws, and silence where there is no terminal."""

import doctest
import io

import numpy as np
import pytest

from fnllm import progress
from fnllm.progress import Meter, Progress, advance, line
from fnllm.scheduler import Plan


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_the_line_of_the_docstring():
    assert doctest.testmod(progress).failed == 0


def test_each_rate_counts_the_steps_of_its_kind():
    counts = advance(Progress(requests=2), seconds=2.0, prefill=100)
    counts = advance(counts, seconds=1.0, decode=5)
    counts = advance(counts, seconds=1.0, prefill=50, decode=4, finished=2)
    assert line(counts) == "2/2 [####################] prefill 50 tok/s, decode 4.5 tok/s, 9 new tokens"


def test_nothing_yet():
    assert line(Progress(requests=3)) == f"0/3 [{' ' * 20}] prefill - tok/s, decode - tok/s, 0 new tokens"
    assert line(Progress(requests=0)).startswith("0/0")


def test_it_fits_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    stream = Terminal()
    Meter(3, stream).close()
    assert len(stream.getvalue().removeprefix("\r\x1b[K").rstrip("\n")) == 29


def test_redraws_are_few_and_stay_on_one_line(clock):
    stream = Terminal()
    meter = Meter(3, stream)
    none, three = np.empty(0, np.int32), np.arange(3, dtype=np.int32)
    plan = Plan(
        step=0,
        rows=three,
        seq_ids=three,
        starts=three,
        query_lens=np.array([1, 3, 2], np.int32),
        num_decode=1,
        prefill_tokens=np.zeros(5, np.int32),
        samples=np.array([True, True, False]),
        joins=(),
        table_updates=(none, none, none),
        copies=(none, none),
    )
    for _ in range(10):
        clock[0] += 0.03
        meter.step(plan, left=2)
    assert stream.getvalue().count("\r\x1b[K") == 2
    assert "\n" not in stream.getvalue()
    meter.close()
    last = stream.getvalue().split("\r\x1b[K")[-1]
    assert last == "1/3 [######              ] prefill 167 tok/s, decode 67 tok/s, 20 new tokens\n"


def test_only_a_terminal_gets_it(monkeypatch):
    assert progress.is_terminal(Terminal())
    assert not progress.is_terminal(io.StringIO())
    monkeypatch.setattr(progress.sys, "stderr", Terminal())
    assert progress.is_terminal()
    progress.say("built")
    assert progress.sys.stderr.getvalue() == "fnllm: built\n"
    monkeypatch.setattr(progress.sys, "stderr", None)  # as under pythonw
    assert not progress.is_terminal()
    progress.say("built")
