"""Reading the block table inside the attention kernels. Needs triton."""

import triton
import triton.language as tl


@triton.jit
def pages(table, start, end, S: tl.constexpr, BLOCK_N: tl.constexpr):
    """Block numbers of the keys start..start + BLOCK_N - 1: one scalar where such a tile lies in one block of S keys.

    Keys from `end` on read no table entry; their block number is 0.
    """
    if S % BLOCK_N == 0:
        blocks = tl.load(table + start // S, mask=start < end, other=0)
    else:
        key = start + tl.arange(0, BLOCK_N)
        blocks = tl.load(table + key // S, mask=key < end, other=0)
    return blocks
