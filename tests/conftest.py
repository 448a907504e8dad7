"""What all tests share: which kinds of test run where, and one thread for each process."""

import os
import sys

import pytest

# The tests' tensors are tiny. Set before torch is imported, and so for the processes that tests start as well.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that need a GPU where there is none; under shape checking leave out those that compile.

    torch.compile cannot trace functions whose shapes are checked, so the two never run in one process.
    """
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            for item in items:
                if item.get_closest_marker("gpu"):
                    item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if config.getoption("--jaxtyping-packages", default=None):
        compiling = [item for item in items if item.get_closest_marker("compiled")]
        config.hook.pytest_deselected(items=compiling)
        items[:] = [item for item in items if not item.get_closest_marker("compiled")]


def pytest_report_header() -> str:
    """Which torch runs, when it is known already."""
    torch = sys.modules.get("torch")
    return f"torch: {torch.__version__}" if torch else "torch: not imported yet"
