"""Fingerprints of the inputs that ranks compare."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fnllm
from fnllm.fingerprint import fingerprint

ROOT = Path(__file__).parents[3]
DIFFERENT = [
    None, True, 1, 1.0, "1", b"1", [], (1, 2), [1, [2]], [[1], 2], ["ab"], ["a", "b"], [12, 3], [1, 23], {"a": 1},
    {"a": 2}, {"b": 1}, [("a", 1)], {1, 2}, np.arange(3), np.arange(3.0), np.arange(3)[None],
    torch.arange(4), torch.tensor(4),
    fnllm.Sampling(), fnllm.Sampling(temperature=0), fnllm.Sampling(logit_bias={1: 2.0}), fnllm.Layers(), fingerprint,
    replace, [{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}],
]  # fmt: skip


def test_different_values_have_different_fingerprints():
    assert len({fingerprint(value) for value in DIFFERENT}) == len(DIFFERENT)


def test_equal_values_have_equal_ones():
    assert fingerprint({"a": [1, 2], "b": torch.ones(2)}) == fingerprint({"a": (1, 2), "b": torch.ones(2)})
    assert fingerprint({"x", "yy"}) == fingerprint({"yy", "x"})
    assert fingerprint(fnllm.Sampling(top_k=3)) == fingerprint(fnllm.Sampling(top_k=3))
    assert fingerprint([lambda: 1]) == fingerprint([lambda: 2])  # by name: what a function holds may be a rank's own
    assert -(2**63) <= fingerprint("x") < 2**63


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_a_tensor_counts_by_its_numbers_and_not_by_how_they_lie(dtype):
    x = (torch.arange(12).reshape(3, 4) % 2).to(dtype)
    assert fingerprint(x.T) == fingerprint(x.T.contiguous()) != fingerprint(x)
    assert fingerprint(x) != fingerprint(torch.ones_like(x))
    assert fingerprint(torch.ones(2, requires_grad=True)) == fingerprint(torch.ones(2))


def test_another_process_finds_the_same():
    code = (
        "import fnllm; from fnllm.fingerprint import fingerprint as f; print(f([{'a', 'b'}, 'é', 1.5, fnllm.Layers()]))"
    )
    path = ":".join(map(str, (ROOT, ROOT / "kernels", ROOT / "weights")))
    environment = {"PYTHONPATH": path, "PYTHONHASHSEED": "77", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) == fingerprint([{"b", "a"}, "é", 1.5, fnllm.Layers()])


def test_long_prompts_take_no_time_per_token():
    benchmark = [list(range(1000))] * 300
    assert fingerprint(benchmark) == fingerprint(benchmark)


@pytest.mark.parametrize("value", [object(), fnllm, open, torch.nn.ReLU()])
def test_anything_else_counts_by_its_type_or_name(value):
    assert isinstance(fingerprint(value), int)
