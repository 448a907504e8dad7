"""small_linear and norm_linear: the reference, the custom ops, the checks; on a GPU rows and weights of any kind."""

import pytest
import torch
from gpu_cases import captured
from torch import library

from fnllm_kernels import small_linear as module
from fnllm_kernels.norm import rms_norm, rms_norm_reference
from fnllm_kernels.small_linear import linear_reference, norm_linear, run_linear, small_linear


def test_reference_matches_float64():
    torch.manual_seed(0)
    x, w, norm, bias = (torch.randn(*s) for s in ((3, 8), (10, 8), (8,), (10,)))
    wide = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.double()
    expected = wide @ w.double().T + bias.double()
    got = linear_reference(x, w, bias=bias, norm=norm, eps=1e-3)
    torch.testing.assert_close(got, expected.float(), rtol=1e-5, atol=1e-5)
    y = norm_linear(x, norm, 1e-3, w, bias=bias, gated=True)
    gate, up = expected[:, :5], expected[:, 5:]
    torch.testing.assert_close(y, (gate * torch.sigmoid(gate) * up).float(), rtol=1e-5, atol=1e-5)
    residual = torch.randn(3, 10)
    y = small_linear(x, w, bias=bias, residual=residual)
    expected = x.double() @ w.double().T + bias.double() + residual.double()
    torch.testing.assert_close(y, expected.float(), rtol=1e-5, atol=1e-5)


def test_custom_ops_are_well_formed():
    x, w, norm = torch.randn(3, 8), torch.randn(10, 8), torch.randn(8)
    library.opcheck(torch.ops.fnllm.small_linear, (x, w, None, torch.randn(3, 10), False, True))
    library.opcheck(torch.ops.fnllm.small_linear, (x, w, None, torch.randn(10, 3).t(), False, True))
    library.opcheck(torch.ops.fnllm.norm_linear, (x, norm, 1e-6, w, None, True, False))


class OnGPU(torch.Tensor):
    is_cuda = True


def test_a_weight_that_begins_between_two_pairs_is_not_read_as_pairs():
    pytest.importorskip("triton")
    x, flat = (torch.zeros(size, dtype=torch.bfloat16).as_subclass(OnGPU) for size in ((1, 8), (65,)))
    assert module.takes(x, flat[:64].view(8, 8)) and not module.takes(x, flat[1:].view(8, 8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": torch.randn(10, 9)}, r"expected \[T, H\] and \[O, H\]"),
        ({"bias": torch.randn(9)}, r"bias has shape \(9,\), expected \(10,\)"),
        ({"residual": torch.randn(2, 10)}, r"residual has shape \(2, 10\), expected \(3, 10\)"),
        ({"gated": True, "residual": torch.randn(3, 5)}, "gated needs"),
    ],
)
def test_operands_that_do_not_fit_are_refused(unchecked, change, message):
    given = {"x": torch.randn(3, 8), "w": torch.randn(10, 8)} | change
    with pytest.raises(ValueError, match=message):
        small_linear(given.pop("x"), given.pop("w"), **given)
    with pytest.raises(TypeError, match="give both the same dtype"):
        small_linear(torch.randn(3, 8), torch.randn(10, 8, dtype=torch.bfloat16))


@pytest.mark.parametrize("fixed", [False, True])
def test_only_fixed_weights_are_fetched_before_the_kernel_before_has_ended(monkeypatch, fixed):
    decode_linear = pytest.importorskip("fnllm_kernels.decode_linear")
    asked = []
    monkeypatch.setattr(module, "takes", lambda x, w: True)

    def launched(x, w, *, pdl, **named):
        asked.append(pdl)
        return linear_reference(x, w)

    monkeypatch.setattr(decode_linear, "launch_linear", launched)
    run_linear(torch.randn(1, 8), torch.randn(4, 8), fixed=fixed)
    assert asked == [None if fixed else False]  # None: where the device can


def of_a_wider_row(x):
    """The same row, which begins between two pairs of numbers."""
    return torch.cat((x[:, :1], x), 1)[:, 1:]


def as_a_turned_column(x):
    """The same row: contiguous, with a stride of one along both axes."""
    return torch.empty_strided(x.shape, (1, 1), dtype=x.dtype, device=x.device).copy_(x)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [of_a_wider_row, as_a_turned_column])
@pytest.mark.parametrize("outputs", [1, 2, 77])
def test_a_single_row_of_any_layout(outputs, layout):
    x = torch.randn(1, 256, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(outputs, 256, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(small_linear(layout(x), w), small_linear(x, w))
    want = x.double() @ w.double().T
    assert (small_linear(layout(x), w) - want).norm() < 8e-3 * want.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_a_weight_that_the_step_makes_is_read_after_it_is_made(rows):
    """By a kernel that lets the next start at once, in a graph that is replayed with other numbers."""
    x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
    source = torch.randn(8192, 1024, device="cuda", dtype=torch.bfloat16)
    gain = torch.ones(1024, device="cuda", dtype=torch.bfloat16)
    graph, found = captured(lambda: small_linear(x, rms_norm(source, gain, 1e-6)))
    for _ in range(20):
        source.normal_(std=3.0)
        graph.replay()
        want = x.double() @ rms_norm_reference(source, gain, 1e-6).double().T
        assert (found - want).norm() < 8e-3 * want.norm()
