"""Ranks over gloo, compiled, against one eager rank. A file of its own: it takes as long as all other groups."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from groups import assert_passed, cases, run_groups

GROUP = {2: ("checks_compiled.py",)}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_groups(GROUP, tmp_path_factory.mktemp("compiled"))[2]


@pytest.mark.parametrize(("size", "check"), list(cases(GROUP, pytest.mark.compiled, pytest.mark.slow)))
def test_ranks(results, size, check):
    assert_passed(results, check)
