"""Strides: those that ops declare to torch.compile, and those that kernels read by."""

from typing import Any

import torch
from torch import Tensor

# Inductor gives an op's arguments the very strides that they have in eager mode, unless the op is tagged otherwise, and
# for that it writes what it has not written yet, such as angles, slots and tables that all layers share, anew for each
# op that reads it. These ops take any strides, so a step's shared arguments are written once.
ANY_STRIDES = (torch.Tag.flexible_layout,)


def in_order(x: Tensor) -> Tensor:
    """x, contiguous, with the strides of its shape; a copy only where it was not contiguous.

    Where a size is one, a tensor is contiguous with any stride along it, and Inductor makes such; FlashAttention, TMA
    and views as numbers of another size want strides in order all the same.
    """
    return x.contiguous().view(-1).view(x.shape)


def in_pairs(x: Tensor) -> Tensor:
    """`in_order`, to be read as numbers of twice the size: a copy, too, where it begins between two of those."""
    x = in_order(x)
    return x.clone() if x.storage_offset() % 2 else x


def vectors(*given: Tensor | None) -> list[Any]:
    """Vectors whose numbers lie side by side, as kernels read norms, biases, slots and lengths; None stays None."""
    return [None if x is None else x.contiguous() for x in given]
