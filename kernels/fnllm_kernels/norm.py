"""RMS norm, alone and fused with the residual addition before it.

Axes: T packed tokens, H hidden, P parts of a sum.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from .dependent_launch import launch_options

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


def rms_norm(x: Float[Tensor, "T H"], weight: Float[Tensor, " H"], eps: float) -> Float[Tensor, "T H"]:
    """weight * (x / rms(x)), the quotient computed in float32 and cast to x's dtype before the product.

    That order of casts is transformers' (`Qwen3RMSNorm`). Raises ValueError if weight's width is not x's.
    """
    if x.is_cuda:
        return _rms_norm_op(x, weight, eps)
    _check(x, weight)
    return rms_norm_reference(x, weight, eps)


def rms_norm_reference(
    x: Float[Tensor, "*rows H"], weight: Float[Tensor, " H"], eps: float
) -> Float[Tensor, "*rows H"]:
    """Plain torch of `rms_norm`, for rows of any arrangement."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def add_rms_norm(
    x: Float[Tensor, "T H"], residual: Float[Tensor, "T H"], weight: Float[Tensor, " H"], eps: float
) -> tuple[Float[Tensor, "T H"], Float[Tensor, "T H"]]:
    """Return (rms_norm of the sum, the sum); the sum x + residual is rounded to x's dtype before it is normed.

    Raises ValueError if the shapes do not belong together.
    """
    if x.is_cuda:
        return _add_rms_norm_op(x, residual, weight, eps)
    _check(x, weight, residual)
    return add_rms_norm_reference(x, residual, weight, eps)


def add_rms_norm_reference(
    x: Float[Tensor, "T H"] | Float[Tensor, "P T H"],
    residual: Float[Tensor, "T H"],
    weight: Float[Tensor, " H"],
    eps: float,
) -> tuple[Float[Tensor, "T H"], Float[Tensor, "T H"]]:
    """Plain torch of `run_add_rms_norm`."""
    total = (x.sum(0).to(residual.dtype) if x.dim() == 3 else x) + residual
    return rms_norm_reference(total, weight, eps), total


def run_add_rms_norm(
    x: Float[Tensor, "T H"] | Float[Tensor, "P T H"],
    residual: Float[Tensor, "T H"],
    weight: Float[Tensor, " H"],
    eps: float,
) -> tuple[Float[Tensor, "T H"], Float[Tensor, "T H"]]:
    """`add_rms_norm` for other ops to call; x may be float32 parts, whose sum is rounded to residual's dtype first."""
    _check(x, weight, residual)
    run = _norm_triton if x.is_cuda and triton is not None else add_rms_norm_reference
    return run(x, residual, weight, eps)


def _check(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> None:
    """On a GPU called inside the ops, where it is not traced into a compiled step."""
    parts = residual is not None and x.dim() == 3 and x.dtype == torch.float32
    shape = x.shape[1:] if parts else x.shape
    if len(shape) != 2 or weight.dim() != 1 or weight.shape[0] != shape[1]:
        raise ValueError(f"rms_norm: x is {tuple(x.shape)}, weight {tuple(weight.shape)}; they must be [T, H] and [H]")
    if residual is not None and (shape != residual.shape or not (parts or x.dtype == residual.dtype)):
        raise ValueError(
            f"add_rms_norm: x is {tuple(x.shape)} {x.dtype}, residual {tuple(residual.shape)} {residual.dtype}; "
            "both must have one shape and dtype"
        )


@torch.library.custom_op("fnllm::rms_norm", mutates_args=(), schema="(Tensor x, Tensor weight, float eps) -> Tensor")
def _rms_norm_op(x, weight, eps):
    _check(x, weight)
    if x.is_cuda and triton is not None:
        return _norm_triton(x, None, weight, eps)[0]
    return rms_norm_reference(x, weight, eps)


@_rms_norm_op.register_fake
def _rms_norm_fake(x, weight, eps):
    return x.new_empty(x.shape)


@torch.library.custom_op(
    "fnllm::add_rms_norm",
    mutates_args=(),
    schema="(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
)
def _add_rms_norm_op(x, residual, weight, eps):
    return run_add_rms_norm(x, residual, weight, eps)


@_add_rms_norm_op.register_fake
def _add_rms_norm_fake(x, residual, weight, eps):
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _norm_triton(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, pdl: bool | None = None
) -> tuple[Tensor, Tensor]:
    """(normed, sum); x is [T, H] or, with a residual, parts [P, T, H]. pdl: launch dependently (None: if it can)."""
    (tokens, width), parts = x.shape[-2:], x.shape[0] if x.dim() == 3 else 1
    x, weight = x if x.stride(-1) == 1 and x.dim() == 2 else x.contiguous(), weight.contiguous()
    y = (x if residual is None else residual).new_empty(tokens, width)
    total = y if residual is None else torch.empty_like(y)
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    x_row = x.stride(0) if x.dim() == 2 else width  # a single row of parts may call itself contiguous with any stride
    block = triton.next_power_of_2(width)
    if block > 65536:
        raise ValueError(f"rms_norm: width {width}; the kernel holds a row at once and takes at most 65536")
    if tokens:
        _norm_kernel[(tokens,)](
            x, residual, weight, y, total, width, x_row, 0 if residual is None else residual.stride(0), eps,
            PARTS=parts, ADD=residual is not None, BLOCK=block, num_warps=max(1, min(16, block // 256)),
            **launch_options(x.device, pdl),
        )  # fmt: skip
    return y, total


if triton is not None:

    @triton.jit
    def _norm_kernel(
        x, residual, weight, y, total, width, x_row, residual_row, eps,
        PARTS: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        """A program has a row; x's parts follow each other, each as many rows as there are programs."""
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        token = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK)
        inside = column < width
        start = x + token * x_row
        row = tl.load(start + column, mask=inside, other=0.0, cache_modifier=".cg")
        for _ in tl.static_range(1, PARTS):
            start += tl.num_programs(0).to(tl.int64) * x_row
            row += tl.load(start + column, mask=inside, other=0.0, cache_modifier=".cg")
        row = row.to(y.dtype.element_ty)
        scale = tl.load(weight + column, mask=inside, other=0.0)
        if ADD:
            other = tl.load(residual + token * residual_row + column, mask=inside, other=0.0, cache_modifier=".cg")
            row = (row.to(tl.float32) + other.to(tl.float32)).to(y.dtype.element_ty)
            tl.store(total + token * width + column, row, mask=inside)
        wide = row.to(tl.float32)
        rms = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
        normed = (wide * rms).to(y.dtype.element_ty).to(tl.float32) * scale.to(tl.float32)
        tl.store(y + token * width + column, normed.to(y.dtype.element_ty), mask=inside)
