"""The sum of a tensor over GPUs that can write to each other's memory, in one kernel without a barrier.

Every rank writes its numbers into a box of every other rank and adds what comes into its own. A word on the way is 64
bits: 32 of the tensor and the count of the exchange, stored at once, so that a word with the right count is there whole
and nobody has to be asked (the "LL" protocol of NCCL). Boxes are used in turns of two: who sends for an exchange has
received everything of the one before, which its peers sent after they had read the one before that.

A program has its own part of each box and its own count, so exchanges of any sizes may follow each other. Sums are made
in rank order in float32, equal in all bits on all ranks.
"""

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from fnllm_kernels.decode_linear import dependent_launch
from fnllm_kernels.decode_tiles import triton

BLOCK = 512  # words of a program
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Mailbox(NamedTuple):
    """What one rank needs for its exchanges."""

    rank: int
    boxes: Int[Tensor, " ranks"]  # address of each rank's boxes, this rank's own among them
    counts: Int[Tensor, " programs"]  # exchanges that each program has made; zeros before the first
    own: Int[Tensor, " words"]  # this rank's boxes, kept as long as the others may write to them

    @property
    def largest(self) -> int:
        """The most bytes of one exchange."""
        return self.counts.shape[0] * BLOCK * 4


def box_words(nbytes: int, ranks: int) -> int:
    """How many 64-bit words the boxes of one rank take for exchanges of up to `nbytes`; zeros before the first."""
    return 2 * ranks * programs(nbytes) * BLOCK


def programs(nbytes: int) -> int:
    """The programs of an exchange."""
    return -(-nbytes // (4 * BLOCK))


if triton is not None:
    import triton.language as tl

    @triton.jit
    def _numbers(word, DTYPE: tl.constexpr):
        """The float32 numbers of 32-bit words: one of a float32, two of a shorter dtype (else the first twice)."""
        if DTYPE == tl.float32:
            low = word.to(tl.float32, bitcast=True)
            high = low
        else:
            low = (word & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
            high = (word >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        return low, high

    @triton.jit
    def _word(low, high, DTYPE: tl.constexpr):
        """The inverse of _numbers, rounded to nearest."""
        if DTYPE == tl.float32:
            word = low.to(tl.int32, bitcast=True)
        else:
            first = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
            word = first | (high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)
        return word

    @triton.jit(do_not_specialize=["words"])
    def push_sum_kernel(
        x_ptr, y_ptr, boxes_ptr, counts_ptr, words, capacity,
        RANKS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, DTYPE: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        """y = the sum of the ranks' x, `words` 32-bit words; a box holds `capacity` words of each rank."""
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()  # the next kernel may fetch its weights while words are on the way
        program = tl.program_id(0)
        at = program * SIZE + tl.arange(0, SIZE)
        inside = at < words
        if PDL:
            tl.extra.cuda.gdc_wait()
        count = tl.load(counts_ptr + program) + 1
        x = tl.load(x_ptr + at, mask=inside, other=0)
        sent = (count.to(tl.int64) << 32) | (x.to(tl.int64) & 0xFFFFFFFF)
        turn = (count & 1) * RANKS
        for step in tl.static_range(1, RANKS):
            theirs = tl.load(boxes_ptr + (RANK + step) % RANKS).to(tl.pointer_type(tl.int64))
            theirs = tl.multiple_of(theirs, 16)
            tl.store(theirs + (turn + RANK) * capacity + at, sent, mask=inside)
        mine = tl.multiple_of(tl.load(boxes_ptr + RANK).to(tl.pointer_type(tl.int64)), 16)
        low = tl.zeros((SIZE,), tl.float32)
        high = tl.zeros((SIZE,), tl.float32)
        for rank in tl.static_range(RANKS):
            if rank == RANK:
                came = sent
            else:
                box = mine + (turn + rank) * capacity + at
                came = tl.load(box, mask=inside, other=sent, volatile=True)
                while tl.max(((came >> 32).to(tl.int32) != count).to(tl.int32), 0) > 0:
                    came = tl.load(box, mask=inside, other=sent, volatile=True)
            first, second = _numbers(came.to(tl.int32), DTYPE)
            low += first
            high += second
        tl.store(y_ptr + at, _word(low, high, DTYPE), mask=inside)
        tl.store(counts_ptr + program, count)


def takes(x: Tensor, largest: int) -> bool:
    """Whether the kernel can sum `x`: whole 32-bit words of a float dtype, and not too many."""
    nbytes = x.numel() * x.element_size()
    return x.dtype in DTYPES and 0 < nbytes <= largest and nbytes % 4 == 0


def push_sum(x: Tensor, mailbox: Mailbox) -> Tensor:
    """The sum of `x` over the mailbox's ranks, each of which must call this with the same shape and dtype.

    Moves the mailbox on. Raises ValueError for a tensor that it cannot take.
    """
    if not takes(x, mailbox.largest):
        raise ValueError(
            f"push_sum: x is {tuple(x.shape)} {x.dtype}; it must be of {', '.join(map(str, DTYPES))}, a multiple of 4 "
            f"bytes and at most {mailbox.largest} bytes"
        )
    words = x.contiguous().view(-1).view(torch.int32)
    y, pdl = torch.empty_like(words), dependent_launch(x.device)
    push_sum_kernel[(programs(4 * words.shape[0]),)](
        words, y, mailbox.boxes, mailbox.counts, words.shape[0], mailbox.counts.shape[0] * BLOCK,
        RANKS=mailbox.boxes.shape[0], RANK=mailbox.rank, SIZE=BLOCK,
        DTYPE={torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[x.dtype],
        PDL=pdl, num_warps=4, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return y.view(x.dtype).view(x.shape)
