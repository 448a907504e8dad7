"""What the kernels' tests share."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def unwritten_is_nan() -> Iterator[None]:
    """torch.empty gives NaN or the largest integer, so what a kernel fails to write shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
