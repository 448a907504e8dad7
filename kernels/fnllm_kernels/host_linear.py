"""The product of a few rows with a tall weight on a CPU: the head's.

Axes: T packed tokens, H hidden, O rows of the weight.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

_ROWS = (2, 16)  # of x; one row is bound by reading the weight, from some dozens on the library's way is as good
_TALL = 8192  # rows of a weight
_BLOCK = 192  # rows of the weight that are multiplied at a time: with x they stay in a core's second-level cache


def host_linear(x: Float[Tensor, "*T H"], w: Float[Tensor, "O H"]) -> Float[Tensor, "*T O"]:
    """x @ w.T; for few float32 rows and a tall weight as a batch of small products, where no gradient is wanted.

    The library's own product of 8 rows with 49152 takes half as long again (benchmarks/cpu.py has a step's).
    """
    tall = w.shape[0] >= _TALL and x.dim() == 2 and _ROWS[0] <= x.shape[0] <= _ROWS[1] and w.is_contiguous()
    if not tall or x.dtype != torch.float32 or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return F.linear(x, w)
    blocks = w.shape[0] // _BLOCK
    even = blocks * _BLOCK
    out = x.new_empty(x.shape[0], w.shape[0])
    torch.bmm(
        x.expand(blocks, -1, -1),
        w[:even].view(blocks, _BLOCK, -1).transpose(1, 2),
        out=out[:, :even].unflatten(1, (blocks, _BLOCK)).transpose(0, 1),
    )
    if even < w.shape[0]:
        torch.mm(x, w[even:].t(), out=out[:, even:])
    return out
