"""A product, the residual addition and the RMSNorm behind it, where the norm's kernel can finish the product's sums.

For 129 to 256 rows cuBLAS divides the inputs of a weight of about 4096 outputs, so that all multiprocessors have work,
and adds the parts up in a kernel of its own. Here the product is made of two halves of the inputs with float32 results,
and the kernel that adds the residual and norms, which reads the product anyway, adds them.

Axes: T packed tokens, I inputs, H outputs (hidden).
"""

import torch
from jaxtyping import Float, Float32
from torch import Tensor, library

from fnllm_kernels.norm import run_add_rms_norm
from fnllm_kernels.small_linear import check_linear, run_linear


def linear_add_rms_norm(
    x: Float[Tensor, "T I"],
    w: Float[Tensor, "H I"],
    residual: Float[Tensor, "T H"],
    weight: Float[Tensor, " H"],
    eps: float,
) -> tuple[Float[Tensor, "T H"], Float[Tensor, "T H"]]:
    """add_rms_norm(small_linear(x, w), residual, weight, eps), with the same roundings; on a CPU in plain torch.

    Raises ValueError for operands that do not fit, TypeError for mixed dtypes.
    """
    return _linear_add_rms_norm_op(x, w, residual, weight, eps)


def linear_halves(x: Float[Tensor, "T I"], w: Float[Tensor, "H I"]) -> Float32[Tensor, "2 T H"]:
    """The products of the first and of the second half of the inputs, whose sum is x @ w.T; copies neither operand."""
    a, b = x.unflatten(1, (2, -1)).transpose(0, 1), w.unflatten(1, (2, -1)).permute(1, 2, 0)
    # Only CUDA has products of 16-bit numbers with wider results.
    return torch.bmm(a, b, out_dtype=torch.float32) if x.is_cuda else torch.bmm(a.float(), b.float())


def halves_pay(rows: int, inputs: int, outputs: int) -> bool:
    """Whether two halves take less time than one product, for bf16 on an H200.

    Measured for 4096 outputs under the power limit, norm included (benchmarks/results/trials.json): with 12288 inputs 2
    to 7 us less of 38 to 52, with 4096 up to 5 us less of 16 to 23, but nothing at 129 and from 240 rows on. 128 by 128
    tiles of fewer than 3072 outputs would need more than two parts to fill 132 multiprocessors. Up to 128 rows
    `small_linear` has tiles of its own.

    >>> halves_pay(256, 12288, 4096), halves_pay(256, 4096, 4096), halves_pay(208, 4096, 4096)
    (True, False, True)
    """
    if not (3072 <= outputs <= 4096 and inputs % 128 == 0):
        return False
    most = 256 if inputs >= 8192 else 224 if inputs >= 4096 else 0
    return 129 <= rows <= most


def prefers_halves(x: Tensor, w: Tensor) -> bool:
    """Whether the product is made in two halves: where that pays, contiguous bf16 on sm_90 or later."""
    if not (x.is_cuda and x.dtype == w.dtype == torch.bfloat16 and x.is_contiguous() and w.is_contiguous()):
        return False
    return halves_pay(*x.shape, w.shape[0]) and torch.cuda.get_device_capability(x.device)[0] >= 9


@library.custom_op(
    "fnllm::linear_add_rms_norm",
    mutates_args=(),
    schema="(Tensor x, Tensor w, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
)
def _linear_add_rms_norm_op(x, w, residual, weight, eps):
    check_linear(x, w, residual=residual)
    product = linear_halves(x, w) if prefers_halves(x, w) else run_linear(x, w)
    return run_add_rms_norm(product, residual, weight, eps)


@_linear_add_rms_norm_op.register_fake
def _linear_add_rms_norm_fake(x, w, residual, weight, eps):
    return residual.new_empty(residual.shape), residual.new_empty(residual.shape)
