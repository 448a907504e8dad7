"""Tiny checkpoints shared by the tests of the open step."""

import functools
from pathlib import Path

import pytest
import torch

import fnllm

ORACLE = Path(__file__).parents[2] / "oracle"


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@functools.cache
def loaded(name: str, dtype: torch.dtype):
    return fnllm.load(ORACLE / name, dtype=dtype, device="cpu")


@pytest.fixture
def tiny():
    """The three-layer Qwen3 of the oracle, in float32: the same value in all tests, so its engines are shared."""
    return loaded("qwen3-tiny", torch.float32)


@pytest.fixture
def checkpoint():
    """A function from an oracle's name (and dtype) to its params."""
    return lambda name, dtype=torch.float32: loaded(name, dtype)


@pytest.fixture(scope="session")
def reference():
    """A function from an oracle's name (and dtype) to transformers' model of it."""
    transformers = pytest.importorskip("transformers")

    @functools.cache
    def load(name: str, dtype: torch.dtype = torch.float32):
        return transformers.AutoModelForCausalLM.from_pretrained(
            ORACLE / name, dtype=dtype, attn_implementation="sdpa"
        ).eval()

    return load
