"""Settings shared by all tests: which kinds of test run where, and one thread for each process."""

import os
import shutil
import sys
from collections.abc import Iterator

import pytest

# The tests' tensors are tiny. Set before torch is imported, and so for the processes that tests start as well.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Several processes take whole files by name, in which order those that start processes themselves come early.

    pytest-xdist's own order, those of most tests first, leaves them for the end, where nothing else fills the machine.
    """
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that need what this machine has not; under shape checking leave out those that compile.

    torch.compile cannot trace functions whose shapes are checked, so the two never run in one process.
    """
    marked = {kind: [item for item in items if item.get_closest_marker(kind)] for kind in ("gpu", "compiled")}
    if marked["gpu"]:
        import torch

        if not torch.cuda.is_available():
            for item in marked["gpu"]:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if not any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++")))):
        for item in marked["compiled"]:
            item.add_marker(pytest.mark.skip(reason="torch.compile needs a C++ compiler here"))
    if config.getoption("--jaxtyping-packages", default=None):
        config.hook.pytest_deselected(items=marked["compiled"])
        items[:] = [item for item in items if not item.get_closest_marker("compiled")]


def pytest_report_header() -> str:
    """Which torch runs, when it is known already."""
    torch = sys.modules.get("torch")
    return f"torch: {torch.__version__}" if torch else "torch: not imported yet"


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Turns shape checking off for a test of a function's own refusals, of stand-ins, or of cost."""
    import jaxtyping

    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
