"""RMS norm and its fusion with the residual: float64, transformers bit for bit, registration."""

import pytest
import torch

from fnllm_kernels.norm import add_rms_norm, add_rms_norm_reference, rms_norm, run_add_rms_norm


def exact(x, weight, eps):
    x = x.double()
    return x / (x.square().sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt() * weight.double()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("width", [8, 7, 130])
def test_equals_float64(dtype, bound, width):
    x, residual, weight = torch.randn(5, width).to(dtype), torch.randn(5, width).to(dtype), torch.randn(width).to(dtype)
    y, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    want = exact(total, weight, 1e-5)
    assert (y.double() - want).norm() / want.norm() < bound
    assert torch.equal(y, rms_norm(total, weight, 1e-5))
    assert y.dtype == total.dtype == dtype


def test_equals_transformers_bit_for_bit():
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    norm = qwen3.Qwen3RMSNorm(16, eps=1e-6).bfloat16()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(5, 16).bfloat16() * 3
    assert torch.equal(rms_norm(x, norm.weight.detach(), 1e-6), norm(x).detach())


def test_is_differentiable_on_the_cpu():
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    residual = torch.randn(3, 6, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x, w: add_rms_norm(x, residual, w, 1e-5), (x, weight))


def test_arguments_are_not_changed():
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    kept = x.clone(), residual.clone(), weight.clone()
    add_rms_norm(x, residual, weight, 1e-5)
    assert all(torch.equal(a, b) for a, b in zip((x, residual, weight), kept, strict=True))


def test_refuses_what_does_not_belong_together(unchecked):
    with pytest.raises(ValueError, match=r"weight \(7,\); they must be \[T, H\] and \[H\]"):
        rms_norm(torch.randn(3, 8), torch.randn(7), 1e-5)
    with pytest.raises(ValueError, match="one shape and dtype"):
        add_rms_norm(torch.randn(3, 8), torch.randn(2, 8), torch.randn(8), 1e-5)


def test_parts_are_added_and_rounded_before_the_residual():
    parts, residual, weight = torch.randn(3, 5, 8), torch.randn(5, 8).bfloat16(), torch.randn(8).bfloat16()
    y, total = run_add_rms_norm(parts, residual, weight, 1e-5)
    want = add_rms_norm((parts[0] + parts[1] + parts[2]).bfloat16(), residual, weight, 1e-5)
    assert torch.equal(y, want[0]) and torch.equal(total, want[1])


def test_refuses_parts_that_are_not_float32_or_have_no_residual(unchecked):
    parts, residual, weight = torch.randn(2, 5, 8).bfloat16(), torch.randn(5, 8).bfloat16(), torch.randn(8).bfloat16()
    with pytest.raises(ValueError, match=r"they must be \[T, H\] and \[H\]"):
        run_add_rms_norm(parts, residual, weight, 1e-5)
    with pytest.raises(ValueError, match=r"they must be \[T, H\] and \[H\]"):
        rms_norm(parts.float(), weight, 1e-5)
    with pytest.raises(ValueError, match="one shape and dtype"):
        run_add_rms_norm(parts.float()[:, 1:], residual, weight, 1e-5)


@pytest.mark.compiled
def test_ops_are_registered_right():
    x, weight = torch.randn(5, 8), torch.randn(8)
    torch.library.opcheck(torch.ops.fnllm.rms_norm.default, (x, weight, 1e-5))
    torch.library.opcheck(torch.ops.fnllm.add_rms_norm.default, (x, x.clone(), weight, 1e-5))
    y, total = torch.ops.fnllm.add_rms_norm(x, x.clone(), weight, 1e-5)
    want = add_rms_norm_reference(x, x, weight, 1e-5)
    assert torch.equal(y, want[0]) and torch.equal(total, want[1])
