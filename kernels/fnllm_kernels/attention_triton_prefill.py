"""Prefill over the paged cache in Triton: any number of new tokens per sequence after any cached prefix.

Axes: T packed tokens, B sequences, N query heads, K KV heads, G = N / K, D head dim, P cache blocks, S block size,
M blocks per sequence. A program takes BLOCK_M rows of (query, head of the group) of one sequence and KV head, so the
keys it loads serve the whole group.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .zero_tail import zero_tail

try:
    import triton
    import triton.language as tl

    from .attention_triton_pages import pages
except ImportError:
    triton = None


class PrefillTiling(NamedTuple):
    """How a prefill program works: rows of queries, keys per tile, warps, tiles in flight."""

    rows: int
    keys: int
    warps: int
    stages: int


def prefill_tiling(dtype: torch.dtype, head_dim: int, rows: int, shared_bytes: int) -> PrefillTiling:
    """The tiling for a problem with at most `rows` rows of (query, head) per sequence and KV head; pure, static.

    `shared_bytes` is the shared memory a program may use; large tiles want 160 KiB.
    """
    width = max(16, 1 << (head_dim - 1).bit_length())
    needed = max(16, 1 << (rows - 1).bit_length())
    if dtype.itemsize == 4:  # float32 products go by three tf32 ones: larger tiles spill registers
        most, keys = (64, 32) if width <= 64 else (32, 16) if width <= 128 else (16, 16)
        return PrefillTiling(min(most, needed), keys, 4, 2)
    keys = 64 if width <= 128 else 32
    roomy = shared_bytes >= 160 * 1024
    if needed <= 64 or (width > 128 and not roomy):
        return PrefillTiling(min(64, needed), keys, 4, 3 if roomy and width <= 128 else 2)
    return PrefillTiling(128, keys, 8, 3 if roomy and width <= 128 else 2)


def prefill_attention(
    q: Float[Tensor, "T N D"],
    k_cache: Float[Tensor, "P S K D"],
    v_cache: Float[Tensor, "P S K D"],
    block_tables: Int[Tensor, "B M"],
    cu_seqlens_q: Int[Tensor, " B_plus_1"],
    context_lens: Int[Tensor, " B"],
    max_seqlen_q: int,
    scale: float,
    window: int,
    tiling: PrefillTiling,
) -> Float[Tensor, "T N D"]:
    """Attention of up to max_seqlen_q queries per sequence.

    With one tiling for every call, a token's result depends on its own sequence alone: not on the batch, not on how
    the prompt was cut into chunks.
    """
    (tokens, heads, head_dim), (_, block_size, kv_heads, _) = q.shape, k_cache.shape
    batch, group = context_lens.shape[0], heads // kv_heads
    out = torch.empty_like(q)
    tiles = triton.cdiv(max_seqlen_q * group, tiling.rows)
    if tokens and batch:
        _prefill_kernel[(tiles, kv_heads, batch)](
            q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens, out,
            scale * math.log2(math.e), window,
            q.stride(0), block_tables.stride(0), k_cache.stride(0), k_cache.stride(1),
            K=kv_heads, G=group, D=head_dim, S=block_size, WINDOW=window > 0,
            BLOCK_M=tiling.rows, BLOCK_N=tiling.keys, BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
            STAGES=tiling.stages, num_warps=tiling.warps,
        )  # fmt: skip
    zero_tail(out, cu_seqlens_q)
    return out


if triton is not None:

    @triton.jit(do_not_specialize=["window"])
    def _prefill_kernel(
        q, k_cache, v_cache, tables, cu, lens, out, scale_log2, window, q_row, table_row, cache_block, cache_row,
        K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, S: tl.constexpr, WINDOW: tl.constexpr,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last queries see the most keys: start them first
        head = tl.program_id(1)
        b = tl.program_id(2)
        token = tl.load(cu + b)
        count = tl.load(cu + b + 1) - token
        length = tl.load(lens + b)
        if tile * BLOCK_M < count * G:
            row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
            query = row // G
            d = tl.arange(0, BLOCK_D)[None, :]
            inside = (query < count)[:, None] & (d < D)
            column = (head * G + row % G)[:, None] * D + d
            at = (token + query).to(tl.int64)[:, None]
            rows = tl.load(q + at * q_row + column, mask=inside, other=0.0)
            position = length - count + query
            lowest = length - count + tile * BLOCK_M // G
            end = tl.minimum(length, length - count + (tile * BLOCK_M + BLOCK_M - 1) // G + 1)
            begin = 0
            if WINDOW:
                begin = tl.maximum(lowest - window + 1, 0) // BLOCK_N * BLOCK_N
            # Tiles of keys that every row sees need no mask.
            open_end = begin
            if not WINDOW:
                open_end = tl.minimum(tl.maximum(lowest + 1, 0), end) // BLOCK_N * BLOCK_N
            acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
            total = tl.zeros((BLOCK_M,), tl.float32)
            table = tables + b * table_row
            acc, top, total = _attend(
                rows, acc, top, total, position, k_cache + head * D, v_cache + head * D, table, begin, open_end,
                scale_log2, window, cache_block, cache_row, D, S, WINDOW, False, BLOCK_N, BLOCK_D, STAGES,
            )  # fmt: skip
            acc, top, total = _attend(
                rows, acc, top, total, position, k_cache + head * D, v_cache + head * D, table, open_end, end,
                scale_log2, window, cache_block, cache_row, D, S, WINDOW, True, BLOCK_N, BLOCK_D, STAGES,
            )  # fmt: skip
            acc = acc / tl.where(total > 0, total, 1.0)[:, None]
            tl.store(out + at * (K * G * D) + column, acc.to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _attend(
        rows, acc, top, total, position, k_head, v_head, table, begin, end,
        scale_log2, window, cache_block, cache_row, D: tl.constexpr, S: tl.constexpr, WINDOW: tl.constexpr,
        MASKED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        """Online softmax over the keys begin..end-1; begin is a multiple of BLOCK_N, and so is end unless MASKED.

        `top` is in units of the plain products. How a prompt was cut into chunks decides which tiles are masked, and
        whether a row sees one in which all its keys are masked: neither may change a bit. So the weights' scaling and
        subtraction round once, by an explicit fma (the compiler would contract the two only without a mask), and
        `shrink` subtracts before it scales, which gives exactly 1 where the top stays.
        """
        d = tl.arange(0, BLOCK_D)[None, :]
        page = pages(table, begin, end, S, BLOCK_N)
        for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
            key = start + tl.arange(0, BLOCK_N)
            # 64-bit offsets: a pool can hold more than 2^31 elements.
            if S % BLOCK_N == 0:
                offset = page.to(tl.int64) * cache_block + (start % S + tl.arange(0, BLOCK_N)) * cache_row
            else:
                offset = page.to(tl.int64) * cache_block + (key % S) * cache_row
            # The next tile's table entries are read a tile ahead: no load of keys waits for them.
            page = pages(table, start + BLOCK_N, end, S, BLOCK_N)
            where = offset[:, None] + d
            loaded = (key < end)[:, None] & (d < D)
            keys = tl.load(k_head + where, mask=loaded, other=0.0)
            values = tl.load(v_head + where, mask=loaded, other=0.0)
            scores = tl.dot(rows, tl.trans(keys), input_precision="tf32x3")
            if MASKED:
                seen = key[None, :] <= position[:, None]
                if WINDOW:
                    seen = seen & (key[None, :] > position[:, None] - window)
                scores = tl.where(seen, scores, -float("inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            base = new_top
            if MASKED:  # a row that has seen no key yet has top -inf, and -inf - -inf is NaN
                base = tl.where(new_top == -float("inf"), 0.0, new_top)
            shift = (-base * scale_log2)[:, None]
            weights = tl.exp2(tl.fma(scores, tl.full(scores.shape, scale_log2, tl.float32), shift))
            shrink = tl.exp2((top - base) * scale_log2)
            total = tl.fma(total, shrink, tl.sum(weights, 1))
            acc = acc * shrink[:, None]
            acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="tf32x3")
            top = new_top
        return acc, top, total
