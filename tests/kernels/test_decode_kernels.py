"""The decode kernels in Triton's interpreter against float64 and plain torch, and their ops and checks on the CPU."""

import json
from pathlib import Path

import pytest
import torch
from interpreted import interpreted
from torch import library

from fnllm_kernels.decode_attention import decode_attention


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict]]:
    """The cases of each kind, of one process for all."""
    return json.loads(interpreted(str(Path(__file__).with_name("decode_cases.py"))))


def test_linear_kernels_match_float64(found):
    assert len(found["linear"]) == 14
    for case in found["linear"]:
        assert case["y"] < 8e-3, case  # bf16 results of bf16 operands


def test_attention_kernel_matches_plain_torch(found):
    assert len(found["attention"]) == 7
    for case in found["attention"]:
        assert case["y"] < 4e-3 and case["k"] < 1e-3, case
        assert case["v"] == 0 and case["counters"] == 0, case


def attention_case():
    torch.manual_seed(0)
    caches = [torch.randn(4, 2, 1, 4) for _ in range(2)]
    tables = torch.tensor([[2, 0], [1, -1]], dtype=torch.int32)
    lens, slots = torch.tensor([3, 0], dtype=torch.int32), torch.tensor([0, -1])
    counters = torch.zeros(4, dtype=torch.int32)
    cos, sin = torch.ones(2, 2), torch.zeros(2, 2)
    return torch.randn(2, 4 * 4), None, None, 1e-6, cos, sin, *caches, tables, lens, slots, counters


def test_attention_writes_its_slot_alone_and_attends_to_its_keys():
    given = attention_case()
    qkv, k_cache, v_cache = given[0], given[6], given[7]
    before = k_cache.clone(), v_cache.clone()
    y = decode_attention(*given, num_heads=2, scale=0.5)
    keys = torch.stack((before[0][2, 0, 0], before[0][2, 1, 0], qkv[0, 8:12])).double()
    values = torch.stack((before[1][2, 0, 0], before[1][2, 1, 0], qkv[0, 12:16])).double()
    for n in range(2):
        weights = torch.softmax(keys @ qkv[0, 4 * n : 4 * n + 4].double() * 0.5, dim=0)
        torch.testing.assert_close(y[0, 4 * n : 4 * n + 4], (weights @ values).float(), rtol=1e-5, atol=1e-5)
    assert not y[1].any()
    before[0][0, 0, 0], before[1][0, 0, 0] = qkv[0, 8:12], qkv[0, 12:16]
    assert torch.equal(k_cache, before[0]) and torch.equal(v_cache, before[1])


def test_attention_op_is_well_formed_and_checks_its_operands():
    given = attention_case()
    library.opcheck(torch.ops.fnllm.decode_attention, (*given, 2, 0.5, 0))
    with pytest.raises(ValueError, match="2 rows x 2 heads need more"):
        decode_attention(*given[:-1], given[-1][:3], num_heads=2, scale=0.5)
