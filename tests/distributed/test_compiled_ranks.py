"""Ranks over gloo, compiled, against one eager rank. A file of its own: it takes as long as all other groups."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from groups import assert_passed, cases, run_group

GROUP = {2: ("checks_compiled.py",)}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_group(2, GROUP[2], tmp_path_factory.mktemp("compiled"))


@pytest.mark.parametrize(("size", "check"), list(cases(GROUP, pytest.mark.compiled, pytest.mark.slow)))
def test_ranks(results, size, check):
    assert_passed(results, check)
