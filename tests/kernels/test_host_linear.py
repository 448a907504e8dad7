"""Tall products on the CPU: against float64, at the bounds of what is taken by blocks, and with gradients."""

import pytest
import torch

from fnllm_kernels import host_linear as module
from fnllm_kernels.host_linear import host_linear


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17])
@pytest.mark.parametrize("height", [11, 12, 17])
def test_equals_float64(rows, height, monkeypatch):
    monkeypatch.setattr(module, "_TALL", 12)
    monkeypatch.setattr(module, "_BLOCK", 4)
    generator = torch.Generator().manual_seed(rows)
    x, w = torch.randn(rows, 7, generator=generator), torch.randn(height, 7, generator=generator)
    with torch.no_grad():
        found = host_linear(x, w)
    assert found.shape == (rows, height) and found.is_contiguous()
    torch.testing.assert_close(found, (x.double() @ w.double().t()).float(), rtol=0, atol=1e-5)


def test_blocks_are_used_where_no_gradient_is_wanted(monkeypatch):
    monkeypatch.setattr(module, "_TALL", 12)
    monkeypatch.setattr(module, "_BLOCK", 4)
    calls, multiply = [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *args, **options: calls.append(1) or multiply(*args, **options))
    x, w = torch.randn(3, 7, requires_grad=True), torch.randn(13, 7)
    host_linear(x, w).sum().backward()
    torch.testing.assert_close(x.grad, w.sum(0).expand(3, -1))
    assert not calls
    with torch.no_grad():
        host_linear(x, w)
    assert len(calls) == 1
