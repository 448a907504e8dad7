"""Products of few rows on the CPU: against float64, at the bounds of each way, and with gradients."""

import pytest
import torch

from fnllm_kernels import host_linear as module
from fnllm_kernels.host_linear import host_linear, onednn_available


@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 2, 4, 5, 16, 17])
@pytest.mark.parametrize(("height", "width"), [(11, 7), (7, 7), (5, 7)])
def test_equals_float64(rows, height, width, onednn, monkeypatch):
    if not onednn:
        monkeypatch.setattr(module, "onednn_available", lambda: False)
    generator = torch.Generator().manual_seed(rows)
    x, w = torch.randn(rows, width, generator=generator), torch.randn(height, width, generator=generator)
    with torch.no_grad():
        found = host_linear(x, w)
        turned = host_linear(x, w.t().contiguous().t())
    assert found.shape == (rows, height) and found.is_contiguous()
    for y in (found, turned):
        torch.testing.assert_close(y, (x.double() @ w.double().t()).float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_go_torchs_own_way(dtype):
    x, w = torch.randn(3, 7, dtype=dtype), torch.randn(11, 7, dtype=dtype)
    with torch.no_grad():
        assert torch.equal(host_linear(x, w), torch.nn.functional.linear(x, w))


@pytest.mark.skipif(not onednn_available(), reason="torch was built without oneDNN")
@pytest.mark.parametrize(("rows", "used"), [(1, True), (3, False), (16, True), (17, False)])
def test_onednn_is_used_where_no_gradient_is_wanted(rows, used):
    x, w = torch.randn(rows, 7, requires_grad=True), torch.randn(13, 7)

    def operations() -> set[str]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            y = host_linear(x, w)
        assert y.shape == (rows, 13)
        return {event.key for event in seen.key_averages()}

    assert "mkldnn::_linear_pointwise" not in operations()
    host_linear(x, w).sum().backward()
    torch.testing.assert_close(x.grad, w.sum(0).expand(rows, -1))
    with torch.no_grad():
        assert ("mkldnn::_linear_pointwise" in operations()) == used
