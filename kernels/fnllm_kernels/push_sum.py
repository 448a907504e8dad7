"""The sum of a tensor over GPUs that can write to each other's memory, in one kernel without a barrier.

Every rank writes its numbers into a box of every other rank and adds what comes into its own, in rank order and in
float32: all ranks get equal bits. How a rank knows that numbers have come:
- few bytes go as words of 64 bits, 32 of the tensor and the count of the exchange, stored at once: one with the right
  count is there whole (the "LL" protocol of NCCL). Twice the bytes, but nothing to wait for between data and sign.
- many bytes go as they are, and a program raises one flag to the count when its part has arrived.

Boxes are used in turns of two: who sends for an exchange has received all of the one before, which its peers sent after
they had read the one before that. A program has its own part of each box and its own count, so exchanges of any sizes
may follow each other.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from fnllm_kernels.decode_tiles import triton
from fnllm_kernels.dependent_launch import dependent_launch
from fnllm_kernels.layouts import in_pairs

FEW = 512 * 1024  # bytes up to which words with a count are the faster
WORDS, WARPS = 256, 4  # of a program for few bytes: a thread stores two words, 16 bytes, at a time
BLOCK, BLOCK_WARPS = 2048, 8  # 32-bit words of a program for many bytes
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Boxes(NamedTuple):
    """The boxes of all ranks for one of the two ways."""

    addresses: Int[Tensor, " ranks"]
    counts: Int[Tensor, " programs"]  # exchanges that each program has made


class Mailbox(NamedTuple):
    """What one rank needs for its exchanges."""

    rank: int
    ranks: int
    few: Boxes
    many: Boxes
    memory: Int[Tensor, " words"]  # this rank's boxes, which must live as long as the others write to them

    @property
    def largest(self) -> int:
        """The most bytes of one exchange."""
        return self.many.counts.shape[0] * BLOCK * 4


def few_words(ranks: int) -> int:
    """64-bit words of a rank's boxes for few bytes: two turns, a part for each rank."""
    return 2 * ranks * -(-FEW // (4 * WORDS)) * WORDS


def mailbox_words(ranks: int, largest: int) -> int:
    """64-bit words of memory of each rank, zeros before the first exchange, for sums of up to `largest` bytes.

    An even number, so that the ranks' boxes may lie behind each other: each must start at a multiple of 16 bytes.
    """
    programs = -(-largest // (4 * BLOCK))
    words = few_words(ranks) + ranks * programs * BLOCK + ranks * programs  # data and flags of 32 bits, two turns
    return words + words % 2


def make_mailbox(rank: int, addresses: Sequence[int], memory: Tensor, largest: int) -> Mailbox:
    """The mailbox of a rank whose memory is `memory` and that reaches all ranks' memory at `addresses`.

    Raises ValueError for an address that is no multiple of 16.
    """
    odd = [address for address in addresses if address % 16]
    if odd:
        raise ValueError(f"addresses must be multiples of 16 bytes, which the kernels store at once; found {odd}")

    def boxes(offset: int, programs: int) -> Boxes:
        starts = torch.tensor([address + offset for address in addresses], device=memory.device)
        return Boxes(starts, torch.zeros(programs, dtype=torch.int32, device=memory.device))

    few = boxes(0, -(-FEW // (4 * WORDS)))
    many = boxes(8 * few_words(len(addresses)), -(-largest // (4 * BLOCK)))
    return Mailbox(rank, len(addresses), few, many, memory)


if triton is not None:
    import triton.language as tl

    @triton.jit
    def add_words(low, high, word, DTYPE: tl.constexpr):
        """Running float32 sums plus the numbers of 32-bit words: one of a float32, two of a shorter dtype."""
        if DTYPE == tl.float32:
            low += word.to(tl.float32, bitcast=True)
        else:
            low += (word & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
            high += (word >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        return low, high

    @triton.jit
    def word_of(low, high, DTYPE: tl.constexpr):
        """32-bit words of numbers, rounded to nearest."""
        if DTYPE == tl.float32:
            word = low.to(tl.int32, bitcast=True)
        else:
            first = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
            word = first | (high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)
        return word

    @triton.jit
    def box_at(addresses, rank: tl.constexpr, KIND: tl.constexpr):
        """The start of a rank's boxes as a pointer."""
        return tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(KIND)), 16)

    @triton.jit
    def push_words_kernel(
        x_ptr, y_ptr, addresses, counts, words, capacity,
        RANKS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, DTYPE: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        """y = the sum of the ranks' x, `words` 32-bit words, sent with the count; a part holds `capacity` words."""
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()  # the next kernel may fetch its weights while words are on the way
        program = tl.program_id(0)
        at = program * SIZE + tl.arange(0, SIZE)
        inside = at < words
        if PDL:
            tl.extra.cuda.gdc_wait()
        count = tl.load(counts + program) + 1
        x = tl.load(x_ptr + at, mask=inside, other=0)
        sent = (count.to(tl.int64) << 32) | (x.to(tl.int64) & 0xFFFFFFFF)
        turn = (count & 1) * RANKS
        for step in tl.static_range(1, RANKS):
            theirs = box_at(addresses, (RANK + step) % RANKS, tl.int64)
            tl.store(theirs + (turn + RANK) * capacity + at, sent, mask=inside)
        mine = box_at(addresses, RANK, tl.int64)
        low = tl.zeros((SIZE,), tl.float32)
        high = tl.zeros((SIZE,), tl.float32)
        for rank in tl.static_range(RANKS):
            if rank == RANK:
                came = sent
            else:
                part = mine + (turn + rank) * capacity + at
                came = tl.load(part, mask=inside, other=sent, volatile=True)
                while tl.max(((came >> 32).to(tl.int32) != count).to(tl.int32), 0) > 0:
                    came = tl.load(part, mask=inside, other=sent, volatile=True)
            low, high = add_words(low, high, came.to(tl.int32), DTYPE)
        tl.store(y_ptr + at, word_of(low, high, DTYPE), mask=inside)
        tl.store(counts + program, count)

    @triton.jit
    def push_blocks_kernel(
        x_ptr, y_ptr, addresses, counts, words, capacity, programs,
        RANKS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, DTYPE: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        """The same with one flag a program, rank and turn behind the data; a part holds `capacity` 32-bit words."""
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
        program = tl.program_id(0)
        at = program * SIZE + tl.arange(0, SIZE)
        inside = at < words
        if PDL:
            tl.extra.cuda.gdc_wait()
        count = tl.load(counts + program) + 1
        x = tl.load(x_ptr + at, mask=inside, other=0)
        turn = (count & 1) * RANKS
        flags = 2 * RANKS * capacity + program
        for step in tl.static_range(1, RANKS):
            theirs = box_at(addresses, (RANK + step) % RANKS, tl.int32)
            tl.store(theirs + (turn + RANK) * capacity + at, x, mask=inside)
        tl.debug_barrier()  # every thread's part is sent before a flag is raised
        for step in tl.static_range(1, RANKS):
            theirs = box_at(addresses, (RANK + step) % RANKS, tl.int32)
            tl.atomic_xchg(theirs + flags + (turn + RANK) * programs, count, sem="release", scope="sys")
        mine = box_at(addresses, RANK, tl.int32)
        low = tl.zeros((SIZE,), tl.float32)
        high = tl.zeros((SIZE,), tl.float32)
        for rank in tl.static_range(RANKS):
            came = x
            if rank != RANK:
                flag = mine + flags + (turn + rank) * programs
                while tl.atomic_add(flag, 0, sem="acquire", scope="sys") != count:
                    pass
                # Past the first-level cache, which may hold what lay there two exchanges before.
                came = tl.load(
                    mine + (turn + rank) * capacity + at, mask=inside, other=0, cache_modifier=".cg"
                )  # fmt: skip
            low, high = add_words(low, high, came, DTYPE)
        tl.store(y_ptr + at, word_of(low, high, DTYPE), mask=inside)
        tl.store(counts + program, count)


def takes(x: Tensor, largest: int) -> bool:
    """Whether the kernels can sum `x`: whole 32-bit words of a float dtype, and not too many."""
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
    words = in_pairs(x).view(-1).view(torch.int32)
    y, count, pdl = torch.empty_like(words), words.shape[0], dependent_launch(x.device)
    settings = dict(
        RANKS=mailbox.ranks, RANK=mailbox.rank, PDL=pdl,
        DTYPE={torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[x.dtype],
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    if 4 * count <= FEW:
        boxes = mailbox.few
        push_words_kernel[(triton.cdiv(count, WORDS),)](
            words, y, *boxes, count, boxes.counts.shape[0] * WORDS, SIZE=WORDS, num_warps=WARPS, **settings
        )
    else:
        boxes, programs = mailbox.many, mailbox.many.counts.shape[0]
        push_blocks_kernel[(triton.cdiv(count, BLOCK),)](
            words, y, *boxes, count, programs * BLOCK, programs, SIZE=BLOCK, num_warps=BLOCK_WARPS, **settings
        )
    return y.view(x.dtype).view(x.shape)
