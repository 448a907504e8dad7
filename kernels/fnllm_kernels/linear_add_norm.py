"""A matrix product with the residual addition and RMSNorm after it, where the norm's kernel finishes the product.

That kernel reads the product anyway. Where one product leaves multiprocessors without work, it is made as two halves,
the float32 products of about half of the inputs each, and the norm's kernel adds them:
- Up to 128 rows are few tiles, whose programs walk over all inputs. So there are twice as many programs, each with half
  the way, as long as all run at once (`tiled_linear.py`).
- For 129 to 256 rows of about 4096 outputs cuBLAS divides the inputs itself, but adds the parts up in a kernel of its
  own. So it is asked for two products.

Axes: T packed tokens, I inputs, H outputs (hidden).
"""

import functools
from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float, Float32
from torch import Tensor, library

from fnllm_kernels.norm import run_add_rms_norm
from fnllm_kernels.small_linear import check_linear, run_linear
from fnllm_kernels.tiled_linear import fetches_tiles, launch_tiled_parts, parts_tile, triton

Way = Literal["whole", "tiled halves", "cuBLAS halves"]


def linear_add_rms_norm(
    x: Float[Tensor, "T I"],
    w: Float[Tensor, "H I"],
    residual: Float[Tensor, "T H"],
    weight: Float[Tensor, " H"],
    eps: float,
) -> tuple[Float[Tensor, "T H"], Float[Tensor, "T H"]]:
    """add_rms_norm(small_linear(x, w), residual, weight, eps), with the same roundings; on a CPU in plain torch.

    w is fixed, as `small_linear` has it. Raises ValueError for operands that do not fit, TypeError for mixed dtypes.
    """
    return _linear_add_rms_norm_op(x, w, residual, weight, eps)


def fastest_way(rows: int, inputs: int, outputs: int) -> Way:
    """How a product takes least time, the norm behind it included, for bf16 on an H200; pure.

    - Halves by tiles, `o` and `down` in a layer (benchmarks/results/trials.json): of the 0.6B shape 36.3 us in place of
      38.6 at 24 rows, 63.7 in place of 65.1 at 128, and as long as before at 16 and from 160 on; of the 1.7B and 4B
      shapes 47.8 and 71.3 in place of 52.9 and 77.1 at 8 rows; of 8B 112.1 in place of 115.4 at 8 and 124.5 in place of
      127.0 at 32. Three or four parts gain 1 us more at best, and cuBLAS's halves are slower than the whole.
    - cuBLAS's halves, measured for 4096 outputs under the power limit (benchmarks/results/trials.json): with 12288
      inputs 2 to 7 us less of 38 to 52, with 4096 up to 5 us less of 16 to 23, but nothing at 129 and from 240 rows on.
      128 by 128 tiles of fewer than 3072 outputs would need more than two parts to fill 132 multiprocessors.

    >>> fastest_way(64, 2048, 1024), fastest_way(160, 2048, 1024), fastest_way(8, 2048, 1024)
    ('tiled halves', 'whole', 'whole')
    >>> fastest_way(8, 4096, 4096), fastest_way(64, 4096, 4096)
    ('tiled halves', 'whole')
    >>> fastest_way(256, 12288, 4096), fastest_way(256, 4096, 4096), fastest_way(208, 4096, 4096)
    ('cuBLAS halves', 'whole', 'cuBLAS halves')
    """
    fewest = 2 if outputs >= 2048 else 17  # narrower weights of fewer rows have kernels as fast (`decode_linear.py`)
    if fewest <= rows <= 128 and inputs >= 1024 and parts_tile(rows, outputs, 2):
        return "tiled halves"
    if not (3072 <= outputs <= 4096 and inputs % 128 == 0):
        return "whole"
    most = 256 if inputs >= 8192 else 224 if inputs >= 4096 else 0
    return "cuBLAS halves" if 129 <= rows <= most else "whole"


def way_of(x: Tensor, w: Tensor) -> Way:
    """`fastest_way` where the tensors allow halves: contiguous bf16 that TMA can fetch, so on sm_90 or later."""
    if triton is None or not (x.dtype == w.dtype == torch.bfloat16 and fetches_tiles(x, w)):
        return "whole"
    return fastest_way(*x.shape, w.shape[0])


def tiled_halves(x: Float[Tensor, "T I"], w: Float[Tensor, "H I"]) -> Float32[Tensor, "2 T H"]:
    """Two products, whose sum is x @ w.T, of whole tiles of inputs each."""
    return launch_tiled_parts(x, w, 2)


def cublas_halves(x: Float[Tensor, "T I"], w: Float[Tensor, "H I"]) -> Float32[Tensor, "2 T H"]:
    """The products of the first and of the second half of the inputs, whose sum is x @ w.T; copies neither operand."""
    a, b = x.unflatten(1, (2, -1)).transpose(0, 1), w.unflatten(1, (2, -1)).permute(1, 2, 0)
    # Only CUDA has products of 16-bit numbers with wider results.
    return torch.bmm(a, b, out_dtype=torch.float32) if x.is_cuda else torch.bmm(a.float(), b.float())


PRODUCTS: dict[Way, Callable[[Tensor, Tensor], Tensor]] = {
    "whole": functools.partial(run_linear, fixed=True),
    "tiled halves": tiled_halves,
    "cuBLAS halves": cublas_halves,
}


@library.custom_op(
    "fnllm::linear_add_rms_norm",
    mutates_args=(),
    schema="(Tensor x, Tensor w, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
)
def _linear_add_rms_norm_op(x, w, residual, weight, eps):
    check_linear(x, w, residual=residual)
    return run_add_rms_norm(PRODUCTS[way_of(x, w)](x, w), residual, weight, eps)


@_linear_add_rms_norm_op.register_fake
def _linear_add_rms_norm_fake(x, w, residual, weight, eps):
    return residual.new_empty(residual.shape), residual.new_empty(residual.shape)
