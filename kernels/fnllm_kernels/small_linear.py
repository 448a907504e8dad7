"""Linear layers: for the rows of a decode step, kernels whose time is that of reading the weights once.

`small_linear` may add a bias and a residual; `norm_linear` puts an RMSNorm before the product; with `gated` the weight
is a gate_up matrix and the result silu(gate) * up. Three kinds of kernels, and cuBLAS where it is faster:
- one row, and few rows of a small weight (`decode_linear.py`). On sm_90 they are launched dependently: they fetch their
  first weights, those of a product that is `fixed`, while the kernel before them still runs, and only then wait for its
  output;
- other products of up to 256 rows, on sm_90, by tiles that are fetched by TMA (`tiled_linear.py`), and gated ones of
  512 rows and more (`persistent_linear.py`).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from fnllm_kernels.decode_tiles import triton
from fnllm_kernels.norm import rms_norm_reference
from fnllm_kernels.persistent_linear import keeps_busy
from fnllm_kernels.silu_mul import silu_mul
from fnllm_kernels.tiled_linear import SMALL_WEIGHT, fetches_tiles, launch_tiled, limits_of

MAX_ROWS = 16
LARGE_WEIGHT = 1 << 25  # numbers


def check_linear(x, w, *, bias=None, residual=None, norm=None, gated=False) -> None:
    """Raises ValueError or TypeError unless the operands fit together."""
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} and w {tuple(w.shape)} do not fit: expected [T, H] and [O, H]")
    if gated and (w.shape[0] % 2 or residual is not None):
        raise ValueError(f"gated needs an even number of rows in w and no residual, found {w.shape[0]} rows")
    outputs = w.shape[0] // 2 if gated else w.shape[0]
    for name, tensor, shape in (
        ("bias", bias, (w.shape[0],)),
        ("residual", residual, (x.shape[0], outputs)),
        ("norm", norm, (x.shape[1],)),
    ):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
    for name, tensor in (("w", w), ("bias", bias), ("residual", residual), ("norm", norm)):
        if tensor is not None and tensor.dtype != x.dtype:
            raise TypeError(f"{name} is {tensor.dtype}, but x is {x.dtype}: give both the same dtype")


def linear_reference(x, w, *, bias=None, residual=None, norm=None, eps=0.0, gated=False) -> Tensor:
    """The same in plain torch, rounding where the model's separate layers round."""
    if norm is not None:
        x = rms_norm_reference(x, norm, eps)
    y = torch.nn.functional.linear(x, w, bias)
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = torch.nn.functional.silu(gate) * up
    return y if residual is None else y + residual  # in this order, for the sum's layout is that of its first term


def takes(x, w) -> bool:
    """Whether the kernels for few rows serve: bf16 on a GPU, rows of a length that 8 divides, and no large weight.

    For one row they read a large weight as well, as fast as cuBLAS or faster
    (benchmarks/results/decode_kernels.json).
    """
    rows, size = x.shape[0], w.numel()
    if w.storage_offset() % 2:  # it is read as pairs, and begins between two
        return False
    if not (x.is_cuda and triton is not None and x.dtype == w.dtype == torch.bfloat16 and w.is_contiguous()):
        return False
    return x.shape[1] % 8 == 0 and (rows == 1 or (rows <= MAX_ROWS and size <= LARGE_WEIGHT))


def prefers_tiles(x, w, gated: bool) -> bool:
    """Whether tiles are faster than both the kernels for few rows and cuBLAS (benchmarks/results/linear_tiles.json)."""
    rows, outputs = x.shape[0], w.shape[0] // 2 if gated else w.shape[0]
    if rows < 2 or triton is None or not fetches_tiles(x, w):
        return False
    if rows > 256:
        return gated and keeps_busy(rows, outputs, gated, *limits_of(x.device))
    if outputs > 32768:
        return False
    if rows <= 16:
        return w.shape[0] > 2048
    if w.numel() <= SMALL_WEIGHT or rows <= 64:
        return True
    # At 97 to 128 rows a wide gated product takes as long as cuBLAS and less power, which limits the clock.
    return rows <= 128 and (outputs <= 4096 or (gated and rows > 96))


def run_linear(x, w, *, bias=None, residual=None, norm=None, eps=0.0, gated=False, fixed=False) -> Tensor:
    """What the ops run, for other ops to call: the kernel that the operands prefer."""
    check_linear(x, w, bias=bias, residual=residual, norm=norm, gated=gated)
    if bias is None and residual is None and norm is None and prefers_tiles(x, w, gated):
        return launch_tiled(x, w, gated=gated)
    if not takes(x, w):
        if gated and x.is_cuda and norm is None:
            return silu_mul(torch.nn.functional.linear(x, w, bias))
        return linear_reference(x, w, bias=bias, residual=residual, norm=norm, eps=eps, gated=gated)
    from fnllm_kernels.decode_linear import launch_linear

    pdl = None if fixed else False
    return launch_linear(x, w, bias=bias, residual=residual, norm=norm, eps=eps, gated=gated, pdl=pdl)


@torch.library.custom_op("fnllm::small_linear", mutates_args=())
def _small_linear(
    x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool, fixed: bool
) -> Tensor:
    return run_linear(x, w, bias=bias, residual=residual, gated=gated, fixed=fixed)


@_small_linear.register_fake
def _(x, w, bias, residual, gated, fixed):
    return x.new_empty(x.shape[0], w.shape[0] // 2 if gated else w.shape[0])


@torch.library.custom_op("fnllm::norm_linear", mutates_args=())
def _norm_linear(
    x: Tensor, norm: Tensor, eps: float, w: Tensor, bias: Tensor | None, gated: bool, fixed: bool
) -> Tensor:
    return run_linear(x, w, bias=bias, norm=norm, eps=eps, gated=gated, fixed=fixed)


@_norm_linear.register_fake
def _(x, norm, eps, w, bias, gated, fixed):
    return x.new_empty(x.shape[0], w.shape[0] // 2 if gated else w.shape[0])


def small_linear(
    x: Float[Tensor, "T H"],
    w: Float[Tensor, "O H"],
    *,
    bias: Float[Tensor, " O"] | None = None,
    residual: Float[Tensor, "T Y"] | None = None,
    gated: bool = False,
    fixed: bool = False,
) -> Float[Tensor, "T Y"]:
    """x @ w.T (+ bias) (+ residual); with gated silu(gate) * up of w's two halves, Y = O / 2.

    fixed: w and bias are parameters, which no kernel of the step writes, so that they may be fetched before the kernel
    launched last has ended. Raises ValueError for operands that do not fit, TypeError for mixed dtypes.
    """
    return _small_linear(x, w, bias, residual, gated, fixed)


def norm_linear(
    x: Float[Tensor, "T H"],
    norm: Float[Tensor, " H"],
    eps: float,
    w: Float[Tensor, "O H"],
    *,
    bias: Float[Tensor, " O"] | None = None,
    gated: bool = False,
    fixed: bool = False,
) -> Float[Tensor, "T Y"]:
    """small_linear of RMSNorm(x); the norm is worked out by each program, so it costs no kernel of its own."""
    return _norm_linear(x, norm, eps, w, bias, gated, fixed)
