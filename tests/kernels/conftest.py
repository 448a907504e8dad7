"""Fixtures of the kernel tests."""

import jaxtyping
import pytest


@pytest.fixture
def unchecked():
    """Turns shape checking off for a test of the package's own refusals, which a checked run would come before."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
