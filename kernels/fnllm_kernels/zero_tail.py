"""Zeroing the padding rows of a packed tensor, whose number is known only on the device.

Axes: T packed tokens, B sequences.
"""

from jaxtyping import Float, Int
from torch import Tensor

from .layouts import vectors

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_PROGRAMS = 128


def zero_tail(out: Float[Tensor, "T ..."], cu_seqlens_q: Int[Tensor, " B_plus_1"]) -> None:
    """Write zeros into the rows of `out` (contiguous) from cu_seqlens_q[-1] on, without reading it on the host."""
    if not out.numel():
        return
    if triton is None:
        out[int(cu_seqlens_q[-1]) :] = 0
        return
    width, (cu_seqlens_q,) = out[0].numel(), vectors(cu_seqlens_q)
    _zero_tail_kernel[(_PROGRAMS,)](
        out, cu_seqlens_q, cu_seqlens_q.shape[0] - 1, out.shape[0], width, PROGRAMS=_PROGRAMS, BLOCK=1024
    )


if triton is not None:

    @triton.jit(do_not_specialize=["rows", "width"])  # a size of one would come as a Python int
    def _zero_tail_kernel(out, cu_seqlens_q, last, rows, width, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
        end = rows.to(tl.int64) * width
        at = tl.load(cu_seqlens_q + last).to(tl.int64) * width + tl.program_id(0) * BLOCK
        zeros = tl.zeros((BLOCK,), out.dtype.element_ty)
        while at < end:
            column = at + tl.arange(0, BLOCK)
            tl.store(out + column, zeros, mask=column < end)
            at += PROGRAMS * BLOCK
