"""A linear map whose rows do not depend on how many rows there are.

Axes: T packed tokens, I input width, O output width. A row's result is a function of that row and the weight alone: on
a GPU each sum is one chain along the inputs, whatever the tile (`tiled_linear.py`); on a CPU all tiles are alike.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear, pad

from fnllm_kernels.tiled_linear import launch_tiled

_ROWS = 16  # rows of a tile on the CPU; one call of the BLAS library per tile
_ALIGN = 16  # the BLAS library sums a row that starts off this grid in another order, so widths are padded to it


def invariant_linear(x: Float[Tensor, "T I"], weight: Float[Tensor, "O I"]) -> Float[Tensor, "T O"]:
    """x @ weight.T, summed in float32 (float64 for float64) in an order that the number of rows does not change.

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


@torch.library.custom_op("fnllm::invariant_linear", mutates_args=(), schema="(Tensor x, Tensor weight) -> Tensor")
def _invariant_linear_op(x, weight):
    if x.is_cuda and x.dtype != torch.float64:
        return launch_tiled(x, weight)
    return invariant_linear_reference(x, weight)


@_invariant_linear_op.register_fake
def _invariant_linear_fake(x, weight):
    return x.new_empty(x.shape[0], weight.shape[0])
