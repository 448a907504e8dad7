"""Fixtures of the scheduler's tests."""

import pytest


@pytest.fixture
def unchecked(request):
    """Skips a test of wrong types, or of cost, in runs where a type checker stands before every function."""
    if request.config.getoption("jaxtyping_packages", None):
        pytest.skip("the type checker answers first")
