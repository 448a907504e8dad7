"""Decode over the paged cache in Triton: one query per sequence, the query heads of a KV head as one tile.

Axes: T packed tokens, B sequences, N query heads, K KV heads, G = N / K, D head dim, P cache blocks, S block size,
M blocks per sequence.

Work is divided into items, each a piece of one sequence. Many short sequences are one item each and write their result
at once. Few or long ones are cut so that about two items per multiprocessor exist; the last item of a sequence to end
combines the pieces, so no second kernel runs. The division is made on the device by `decode_plan`, once per step.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

try:
    import triton
    import triton.language as tl

    from .attention_triton_pages import pages
except ImportError:
    triton = None

_HEADER = 4  # plan[0] is the keys per item; the rest keeps what follows aligned


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
    """The most items a step of `batch` sequences is divided into: one each, and what two waves of programs add."""
    return batch + _spare_items(num_kv_heads, device)


def _spare_items(num_kv_heads: int, device: torch.device) -> int:
    # Off CUDA only the interpreter runs these kernels; a small machine then tests the division.
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
    return -(-2 * processors // num_kv_heads)


def plan_size(batch: int, num_kv_heads: int, device: torch.device) -> int:
    """Entries of the plan: header, the sequence of each item, the first item of each sequence, counters at zero."""
    return _HEADER + max_items(batch, num_kv_heads, device) + batch + batch * num_kv_heads


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
        HEADER=_HEADER, ALIGN=tiling.keys, LEAST=max(tiling.keys, tiling.least_chunk), BLOCK_B=block,
        BLOCK_J=max(1, 256 // block), num_warps=4,
    )  # fmt: skip
    return plan


def decode_attention(
    q: Float[Tensor, "T N D"],
    k_cache: Float[Tensor, "P S K D"],
    v_cache: Float[Tensor, "P S K D"],
    block_tables: Int[Tensor, "B M"],
    cu_seqlens_q: Int[Tensor, " B_plus_1"],
    context_lens: Int[Tensor, " B"],
    scale: float,
    window: int,
    plan: Int[Tensor, " size"] | None,
    tiling: DecodeTiling,
) -> Float[Tensor, "T N D"]:
    """Attention of at most one query per sequence; without a plan each sequence is one item."""
    (tokens, heads, head_dim), (_, block_size, kv_heads, _) = q.shape, k_cache.shape
    batch, group = context_lens.shape[0], heads // kv_heads
    out = torch.empty_like(q)
    items = batch if plan is None else max_items(batch, kv_heads, q.device)
    group_rows = triton.next_power_of_2(group)
    if plan is None:
        partial = stats = plan = out  # placeholders: the kernel without a plan does not touch them
        scheduled = False
    else:
        partial = torch.empty(items, kv_heads, group_rows, head_dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(items, kv_heads, group_rows, dtype=torch.float32, device=q.device)
        scheduled = True
    width = max(16, triton.next_power_of_2(head_dim))
    if max(tokens, items):
        _decode_kernel[(kv_heads, max(tokens, items))](
            q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens, out, partial, stats, plan,
            tokens, batch, items, scale * math.log2(math.e), window,
            q.stride(0), block_tables.stride(0), k_cache.stride(0), k_cache.stride(1),
            K=kv_heads, G=group, D=head_dim, S=block_size, SCHEDULED=scheduled, WINDOW=window > 0, HEADER=_HEADER,
            BLOCK_G=max(16, group_rows), GROUP=group_rows, BLOCK_N=tiling.keys, BLOCK_D=width,
            BLOCK_J=max(1, min(16, 4096 // (group_rows * width))), STAGES=tiling.stages, num_warps=tiling.warps,
        )  # fmt: skip
    return out


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

    @triton.jit(do_not_specialize=["tokens", "batch", "items", "window"])
    def _decode_kernel(
        q, k_cache, v_cache, tables, cu, lens, out, partial, stats, plan,
        tokens, batch, items, scale_log2, window, q_row, table_row, cache_block, cache_row,
        K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, S: tl.constexpr, SCHEDULED: tl.constexpr,
        WINDOW: tl.constexpr, HEADER: tl.constexpr, BLOCK_G: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
        BLOCK_D: tl.constexpr, BLOCK_J: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        head = tl.program_id(0)
        item = tl.program_id(1)
        g = tl.arange(0, BLOCK_G)[:, None]
        d = tl.arange(0, BLOCK_D)[None, :]
        in_row = (g < G) & (d < D)
        out_row = out + (head * G + g) * D + d
        # Padding rows have no sequence; program `item` clears row `item`.
        if (item < tokens) & (item >= tl.load(cu + batch)):
            zeros = tl.zeros((BLOCK_G, BLOCK_D), out.dtype.element_ty)
            tl.store(out_row + item.to(tl.int64) * (K * G * D), zeros, mask=in_row)
        if SCHEDULED:
            b = tl.load(plan + HEADER + item, mask=item < items, other=-1)
        else:
            b = tl.where(item < items, item, -1)
        if b >= 0:
            token = tl.load(cu + b).to(tl.int64)
            length = tl.load(lens + b)
            if tl.load(cu + b + 1) > token:
                first_key = 0
                begin = 0
                if WINDOW:
                    first_key = tl.maximum(length - window, 0)
                    begin = first_key // BLOCK_N * BLOCK_N
                low, high, pieces, first_item = begin, length, 1, 0
                if SCHEDULED:
                    chunk = tl.load(plan)
                    first_item = tl.load(plan + HEADER + items + b)
                    low = begin + (item - first_item) * chunk
                    high = tl.minimum(low + chunk, length)
                    pieces = tl.cdiv(length - begin, chunk)
                query = tl.load(q + token * q_row + (head * G + g) * D + d, mask=in_row, other=0.0)
                acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
                top = tl.full((BLOCK_G,), -float("inf"), tl.float32)
                total = tl.zeros((BLOCK_G,), tl.float32)
                table = tables + b * table_row
                page = pages(table, low, high, S, BLOCK_N)
                for start in tl.range(low, high, BLOCK_N, num_stages=STAGES):
                    key = start + tl.arange(0, BLOCK_N)
                    # 64-bit offsets: a pool can hold more than 2^31 elements.
                    if S % BLOCK_N == 0:
                        offset = page.to(tl.int64) * cache_block + (start % S + tl.arange(0, BLOCK_N)) * cache_row
                    else:
                        offset = page.to(tl.int64) * cache_block + (key % S) * cache_row
                    # The next tile's table entries are read a tile ahead: no load of keys waits for them.
                    page = pages(table, start + BLOCK_N, high, S, BLOCK_N)
                    seen = key < high
                    if WINDOW:
                        seen = seen & (key >= first_key)
                    where = offset[:, None] + head * D + d
                    loaded = seen[:, None] & (d < D)
                    keys = tl.load(k_cache + where, mask=loaded, other=0.0)
                    values = tl.load(v_cache + where, mask=loaded, other=0.0)
                    scores = tl.dot(query, tl.trans(keys), input_precision="tf32x3") * scale_log2
                    scores = tl.where(seen[None, :], scores, -float("inf"))
                    new_top = tl.maximum(top, tl.max(scores, 1))
                    weights = tl.exp2(scores - new_top[:, None])
                    shrink = tl.exp2(top - new_top)
                    total = total * shrink + tl.sum(weights, 1)
                    acc = acc * shrink[:, None]
                    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="tf32x3")
                    top = new_top
                acc = acc / tl.where(total > 0, total, 1.0)[:, None]
                out_row += token * (K * G * D)
                if pieces <= 1:
                    tl.store(out_row, acc.to(out.dtype.element_ty), mask=in_row)
                elif SCHEDULED:
                    piece = (item * K + head) * GROUP
                    tl.store(partial + (piece + g) * D + d, acc, mask=in_row)
                    rows = tl.arange(0, BLOCK_G)
                    tl.store(stats + piece + rows, top + tl.log2(total), mask=rows < G)
                    tl.debug_barrier()  # every thread's part is written before the count is raised
                    counter = plan + HEADER + items + batch + b * K + head
                    if tl.atomic_add(counter, 1, sem="acq_rel") == pieces - 1:
                        tl.store(counter, 0)
                        _combine(
                            out + token * (K * G * D) + head * G * D, partial, stats, first_item, pieces, head,
                            K, G, D, GROUP, BLOCK_D, BLOCK_J,
                        )  # fmt: skip

    @triton.jit
    def _combine(
        out, partial, stats, first_item, pieces, head,
        K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr,
        BLOCK_J: tl.constexpr,
    ):  # fmt: skip
        """Weigh the pieces of one sequence and KV head by their sums of exponentials, given as base-2 logarithms."""
        g = tl.arange(0, GROUP)
        d = tl.arange(0, BLOCK_D)
        acc = tl.zeros((GROUP, BLOCK_D), tl.float32)
        top = tl.full((GROUP,), -float("inf"), tl.float32)
        total = tl.zeros((GROUP,), tl.float32)
        for start in tl.range(0, pieces, BLOCK_J):
            j = start + tl.arange(0, BLOCK_J)
            row = ((first_item + j[:, None]) * K + head) * GROUP + g[None, :]
            wanted = (j < pieces)[:, None] & (g < G)[None, :]
            # Read past L1: the pieces come from other multiprocessors.
            stat = tl.load(stats + row, mask=wanted, other=-float("inf"), cache_modifier=".cg")
            stat = tl.where((g < G)[None, :], stat, 0.0)
            part = tl.load(
                partial + row[:, :, None] * D + d[None, None, :],
                mask=wanted[:, :, None] & (d < D)[None, None, :], other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            new_top = tl.maximum(top, tl.max(stat, 0))
            weight = tl.exp2(stat - new_top[None, :])
            shrink = tl.exp2(top - new_top)
            acc = acc * shrink[:, None] + tl.sum(part * weight[:, :, None], 0)
            total = total * shrink + tl.sum(weight, 0)
            top = new_top
        inside = (g < G)[:, None] & (d < D)[None, :]
        tl.store(out + g[:, None] * D + d[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)
