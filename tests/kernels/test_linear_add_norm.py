"""A product, an addition and a norm as one op: against float64 and the separate ops, by halves and as before."""

import pytest
import torch
from gpu_cases import BOUND, captured
from kernel_cases import check_product, relative_error
from torch import library

from fnllm_kernels import linear_add_norm
from fnllm_kernels.linear_add_norm import (
    halves_pay,
    linear_add_rms_norm,
    linear_halves,
    prefers_halves,
)
from fnllm_kernels.norm import add_rms_norm
from fnllm_kernels.small_linear import small_linear

EPS = 1e-5


def operands(rows, inputs, outputs, dtype, device="cpu"):
    """x, w, residual and the norm's weight; the product and the residual have numbers of order 1."""
    generator = torch.Generator(device).manual_seed(rows)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    w = normal(outputs, inputs) * inputs**-0.5
    return [a.to(dtype) for a in (normal(rows, inputs), w, normal(rows, outputs), 1 + normal(outputs) / 4)]


def exact_norm(total, weight):
    total = total.double()
    return (total / (total.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()).cpu()


def check_by_halves(x, w, residual, weight):
    """The op's sum has each of its roundings: of the halves' sum, and of that with the residual."""
    y, total = linear_add_rms_norm(x, w, residual, weight, EPS)
    halves = linear_halves(x, w)
    product = (halves[0] + halves[1]).to(x.dtype)
    check_product(product, x, w, 6e-3)
    assert torch.equal(total, product + residual)
    assert relative_error(y, exact_norm(total, weight)) < BOUND[x.dtype]
    assert y.dtype == total.dtype == x.dtype and y.shape == total.shape == residual.shape


def check_as_before(x, w, residual, weight):
    results = linear_add_rms_norm(x, w, residual, weight, EPS)
    separate = add_rms_norm(small_linear(x, w), residual, weight, EPS)
    assert all(map(torch.equal, results, separate))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_the_separate_ops_bit_for_bit(dtype):
    check_as_before(*operands(5, 12, 7, dtype))


def test_matches_float64():
    x, w, residual, weight = operands(5, 12, 7, torch.float32)
    y, total = linear_add_rms_norm(x, w, residual, weight, EPS)
    exact = x.double() @ w.double().T + residual.double()
    assert relative_error(total, exact) < 1e-6
    assert relative_error(y, exact_norm(exact, weight)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_by_halves_rounds_as_the_separate_ops(dtype, monkeypatch):
    monkeypatch.setattr(linear_add_norm, "prefers_halves", lambda x, w: True)
    check_by_halves(*operands(5, 12, 7, dtype))


def test_halves_are_those_of_the_inputs():
    x, w, _, _ = operands(5, 12, 7, torch.bfloat16)
    halves = linear_halves(x, w)
    assert halves.dtype == torch.float32 and halves.shape == (2, 5, 7)
    for half, part in zip(halves, (slice(0, 6), slice(6, 12)), strict=True):
        assert relative_error(half, x[:, part].double() @ w[:, part].double().T) < 1e-6


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "pays"),
    [
        (128, 12288, 4096, False),  # tiles of our own
        (129, 12288, 4096, True),
        (256, 12288, 4096, True),
        (257, 12288, 4096, False),
        (224, 4096, 4096, True),
        (225, 4096, 4096, False),
        (160, 4096 - 128, 4096, False),
        (256, 12288, 4104, False),
        (256, 8192, 3072, True),
        (256, 8192, 2560, False),
        (256, 12288 + 64, 4096, False),  # halves that 64 does not divide
    ],
)
def test_where_halves_pay(rows, inputs, outputs, pays):
    assert halves_pay(rows, inputs, outputs) == pays


def test_what_does_not_fit_is_refused(unchecked):
    x, w, residual, weight = operands(5, 12, 7, torch.float32)
    with pytest.raises(ValueError, match=r"expected \[T, H\] and \[O, H\]"):
        linear_add_rms_norm(x, w[:, 1:], residual, weight, EPS)
    with pytest.raises(ValueError, match=r"residual has shape \(4, 7\), expected \(5, 7\)"):
        linear_add_rms_norm(x, w, residual[1:], weight, EPS)
    with pytest.raises(ValueError, match=r"weight \(6,\); they must be"):
        linear_add_rms_norm(x, w, residual, weight[1:], EPS)
    with pytest.raises(TypeError, match="residual is torch.float64, but x is torch.float32"):
        linear_add_rms_norm(x, w, residual.double(), weight, EPS)


@pytest.mark.compiled
def test_op_is_registered_right():
    library.opcheck(torch.ops.fnllm.linear_add_rms_norm.default, (*operands(5, 12, 7, torch.float32), EPS))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [129, 192, 256])
@pytest.mark.parametrize("inputs", [4096, 12288])
def test_on_a_gpu_by_halves(inputs, rows, monkeypatch):
    monkeypatch.setattr(linear_add_norm, "prefers_halves", lambda x, w: True)
    check_by_halves(*operands(rows, inputs, 4096, torch.bfloat16, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [(1, 40, 24), (5, 200, 72), (129, 41, 23), (128, 12288, 4096), (257, 12288, 4096), (192, 1024, 3072)],
)
def test_on_a_gpu_as_before(rows, inputs, outputs):
    check_as_before(*operands(rows, inputs, outputs, torch.bfloat16, "cuda"))


@pytest.mark.gpu
def test_on_a_gpu_the_tensors_decide():
    x, w, _, _ = operands(192, 12288, 4096, torch.bfloat16, "cuda")
    assert prefers_halves(x, w) == (torch.cuda.get_device_capability()[0] >= 9)
    assert not prefers_halves(x[:128], w) and not prefers_halves(x.half(), w.half())
    assert not prefers_halves(x, w.T.contiguous().T) and not prefers_halves(x.T.contiguous().T, w)


@pytest.mark.gpu
def test_on_a_gpu_in_a_graph(monkeypatch):
    monkeypatch.setattr(linear_add_norm, "prefers_halves", lambda x, w: True)
    x, w, residual, weight = operands(144, 4096, 4096, torch.bfloat16, "cuda")
    graph, (y, total) = captured(lambda: linear_add_rms_norm(x, w, residual, weight, EPS))
    x.copy_(x.flip(0))
    graph.replay()
    assert all(map(torch.equal, (y, total), linear_add_rms_norm(x, w, residual, weight, EPS)))
