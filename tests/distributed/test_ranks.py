"""Ranks over gloo, eager: equal to one rank, the open step, refusals on all ranks."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from groups import assert_passed, cases, run_group

GROUPS = {
    2: ("checks_equal.py", "checks_open.py", "checks_refusals.py"),
    3: ("checks_equal.py",),
    4: ("checks_equal.py", "checks_traced.py"),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of a group by its size; it runs when the first of its tests asks for it."""
    known: dict[int, list[dict]] = {}

    def of(size: int) -> list[dict]:
        if size not in known:
            known[size] = run_group(size, GROUPS[size], tmp_path_factory.mktemp(f"ranks{size}"))
        return known[size]

    return of


@pytest.mark.parametrize(("size", "check"), list(cases(GROUPS)))
def test_ranks(results, size, check):
    assert_passed(results(size), check)
