"""The batch-invariant linear map: by Triton's interpreter on the CPU, and bit for bit on a GPU."""

import pytest
import torch
from interpreted import INTERPRETING, interpreted_tests

from fnllm_kernels import invariant_linear as module
from fnllm_kernels.invariant_linear import cuts, invariant_linear, invariant_linear_reference

triton = pytest.importorskip("triton")


def problem(tokens, inputs, outputs, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, inputs, generator=generator, dtype=torch.float64)
    w = torch.randn(outputs, inputs, generator=generator, dtype=torch.float64)
    return x.to(device, dtype), w.to(device, dtype)


def check(result, x, w, relative):
    exact = x.double() @ w.double().T
    bound = relative * (x.double().abs() @ w.double().abs().T)
    assert ((result.double() - exact).abs() <= bound + 1e-6).all()


if not INTERPRETING:

    def test_kernels_in_the_interpreter():
        interpreted_tests(__file__)

    @pytest.mark.parametrize("outputs, inputs", [(64, 64), (1024, 4096), (151936, 1024), (5, 7), (6144, 100)])
    def test_cuts_cover_the_inputs(outputs, inputs):
        count, length = cuts(outputs, inputs)
        assert (count - 1) * length < inputs <= count * length and length % 64 == 0

    def test_shapes_are_checked():
        # A type checker that watches the package answers first, in its own words.
        with pytest.raises(Exception, match=r"weight \(4, 5\)|'weight'"):
            invariant_linear(torch.zeros(2, 3), torch.zeros(4, 5))

    def test_strides_and_no_rows():
        x, w = problem(5, 32, 9, torch.float32, "cpu")
        wide = torch.zeros(5, 64)
        wide[:, ::2] = x
        assert torch.equal(invariant_linear(wide[:, ::2], w), invariant_linear(x, w))
        assert invariant_linear(x[:0], w).shape == (0, 9)

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype, relative", [(torch.bfloat16, 6e-3), (torch.float32, 1e-5)], ids=str)
    @pytest.mark.parametrize("inputs, outputs", [(1024, 6144), (3072, 1024), (1024, 4096), (333, 77), (2560, 19456)])
    def test_a_rows_bits_do_not_depend_on_the_others(inputs, outputs, dtype, relative):
        """Across the two tilings and the two ways of adding the cuts."""
        x, w = problem(300, inputs, outputs, dtype, "cuda")
        whole = invariant_linear(x, w)
        check(whole, x, w, relative)
        for first, last in ((0, 1), (5, 6), (17, 33), (0, 64), (3, 68), (100, 300)):
            assert torch.equal(invariant_linear(x[first:last], w), whole[first:last]), (first, last)

else:
    # float16 and not bfloat16, of which the interpreter's dot multiplies the bit patterns
    @pytest.mark.parametrize("dtype, relative", [(torch.float32, 1e-5), (torch.float16, 1e-3)], ids=str)
    @pytest.mark.parametrize("tokens, inputs, outputs", [(3, 100, 37), (70, 48, 65), (1, 700, 5), (65, 600, 130)])
    def test_product(tokens, inputs, outputs, dtype, relative):
        x, w = problem(tokens, inputs, outputs, dtype, "cpu")
        check(module._linear_triton(x, w), x, w, relative)
        check(invariant_linear_reference(x, w), x, w, relative)

    def test_the_two_ways_of_adding_cuts_agree(monkeypatch):
        x, w = problem(20, 700, 40, torch.float32, "cpu")
        assert cuts(40, 700)[0] > 1
        apart = module._linear_triton(x, w)
        monkeypatch.setattr(module, "side_by_side", lambda *_: False)
        torch.testing.assert_close(module._linear_triton(x, w), apart, rtol=1e-6, atol=1e-6)
