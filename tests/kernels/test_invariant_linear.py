"""The batch-invariant linear map: its plain form, and bit for bit on a GPU (its kernel: test_tiled_linear.py)."""

import pytest
import torch
from kernel_cases import check_product, product_case

from fnllm_kernels.invariant_linear import invariant_linear


def test_shapes_are_checked():
    # A type checker that watches the package answers first, in its own words.
    with pytest.raises(Exception, match=r"weight \(4, 5\)|'weight'"):
        invariant_linear(torch.zeros(2, 3), torch.zeros(4, 5))


def test_strides_and_no_rows():
    x, w = product_case(5, 32, 9, torch.float32, "cpu")
    wide = torch.zeros(5, 64)
    wide[:, ::2] = x
    assert torch.equal(invariant_linear(wide[:, ::2], w), invariant_linear(x, w))
    assert invariant_linear(x[:0], w).shape == (0, 9)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, relative", [(torch.bfloat16, 6e-3), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("inputs, outputs", [(1024, 6144), (3072, 1024), (1024, 4096), (333, 77), (2560, 19456)])
def test_a_rows_bits_do_not_depend_on_the_others(inputs, outputs, dtype, relative):
    x, w = product_case(300, inputs, outputs, dtype, "cuda")
    whole = invariant_linear(x, w)
    check_product(whole, x, w, relative)
    for first, last in ((0, 1), (5, 6), (17, 33), (0, 64), (3, 68), (100, 300)):
        assert torch.equal(invariant_linear(x[first:last], w), whole[first:last]), (first, last)


@pytest.mark.gpu
def test_a_single_row_that_was_a_column():
    x, w = product_case(1, 1024, 640, torch.bfloat16, "cuda")
    turned = torch.empty_strided((1, 1024), (1, 1), dtype=x.dtype, device="cuda").copy_(x)
    assert turned.is_contiguous() and turned.stride() == (1, 1)
    assert torch.equal(invariant_linear(turned, w), invariant_linear(x, w))
