"""How a decode step over the paged cache is divided: items, planned on the device, the longest sequences' first.

Axes: B sequences, K KV heads. An item is a piece of one sequence. Many short sequences are one item each (the direct
form); few or long ones are cut into pieces of equal length, so that programs fill the machine. Programs start in the
order of the items: those of short sequences come last and fill the gaps that the long ones leave. A plan serves all
layers of a step.
"""

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

MANY_PAIRS = 832  # of a sequence and a KV head: from here on they fill the machine undivided
HEADER = 4  # plan[0] is the keys per item; the rest keeps what follows aligned
_DIRECT_CONTEXT = 4096  # the longest context for which one program per pair ends with the others
_MOST_PROGRAMS = 4  # of any that `decode_tiling` gives
_ROWS = 8  # sequences that one program of the plan's kernel places


class DecodeTiling(NamedTuple):
    """How a decode program works: keys per tile, warps, tiles in flight; how sequences are divided: least keys per item
    of a split sequence, programs on a multiprocessor beyond those of the sequences' first items."""

    keys: int
    warps: int
    stages: int
    least_chunk: int
    programs: int


def decode_tiling(dtype: torch.dtype, head_dim: int, batch: int, num_kv_heads: int) -> DecodeTiling:
    """The tiling for a problem; pure, static: the best of sweeps on an H200 over 2 to 120 sequences of 100 to 1600
    keys, and over the lengths of a mixed load in their order (benchmarks/results/decode_tilings.json).

    A tile's keys and values fill shared memory `stages` deep: narrow heads take more keys, wide ones fewer. The bounds
    are those of bfloat16; float32 was measured with few sequences only.
    """
    bytes_per_key = 2 * dtype.itemsize * max(16, 1 << (head_dim - 1).bit_length())
    keys = max(16, min(64, 32768 // bytes_per_key))
    fewer, pairs = max(16, keys // 2), batch * num_kv_heads
    if dtype.itemsize > 2:
        return DecodeTiling(fewer, 4, 3, 64, 4) if pairs >= MANY_PAIRS else DecodeTiling(keys, 4, 2, 64, 4)
    if pairs >= MANY_PAIRS:
        return DecodeTiling(fewer, 1, 4 if pairs <= 1024 and head_dim <= 256 else 3, 128, 4)
    return DecodeTiling(keys, 4, 3, 128, 2) if pairs > 512 else DecodeTiling(fewer, 2, 3, 128, 4)


def runs_direct(batch: int, num_kv_heads: int, max_context: int) -> bool:
    """Whether each sequence is one item, so that there are no pieces to combine; static."""
    return batch * num_kv_heads >= MANY_PAIRS and max_context <= _DIRECT_CONTEXT


def max_items(batch: int, num_kv_heads: int, device: torch.device, programs: int) -> int:
    """The most items a step of `batch` sequences is divided into: one each, and what fills the machine."""
    return batch + _spare_items(num_kv_heads, device, programs)


def _spare_items(num_kv_heads: int, device: torch.device, programs: int) -> int:
    # Off CUDA only the interpreter runs these kernels; a small machine then tests the division.
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
    return -(-programs * processors // num_kv_heads)


def plan_size(batch: int, num_kv_heads: int, device: torch.device) -> int:
    """Entries of a plan: header, the sequence of each item, the first item of each sequence, counters.

    There is room for the most programs that `decode_tiling` gives, so that the size needs no choice of a tiling, which
    would look at the batch while a step is being traced.
    """
    items = max_items(batch, num_kv_heads, device, _MOST_PROGRAMS)
    return HEADER + items + batch + batch * num_kv_heads


def decode_plan(
    context_lens: Int[Tensor, " B"],
    cu_seqlens_q: Int[Tensor, " B_plus_1"],
    num_kv_heads: int,
    window: int,
    tiling: DecodeTiling,
    direct: bool,
) -> Int[Tensor, " size"]:
    """Order a decode step's items by the keys that their sequences attend to, most first, on the device.

    If `direct` each sequence is one item, else those with many keys are divided into items of equal length. Of equal
    sequences the first in the batch goes first; one without a query has no item. The counters of divided sequences are
    moved by each attention call and are zero again when it ends.
    """
    batch, device = context_lens.shape[0], context_lens.device
    plan = torch.empty(plan_size(batch, num_kv_heads, device), dtype=torch.int32, device=device)
    spare = 0 if direct else _spare_items(num_kv_heads, device, tiling.programs)
    some = max(1, batch)  # of no sequences, too, somebody must say that the items have none
    _plan_kernel[(triton.cdiv(some, _ROWS),)](
        context_lens, cu_seqlens_q, plan, batch, spare, window, batch * num_kv_heads,
        HEADER=HEADER, ALIGN=tiling.keys, LEAST=max(tiling.keys, tiling.least_chunk), DIVIDED=not direct,
        BLOCK_B=triton.next_power_of_2(some), ROWS=_ROWS, BLOCK_J=16, num_warps=4,
    )  # fmt: skip
    return plan


if triton is not None:

    @triton.jit(do_not_specialize=["batch", "spare", "window", "counters"])
    def _plan_kernel(
        lens, cu, plan, batch, spare, window, counters,
        HEADER: tl.constexpr, ALIGN: tl.constexpr, LEAST: tl.constexpr, DIVIDED: tl.constexpr, BLOCK_B: tl.constexpr,
        ROWS: tl.constexpr, BLOCK_J: tl.constexpr,
    ):  # fmt: skip
        """Each program looks at the whole batch and places the items of ROWS sequences."""
        b = tl.arange(0, BLOCK_B)
        keys = _keys_of(lens, cu, b, batch, window, ALIGN)
        items = batch + spare
        chunk = 0
        if DIVIDED:
            even = tl.cdiv(tl.sum(tl.maximum(keys, 0), 0), spare)
            chunk = tl.maximum(tl.cdiv(even, ALIGN) * ALIGN, tl.cdiv(LEAST, ALIGN) * ALIGN)
            tl.store(plan, chunk)
        pieces = _pieces_of(keys, chunk, DIVIDED)
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        own_keys = _keys_of(lens, cu, row, batch, window, ALIGN)
        own_pieces = _pieces_of(own_keys, chunk, DIVIDED)
        more = keys[None, :] > own_keys[:, None]
        ahead = more | ((keys[None, :] == own_keys[:, None]) & (b[None, :] < row[:, None]))
        first = tl.sum(tl.where(ahead, pieces[None, :], 0), 1)
        most = tl.max(own_pieces, 0)
        step = tl.arange(0, BLOCK_J)[None, :]
        j = 0
        while j < most:
            here = plan + HEADER + first[:, None] + j + step
            tl.store(here, row[:, None] + step * 0, mask=j + step < own_pieces[:, None])
            j += BLOCK_J
        # What is left to fill, the programs fill together.
        begin, stride = tl.program_id(0) * BLOCK_B, tl.num_programs(0) * BLOCK_B
        at = tl.sum(pieces, 0) + begin
        while at < items:
            tl.store(plan + HEADER + at + b, -1, mask=at + b < items)
            at += stride
        if DIVIDED:
            tl.store(plan + HEADER + items + row, first, mask=row < batch)
            at = begin
            while at < counters:
                tl.store(plan + HEADER + items + batch + at + b, 0, mask=at + b < counters)
                at += stride

    @triton.jit
    def _keys_of(lens, cu, b, batch, window, ALIGN: tl.constexpr):
        """The keys that sequences attend to, from the tile's start where a window begins; -1 without a query."""
        inside = b < batch
        length = tl.load(lens + b, mask=inside, other=0)
        queries = tl.load(cu + b + 1, mask=inside, other=0) - tl.load(cu + b, mask=inside, other=0)
        begin = tl.where(window > 0, tl.maximum(length - window, 0) // ALIGN * ALIGN, 0)
        return tl.where(queries > 0, length - begin, -1)

    @triton.jit
    def _pieces_of(keys, chunk, DIVIDED: tl.constexpr):
        """The items of sequences with so many keys: at least one, but none without a query."""
        if DIVIDED:
            pieces = tl.maximum(tl.cdiv(keys, chunk), 1)
        else:
            pieces = 1
        return tl.where(keys >= 0, pieces, 0)
