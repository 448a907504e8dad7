"""Grouped matrix product, each row times the matrix of its group: a mixture of experts once its rows are sorted.

Axes: R rows, sorted by group; E groups; H their width, O that of the results. `ends` [E] says where each group ends; a
group may be empty. Every row is multiplied with one matrix, and its result depends on no other row's values.

`fnllm::grouped_linear` and `fnllm::grouped_outer` are each other's derivatives, so both differentiate any number of
times. Shapes are static, so that a step with them compiles and is captured.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, library

from fnllm_kernels.layouts import vectors

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


def grouped_linear_reference(x: Float[Tensor, "R H"], w: Float[Tensor, "E O H"], ends: Int[Tensor, " E"]) -> Tensor:
    """y[r] = w[group of r] @ x[r], a library product for each group that has rows."""
    y, start = x.new_empty(x.shape[0], w.shape[1]), 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(x[start:end], w[group].t(), out=y[start:end])
        start = end
    return y


def grouped_outer_reference(a: Float[Tensor, "R O"], b: Float[Tensor, "R H"], ends: Int[Tensor, " E"]) -> Tensor:
    """m[e] = the sum of a[r] b[r]^T over the rows of group e, [E, O, H]."""
    m, start = a.new_zeros(ends.shape[0], a.shape[1], b.shape[1]), 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(a[start:end].t(), b[start:end], out=m[group])
        start = end
    return m


@library.custom_op("fnllm::grouped_linear", mutates_args=())
def linear_op(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """`grouped_linear_reference`: on a CPU in plain torch, on a GPU in Triton."""
    if x.is_cuda and x.dtype != torch.float64:
        return launch_grouped_linear(x, w, ends)
    return grouped_linear_reference(x, w, ends)


@linear_op.register_fake
def _(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1])


@library.custom_op("fnllm::grouped_outer", mutates_args=())
def outer_op(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """`grouped_outer_reference`, on any device; only gradients need it."""
    return grouped_outer_reference(a, b, ends)


@outer_op.register_fake
def _(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return a.new_empty(ends.shape[0], a.shape[1], b.shape[1])


def one_by_one(op: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, int]]:
    """The rule of torch.func.vmap: each example alone."""

    def rule(info: Any, dims: tuple[int | None, ...], *args: Tensor) -> tuple[Tensor, int]:
        each = [
            [x if dim is None else x.select(dim, i) for x, dim in zip(args, dims, strict=True)]
            for i in range(info.batch_size)
        ]
        return torch.stack([op(*one) for one in each]), 0

    return rule


linear_op.register_vmap(one_by_one(linear_op))
outer_op.register_vmap(one_by_one(outer_op))


class Grouped(torch.autograd.Function):
    """What both have in common. Not `register_autograd`, which torch.func does not see through.

    A base class, and not a function that makes both: torch.compile traces no op that a forward finds in a closure.
    """

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)


class Linear(Grouped):
    @staticmethod
    def forward(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        return linear_op(x, w, ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x, w, ends), (for_x, for_w, _) = ctx.saved_tensors, ctx.needs_input_grad
        grad_x = grouped_linear(grad, w.transpose(1, 2), ends) if for_x else None
        return grad_x, grouped_outer(grad, x, ends) if for_w else None, None


class Outer(Grouped):
    @staticmethod
    def forward(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
        return outer_op(a, b, ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (a, b, ends), (for_a, for_b, _) = ctx.saved_tensors, ctx.needs_input_grad
        grad_a = grouped_linear(b, grad, ends) if for_a else None
        return grad_a, grouped_linear(a, grad.transpose(1, 2), ends) if for_b else None, None


def grouped_linear(x: Float[Tensor, "R H"], w: Float[Tensor, "E O H"], ends: Int[Tensor, " E"]) -> Float[Tensor, "R O"]:
    """y[r] = w[group of r] @ x[r], differentiable in x and w."""
    return Linear.apply(x, w, ends)


def grouped_outer(a: Float[Tensor, "R O"], b: Float[Tensor, "R H"], ends: Int[Tensor, " E"]) -> Float[Tensor, "E O H"]:
    """m[e] = the sum of a[r] b[r]^T over the rows of group e, differentiable in a and b."""
    return Outer.apply(a, b, ends)


def launch_grouped_linear(
    x: Float[Tensor, "R H"],
    w: Float[Tensor, "E O H"],
    ends: Int[Tensor, " E"],
    config: dict[str, int] | None = None,
) -> Float[Tensor, "R O"]:
    """The Triton form of `grouped_linear_reference`; `config` replaces `tiles_for`."""
    (rows, width), (groups, outputs, _), (ends,) = x.shape, w.shape, vectors(ends)
    y = x.new_empty(rows, outputs)
    config = tiles_for(rows, groups, x.dtype) if config is None else config
    # Each group fills whole tiles but for its last one.
    grid = (rows // config["BLOCK_R"] + min(groups, rows), triton.cdiv(outputs, config["BLOCK_O"]))
    _grouped_linear_kernel[grid](
        x, w, ends, y, rows, groups, outputs, x.stride(0), x.stride(1), *w.stride(), y.stride(0),
        WIDTH=width, GROUPS=triton.next_power_of_2(groups), **config,
    )  # fmt: skip
    return y


def tiles_for(rows: int, groups: int, dtype: torch.dtype) -> dict[str, int]:
    """Tile sizes: low ones that stream the weights for few rows a group, square ones for many."""
    if dtype == torch.float32:
        return {"BLOCK_R": 16, "BLOCK_O": 64, "BLOCK_H": 32, "num_warps": 4, "num_stages": 3}
    if rows <= 16 * groups:
        return {"BLOCK_R": 16, "BLOCK_O": 64, "BLOCK_H": 128, "num_warps": 4, "num_stages": 4}
    if rows <= 64 * groups:
        return {"BLOCK_R": 64, "BLOCK_O": 128, "BLOCK_H": 64, "num_warps": 4, "num_stages": 4}
    return {"BLOCK_R": 128, "BLOCK_O": 128, "BLOCK_H": 64, "num_warps": 8, "num_stages": 4}


if triton is not None:

    @triton.jit
    def _grouped_linear_kernel(
        x, w, ends, y, rows, groups, outputs, x_row, x_column, w_group, w_row, w_column, y_row,
        WIDTH: tl.constexpr, GROUPS: tl.constexpr,
        BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_H: tl.constexpr,
    ):  # fmt: skip
        # Tiles vary fastest, so that those of one group run together and find its weights in the L2 cache.
        tile = tl.program_id(0)
        group = tl.arange(0, GROUPS)
        end = tl.load(ends + group, mask=group < groups, other=0).to(tl.int32)
        start = tl.load(ends + group - 1, mask=(group > 0) & (group < groups), other=0).to(tl.int32)
        tiles = tl.where(group < groups, (end - start + BLOCK_R - 1) // BLOCK_R, 0)
        after = tl.cumsum(tiles, 0)
        mine = (after - tiles <= tile) & (tile < after)
        if tl.sum(mine.to(tl.int32), 0) > 0:
            number = tl.sum(tl.where(mine, group, 0), 0)
            first = tl.sum(tl.where(mine, start + (tile - after + tiles) * BLOCK_R, 0), 0)
            stop = tl.sum(tl.where(mine, end, 0), 0)
            row = first + tl.arange(0, BLOCK_R)
            column = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
            h = tl.arange(0, BLOCK_H)
            # Rows and columns past the end read the last one, so that the loop needs no mask of theirs.
            x_place = x + tl.minimum(row, stop - 1).to(tl.int64)[None, :] * x_row + h[:, None] * x_column
            w_place = w + number.to(tl.int64) * w_group + h[None, :] * w_column
            w_place += tl.minimum(column, outputs - 1).to(tl.int64)[:, None] * w_row
            # Weights first: the tensor cores' long side is for them, whatever the number of rows.
            total = tl.zeros((BLOCK_O, BLOCK_R), tl.float32)
            for begin in range(0, WIDTH, BLOCK_H):
                if WIDTH % BLOCK_H == 0:
                    a = tl.load(w_place + begin * w_column)
                    b = tl.load(x_place + begin * x_column)
                else:
                    a = tl.load(w_place + begin * w_column, mask=(begin + h)[None, :] < WIDTH, other=0.0)
                    b = tl.load(x_place + begin * x_column, mask=(begin + h)[:, None] < WIDTH, other=0.0)
                total = tl.dot(a, b, total, input_precision="ieee")
            place = y + row.to(tl.int64)[None, :] * y_row + column[:, None]
            tl.store(place, total.to(y.dtype.element_ty), mask=(row < stop)[None, :] & (column < outputs)[:, None])
