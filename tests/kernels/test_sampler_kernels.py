"""The sampler's Triton kernels: in Triton's interpreter on a CPU, and compiled on a GPU."""

import importlib.util
from pathlib import Path

import pytest
import torch
from interpreted import interpreted

SCRIPT = Path(__file__).with_name("sampler_interpreted.py")


@pytest.fixture(scope="module")
def passed() -> list[str]:
    """The parts that passed in the interpreter, of one process for all."""
    return interpreted(str(SCRIPT)).split()


@pytest.mark.parametrize("part", ["sample", "threshold", "strides"])
def test_interpreted_kernel_equals_its_reference(passed, part):
    assert part in passed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("part", ["check_sample", "check_threshold", "check_strides"])
def test_compiled_kernel_equals_its_reference(part):
    spec = importlib.util.spec_from_file_location("sampler_interpreted", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    getattr(module, part)("cuda")
