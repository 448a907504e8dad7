"""The sampler's Triton kernels: in Triton's interpreter on a CPU, and compiled on a GPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("sampler_interpreted.py")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("part", ["sample", "head", "threshold"])
def test_interpreted_kernel_equals_its_reference(part):
    run = subprocess.run(
        [sys.executable, str(SCRIPT), part],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0 and "ok" in run.stdout, run.stdout + run.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("part", ["check_sample", "check_head", "check_threshold"])
def test_compiled_kernel_equals_its_reference(part):
    spec = importlib.util.spec_from_file_location("sampler_interpreted", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    getattr(module, part)("cuda")
