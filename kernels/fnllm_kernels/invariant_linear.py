"""A linear map whose rows do not depend on how many rows there are: fixed tiles and a fixed order of summation.

Axes: T packed tokens, I input width, O output width. A row's result is a function of that row and the weight alone: the
number of its neighbours chooses neither the tile shape that decides the order of sums over I, nor the cuts of I.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear, pad

from fnllm_kernels.dependent_launch import launch_options

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_ROWS = 16  # rows of a tile on the CPU; one call of the BLAS library per tile
_ALIGN = 16  # the BLAS library sums a row that starts off this grid in another order, so widths are padded to it


def invariant_linear(x: Float[Tensor, "T I"], weight: Float[Tensor, "O I"]) -> Float[Tensor, "T O"]:
    """x @ weight.T, summed in float32 (float64 for float64) in an order that depends on the weight's shape alone.

    Raises ValueError if the widths or dtypes differ.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ValueError(
            f"invariant_linear: x is {tuple(x.shape)} {x.dtype}, weight {tuple(weight.shape)} {weight.dtype}; "
            "they must be [T, I] and [O, I] of one dtype"
        )
    return _invariant_linear_op(x, weight)


def invariant_linear_reference(x: Float[Tensor, "T I"], weight: Float[Tensor, "O I"]) -> Float[Tensor, "T O"]:
    """Plain torch of `invariant_linear`: the product of one tile of rows at a time, the last one padded."""
    tokens, width = x.shape
    padding = (0, -width % _ALIGN)
    weight = pad(weight, padding) if padding[1] else weight.contiguous()
    x = pad(x, (*padding, 0, -tokens % _ROWS))
    if not tokens:
        return x.new_zeros(0, weight.shape[0])
    return torch.cat([linear(rows, weight) for rows in x.split(_ROWS)])[:tokens]


class LinearTiling(NamedTuple):
    """How a program works: rows, outputs and inputs per tile, warps, tiles in flight."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


_FEW = 64  # rows of a narrow tile
_NARROW = LinearTiling(64, 64, 64, 4, 4)
_WIDE = LinearTiling(128, 128, 64, 8, 3)
_PROGRAMS = 264  # about two per multiprocessor of a large GPU
_STEP = 128  # inputs of which a cut has whole multiples, so that tiles may be as long


def cuts(outputs: int, inputs: int) -> tuple[int, int]:
    """(number of cuts of the input axis, inputs per cut): a function of the weight's shape alone.

    >>> cuts(1024, 4096), cuts(32768, 1024)
    ((16, 256), (1, 1024))
    """
    steps = -(-inputs // _STEP)
    wanted = max(1, _PROGRAMS // -(-outputs // _NARROW.outputs))
    per_cut = max(2, -(-steps // wanted))
    return -(-steps // per_cut), per_cut * _STEP


def _linear_triton(x: Tensor, weight: Tensor, pdl: bool | None = None) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    (tokens, inputs), outputs = x.shape, weight.shape[0]
    out = x.new_empty(tokens, outputs)
    if not tokens:
        return out
    count, length = cuts(outputs, inputs)
    tile = _NARROW if tokens <= _FEW else _WIDE
    if x.dtype == torch.float32:  # twice the bytes per element in shared memory
        tile = tile._replace(inputs=32, stages=2)
    grid = triton.cdiv(tokens, tile.rows), triton.cdiv(outputs, tile.outputs)
    # Side by side where the tiles alone would leave the machine idle; the sums are the same.
    apart = count > 1 and grid[0] * grid[1] < _PROGRAMS
    target = torch.empty(count, tokens, outputs, dtype=torch.float32, device=x.device) if apart else out
    options = launch_options(x.device, pdl)
    _linear_kernel[(*grid, count if apart else 1)](
        x, weight, target, tokens, outputs, inputs, x.stride(0), weight.stride(0),
        COUNT=count, LENGTH=length, APART=apart, BLOCK_T=tile.rows, BLOCK_O=tile.outputs, BLOCK_I=tile.inputs,
        num_warps=tile.warps, num_stages=tile.stages, **options,
    )  # fmt: skip
    if apart:
        _add_cuts_kernel[(triton.cdiv(tokens * outputs, 1024),)](
            target, out, tokens * outputs, COUNT=count, BLOCK=1024, **options
        )
    return out


if triton is not None:

    @triton.jit(do_not_specialize=["tokens"])
    def _linear_kernel(
        x, weight, out, tokens, outputs, inputs, x_row, weight_row,
        COUNT: tl.constexpr, LENGTH: tl.constexpr, APART: tl.constexpr,
        BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
        o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
        rows = x + t.to(tl.int64)[:, None] * x_row
        columns = weight + o.to(tl.int64)[:, None] * weight_row
        here = t[:, None] < tokens
        there = o[:, None] < outputs
        # Each cut is summed from zero and the sums are added in their order, here or in _add_cuts_kernel.
        cut = tl.program_id(2)
        total = _sum_cut(
            rows, columns, here, there, cut * LENGTH, inputs, LENGTH, BLOCK_T, BLOCK_O, BLOCK_I
        )  # fmt: skip
        if not APART:
            for later in range(1, COUNT):
                total += _sum_cut(
                    rows, columns, here, there, later * LENGTH, inputs, LENGTH, BLOCK_T, BLOCK_O, BLOCK_I
                )  # fmt: skip
        where = t.to(tl.int64)[:, None] * outputs + o[None, :]
        mask = here & (o[None, :] < outputs)
        if APART:
            out += cut.to(tl.int64) * tokens * outputs
        tl.store(out + where, total.to(out.dtype.element_ty), mask=mask)

    @triton.jit
    def _sum_cut(
        rows, columns, here, there, begin, inputs,
        LENGTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
    ):  # fmt: skip
        """The products of a tile of rows and outputs over the inputs begin..begin+LENGTH-1."""
        i = begin + tl.arange(0, BLOCK_I)
        acc = tl.zeros((BLOCK_T, BLOCK_O), tl.float32)
        for start in range(0, LENGTH, BLOCK_I):
            inside = (start + i)[None, :] < inputs
            a = tl.load(rows + (start + i)[None, :], mask=here & inside, other=0.0)
            b = tl.load(columns + (start + i)[None, :], mask=there & inside, other=0.0)
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
        return acc

    @triton.jit(do_not_specialize=["count"])
    def _add_cuts_kernel(parts, out, count, COUNT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        total = tl.load(parts + at, mask=at < count, other=0.0)
        for cut in range(1, COUNT):
            total += tl.load(parts + cut * count.to(tl.int64) + at, mask=at < count, other=0.0)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=at < count)


@torch.library.custom_op("fnllm::invariant_linear", mutates_args=(), schema="(Tensor x, Tensor weight) -> Tensor")
def _invariant_linear_op(x, weight):
    if x.is_cuda and x.dtype != torch.float64:
        return _linear_triton(x, weight)
    return invariant_linear_reference(x, weight)


@_invariant_linear_op.register_fake
def _invariant_linear_fake(x, weight):
    return x.new_empty(x.shape[0], weight.shape[0])
