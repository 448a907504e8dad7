"""A product, an addition and a norm as one op: against float64 and the separate ops, in halves and as before."""

import pytest
import torch
from gpu_cases import BOUND, captured
from kernel_cases import check_product, relative_error
from torch import library

from fnllm_kernels import linear_add_norm
from fnllm_kernels.linear_add_norm import PRODUCTS, cublas_halves, fastest_way, linear_add_rms_norm, way_of
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


def choose(monkeypatch, way):
    monkeypatch.setattr(linear_add_norm, "way_of", lambda x, w: way)


def check_in_halves(way, x, w, residual, weight):
    """The op's sum has each of its roundings: of the halves' sum, and of that with the residual."""
    y, total = linear_add_rms_norm(x, w, residual, weight, EPS)
    halves = PRODUCTS[way](x, w)
    assert halves.dtype == torch.float32 and halves.shape == (2, *residual.shape)
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
def test_in_halves_rounds_as_the_separate_ops(dtype, monkeypatch):
    choose(monkeypatch, "cuBLAS halves")
    check_in_halves("cuBLAS halves", *operands(5, 12, 7, dtype))


@pytest.mark.parametrize("way", PRODUCTS)
def test_the_way_decides_which_product_is_normed(way, monkeypatch):
    x, w, residual, weight = operands(5, 12, 7, torch.float32)
    made = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    choose(monkeypatch, way)
    monkeypatch.setitem(PRODUCTS, way, lambda x, w: made)
    y, total = linear_add_rms_norm(x, w, residual, weight, EPS)
    assert torch.equal(total, made[0] + made[1] + residual)
    assert relative_error(y, exact_norm(total, weight)) < 1e-6


def test_cublas_halves_are_those_of_the_inputs():
    x, w, _, _ = operands(5, 12, 7, torch.bfloat16)
    halves = cublas_halves(x, w)
    assert halves.dtype == torch.float32 and halves.shape == (2, 5, 7)
    for half, part in zip(halves, (slice(0, 6), slice(6, 12)), strict=True):
        assert relative_error(half, x[:, part].double() @ w[:, part].double().T) < 1e-6


@pytest.mark.parametrize(
    ("inputs", "outputs", "tiled", "cublas"),
    [
        (2048, 1024, range(17, 129), ()),  # fewer rows have kernels of their own
        (3072, 1024, range(17, 129), ()),
        (1023, 1024, (), ()),
        (6144, 2047, range(17, 129), ()),
        (6144, 2048, range(2, 129), ()),
        (9728, 2560, range(2, 65), ()),  # 65 rows would be 160 programs
        (8192, 3072, range(2, 33), range(129, 257)),
        (12288, 4096, range(2, 33), range(129, 257)),
        (12288 + 64, 4096, range(2, 33), ()),  # halves that 64 does not divide
        (4096, 4096, range(2, 33), range(129, 225)),
        (4096 - 128, 4096, range(2, 33), ()),
        (12288, 4104, range(2, 33), ()),
        (5120, 5120, (), ()),
    ],
)
def test_the_rows_for_which_halves_are_fastest(inputs, outputs, tiled, cublas):
    found = {way: [rows for rows in range(1, 300) if fastest_way(rows, inputs, outputs) == way] for way in PRODUCTS}
    assert found["tiled halves"] == list(tiled) and found["cuBLAS halves"] == list(cublas)


def test_on_a_cpu_whole():
    x, w, _, _ = operands(64, 2048, 1024, torch.bfloat16)
    assert fastest_way(64, 2048, 1024) != "whole" and way_of(x, w) == "whole"


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
@pytest.mark.parametrize(
    ("way", "rows", "inputs", "outputs"),
    [("tiled halves", rows, inputs, 1024) for rows in (17, 31, 64, 65, 128) for inputs in (2048, 2056, 3072)]
    + [("tiled halves", 70, 2056, 1000), ("tiled halves", 96, 6144, 2048), ("tiled halves", 48, 9728, 2560)]
    + [("tiled halves", rows, inputs, 4096) for rows in (2, 8, 16, 24, 32) for inputs in (4096, 12288)]
    + [("cuBLAS halves", rows, inputs, 4096) for rows in (129, 192, 256) for inputs in (4096, 12288)],
)
def test_on_a_gpu_in_halves(way, rows, inputs, outputs, monkeypatch):
    choose(monkeypatch, way)
    check_in_halves(way, *operands(rows, inputs, outputs, torch.bfloat16, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [
        (1, 40, 24), (5, 200, 72), (129, 41, 23), (128, 12288, 4096), (257, 12288, 4096), (192, 1024, 3072),
        (16, 2048, 1024), (129, 3072, 1024), (64, 1016, 1024), (48, 4096, 4096),
    ],
)  # fmt: skip
def test_on_a_gpu_as_before(rows, inputs, outputs):
    check_as_before(*operands(rows, inputs, outputs, torch.bfloat16, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("way", "rows", "inputs", "outputs"), [("tiled halves", 64, 3072, 1024), ("cuBLAS halves", 192, 12288, 4096)]
)
def test_on_a_gpu_the_tensors_decide(way, rows, inputs, outputs):
    x, w, _, _ = operands(rows, inputs, outputs, torch.bfloat16, "cuda")
    assert way_of(x, w) == (way if torch.cuda.get_device_capability()[0] >= 9 else "whole")
    others = (x[:1], w), (x.half(), w.half()), (x, w.T.contiguous().T), (x.T.contiguous().T, w)
    assert [way_of(*tensors) for tensors in others] == ["whole"] * 4


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("way", "rows", "inputs", "outputs"), [("tiled halves", 31, 2056, 1024), ("cuBLAS halves", 144, 4096, 4096)]
)
def test_on_a_gpu_in_a_graph(way, rows, inputs, outputs, monkeypatch):
    choose(monkeypatch, way)
    x, w, residual, weight = operands(rows, inputs, outputs, torch.bfloat16, "cuda")
    graph, (y, total) = captured(lambda: linear_add_rms_norm(x, w, residual, weight, EPS))
    x.copy_(x.flip(0))
    graph.replay()
    assert all(map(torch.equal, (y, total), linear_add_rms_norm(x, w, residual, weight, EPS)))
    check_in_halves(way, x, w, residual, weight)
