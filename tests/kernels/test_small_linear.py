"""small_linear and norm_linear on the CPU: the reference, the custom ops, the checks."""

import pytest
import torch
from torch import library

from fnllm_kernels.small_linear import linear_reference, norm_linear, small_linear


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
    library.opcheck(torch.ops.fnllm.norm_linear, (x, norm, 1e-6, w, None, True, False))


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
