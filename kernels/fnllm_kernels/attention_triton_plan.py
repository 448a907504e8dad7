"""How a decode step over the paged cache is divided: items of equal length, laid down on the device once per step.

Axes: B sequences, K KV heads. An item is a piece of one sequence. Many short sequences are one item each; few or long
ones are cut, so that programs fill the machine.
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

PROGRAMS = 2  # on a multiprocessor, beyond those that sequences of one item have
HEADER = 4  # plan[0] is the keys per item; the rest keeps what follows aligned


class DecodeTiling(NamedTuple):
    """How a decode program works: keys per tile, warps, tiles in flight, least keys per item of a split sequence."""

    keys: int
    warps: int
    stages: int
    least_chunk: int


def decode_tiling(dtype: torch.dtype, head_dim: int, batch: int, num_kv_heads: int) -> DecodeTiling:
    """The tiling for a problem; pure, static.

    A tile's keys and values fill shared memory `stages` deep: narrow heads take more keys, wide ones fewer.
    """
    bytes_per_key = 2 * dtype.itemsize * max(16, 1 << (head_dim - 1).bit_length())
    keys = max(16, min(64, 32768 // bytes_per_key))
    if batch * num_kv_heads >= 512:
        return DecodeTiling(max(16, keys // 2), 1 if dtype.itemsize == 2 else 4, 3, 64)
    return DecodeTiling(keys, 4, 2, 64)


def max_items(batch: int, num_kv_heads: int, device: torch.device) -> int:
    """The most items a step of `batch` sequences is divided into: one each, and what fills the machine."""
    return batch + _spare_items(num_kv_heads, device)


def _spare_items(num_kv_heads: int, device: torch.device) -> int:
    # Off CUDA only the interpreter runs these kernels; a small machine then tests the division.
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
    return -(-PROGRAMS * processors // num_kv_heads)


def plan_size(batch: int, num_kv_heads: int, device: torch.device) -> int:
    """Entries of the plan: header, the sequence of each item, the first item of each sequence, counters at zero."""
    return HEADER + max_items(batch, num_kv_heads, device) + batch + batch * num_kv_heads


def decode_plan(
    context_lens: Int[Tensor, " B"],
    cu_seqlens_q: Int[Tensor, " B_plus_1"],
    num_kv_heads: int,
    window: int,
    tiling: DecodeTiling,
) -> Int[Tensor, " size"]:
    """Divide a decode step into items of equal length, on the device.

    The counters in the plan are moved by each attention call and are zero again when it ends.
    """
    batch, device = context_lens.shape[0], context_lens.device
    plan = torch.empty(plan_size(batch, num_kv_heads, device), dtype=torch.int32, device=device)
    block = triton.next_power_of_2(batch)
    _plan_kernel[(1,)](
        context_lens, cu_seqlens_q, plan, batch, max_items(batch, num_kv_heads, device),
        _spare_items(num_kv_heads, device), window, batch * num_kv_heads,
        HEADER=HEADER, ALIGN=tiling.keys, LEAST=max(tiling.keys, tiling.least_chunk), BLOCK_B=block,
        BLOCK_J=max(1, 256 // block), num_warps=4,
    )  # fmt: skip
    return plan


if triton is not None:

    @triton.jit(do_not_specialize=["batch", "items", "spare", "window", "counters"])
    def _plan_kernel(
        lens, cu, plan, batch, items, spare, window, counters,
        HEADER: tl.constexpr, ALIGN: tl.constexpr, LEAST: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_J: tl.constexpr,
    ):  # fmt: skip
        b = tl.arange(0, BLOCK_B)
        inside = b < batch
        length = tl.load(lens + b, mask=inside, other=0)
        queries = tl.load(cu + b + 1, mask=inside, other=0) - tl.load(cu + b, mask=inside, other=0)
        begin = tl.where(window > 0, tl.maximum(length - window, 0) // ALIGN * ALIGN, 0)
        span = tl.where(queries > 0, length - begin, 0)
        even = tl.cdiv(tl.sum(span, 0), spare)
        chunk = tl.maximum(tl.cdiv(even, ALIGN) * ALIGN, tl.cdiv(LEAST, ALIGN) * ALIGN)
        pieces = tl.where(queries > 0, tl.maximum(tl.cdiv(span, chunk), 1), 0)
        first = tl.cumsum(pieces, 0) - pieces
        tl.store(plan, chunk)
        tl.store(plan + HEADER + items + b, first, mask=inside)
        used = tl.sum(pieces, 0)
        most = tl.max(pieces, 0)
        step = tl.arange(0, BLOCK_J)[:, None]
        j = 0
        while j < most:
            tl.store(plan + HEADER + first[None, :] + j + step, b[None, :] + step * 0, mask=j + step < pieces[None, :])
            j += BLOCK_J
        at = used
        while at < items:
            tl.store(plan + HEADER + at + b, -1, mask=at + b < items)
            at += BLOCK_B
        at = 0
        while at < counters:
            tl.store(plan + HEADER + items + batch + at + b, 0, mask=at + b < counters)
            at += BLOCK_B
