"""The progress line: rates, width, redraws, and silence where there is no terminal."""

import doctest
import io

from fnllm import progress
from fnllm.progress import Progress, advance, draw, end, line


def test_the_line_of_the_docstring():
    assert doctest.testmod(progress).failed == 0


def test_each_rate_counts_the_steps_of_its_kind():
    state = advance(Progress(requests=2), seconds=2.0, prefill=100)
    state = advance(state, seconds=1.0, decode=5)
    state = advance(state, seconds=1.0, prefill=50, decode=4, finished=2)
    assert line(state) == "2/2 [####################] prefill 50 tok/s, decode 4.5 tok/s, 9 new tokens"


def test_nothing_yet():
    assert line(Progress(requests=3)) == f"0/3 [{' ' * 20}] prefill - tok/s, decode - tok/s, 0 new tokens"
    assert line(Progress(requests=0)).startswith("0/0")


def test_it_fits_a_narrow_terminal():
    assert len(line(Progress(requests=3), width=20)) == 20


def test_redraws_are_few_and_stay_on_one_line():
    stream, state = io.StringIO(), Progress(requests=1)
    for now in (0.0, 0.05, 0.09, 0.2):
        state = draw(state, stream, now=now)
    assert stream.getvalue().count("\r\x1b[K") == 2
    assert "\n" not in stream.getvalue()
    end(state, stream)
    assert stream.getvalue().endswith("new tokens\n")


def test_only_a_terminal_gets_it():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    assert progress.is_terminal(Terminal())
    assert not progress.is_terminal(io.StringIO())
