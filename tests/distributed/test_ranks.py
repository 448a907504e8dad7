"""Ranks over gloo, eager: equal to one rank, the open step, refusals on all ranks."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from groups import assert_passed, cases, run_groups

GROUPS = {
    2: ("checks_exchanges.py", "checks_equal.py", "checks_open.py", "checks_refusals.py"),
    3: ("checks_exchanges.py", "checks_equal.py"),
    4: ("checks_exchanges.py", "checks_equal.py", "checks_traced.py"),
}


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """Results of each group of which a test was chosen, by its size."""
    chosen = {item.callspec.params["size"] for item in request.session.items if item.path == request.path}
    return run_groups({size: GROUPS[size] for size in sorted(chosen)}, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(("size", "check"), list(cases(GROUPS)))
def test_ranks(results, size, check):
    assert_passed(results[size], check)
