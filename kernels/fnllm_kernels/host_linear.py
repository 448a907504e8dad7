"""The product of a few rows with a weight on a CPU, by the fastest of torch's libraries.

Axes: T packed tokens, H hidden, O rows of the weight.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

_ROWS = 16  # of x; from some dozens on torch's own choice is as good
_TURNED_ROWS = (2, 4)  # rows of x with which it is the better matrix to read by columns


def host_linear(x: Float[Tensor, "*T H"], w: Float[Tensor, "O H"]) -> Float[Tensor, "*T O"]:
    """x @ w.T; for a few float32 rows, where no gradient is wanted, by another way than torch's own choice.

    On two cores with AVX2, weights of 576 columns: oneDNN takes 0.6 of the time for one row and 0.8 to 0.6 for 5 to 16;
    the turned product of MKL takes 0.4 for 2 and 0.5 for 4 (benchmarks/cpu.py has a step's).
    """
    # Asked first: looking at the number of rows while compiling would make a step for each answer.
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return F.linear(x, w)
    if not (x.dim() == 2 and 1 <= x.shape[0] <= _ROWS and x.dtype == w.dtype == torch.float32):
        return F.linear(x, w)
    if _TURNED_ROWS[0] <= x.shape[0] <= _TURNED_ROWS[1]:
        return torch.mm(w, x.t()).t().contiguous()
    if w.shape[0] > w.shape[1] and w.is_contiguous() and onednn_available():
        # What torch.compile makes of a linear map; F.linear itself asks oneDNN for narrower types only.
        return torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")
    return F.linear(x, w)


def onednn_available() -> bool:
    """Whether this build of torch has oneDNN and its linear map."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
