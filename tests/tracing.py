"""torch.compile without Inductor: steps are traced as always and the graphs run as torch's own operations.

Generating code takes seconds of every graph; tests that ask what is traced, and how often, need none.
"""

import contextlib
from collections.abc import Iterator
from functools import partial

import pytest
import torch


@contextlib.contextmanager
def without_code_generation() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
        yield
