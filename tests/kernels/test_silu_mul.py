"""silu(gate) * up: float64, halves in the right order, registration."""

import pytest
import torch

from fnllm_kernels.silu_mul import silu_mul


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("width", [3, 8])
def test_equals_float64(dtype, bound, width):
    gate_up = (torch.randn(5, 2 * width) * 3).to(dtype)
    gate, up = gate_up[:, :width].double(), gate_up[:, width:].double()
    want = gate / (1 + (-gate).exp()) * up
    out = silu_mul(gate_up)
    assert (out.double() - want).norm() / want.norm() < bound and out.shape == (5, width)


def test_refuses_odd_rows(unchecked):
    with pytest.raises(ValueError, match=r"gate_up is \(2, 5\); it must be \[T, 2 \* I\]"):
        silu_mul(torch.randn(2, 5))


@pytest.mark.compiled
def test_op_is_registered_right():
    torch.library.opcheck(torch.ops.fnllm.silu_mul.default, (torch.randn(5, 6),))
