"""The progress line: rates, width, redraws, and silence where there is no terminal."""

import doctest
import io

import pytest

from fnllm import progress
from fnllm.progress import Counts, Progress, advance, line


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
    counts = advance(Counts(requests=2), seconds=2.0, prefill=100)
    counts = advance(counts, seconds=1.0, decode=5)
    counts = advance(counts, seconds=1.0, prefill=50, decode=4, finished=2)
    assert line(counts) == "2/2 [####################] prefill 50 tok/s, decode 4.5 tok/s, 9 new tokens"


def test_nothing_yet():
    assert line(Counts(requests=3)) == f"0/3 [{' ' * 20}] prefill - tok/s, decode - tok/s, 0 new tokens"
    assert line(Counts(requests=0)).startswith("0/0")


def test_it_fits_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    stream = Terminal()
    Progress(3, stream).close()
    assert len(stream.getvalue().removeprefix("\r\x1b[K").rstrip("\n")) == 29


def test_redraws_are_few_and_stay_on_one_line(clock):
    stream = Terminal()
    meter = Progress(3, stream)
    for _ in range(10):
        clock[0] += 0.03
        meter.update(prefill=5, decode=2, running=2)
    assert stream.getvalue().count("\r\x1b[K") == 2
    assert "\n" not in stream.getvalue()
    meter.close()
    last = stream.getvalue().split("\r\x1b[K")[-1]
    assert last == "1/3 [######              ] prefill 167 tok/s, decode 67 tok/s, 20 new tokens\n"


def test_only_a_terminal_gets_it(clock):
    stream = io.StringIO()
    meter = Progress(1, stream)
    clock[0] += 5
    meter.update(prefill=5, decode=0, running=1)
    meter.close()
    assert stream.getvalue() == ""
