"""Decode over the paged cache in Triton: one query per sequence, the query heads of a KV head as one tile.

Axes: T packed tokens, B sequences, N query heads, K KV heads, G = N / K, D head dim, P cache blocks, S block size,
M blocks per sequence.

Work is divided into items, each a piece of one sequence, the longest sequences' items first (see
attention_triton_plan.py). A sequence of one item has its result written at once; of several, the last to end combines
the pieces, so no second kernel runs.

The kernel may start from the qkv projection instead of from queries: then each item norms and rotates its queries
itself, and the item of the newest keys also makes the new key and value, stores them, and attends to them from its
registers. What it stores is read by nobody before the next step.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .attention_triton_plan import HEADER, DecodeTiling, max_items
from .dependent_launch import launch_options

try:
    import triton
    import triton.language as tl

    from .attention_triton_heads import load_norm, load_pairs, load_turn, repeated, turned_heads
    from .attention_triton_pages import pages
except ImportError:
    triton = None


class NewHeads(NamedTuple):
    """What makes queries, keys and values of the rows of a qkv projection, as `qk_norm_rope_store` does."""

    q_norm: Float[Tensor, " D"] | None
    k_norm: Float[Tensor, " D"] | None
    eps: float
    cos: Float[Tensor, "T half_D"]
    sin: Float[Tensor, "T half_D"]
    slots: Int[Tensor, " T"]


def decode_attention(
    q: Float[Tensor, "T heads D"],
    k_cache: Float[Tensor, "P S K D"],
    v_cache: Float[Tensor, "P S K D"],
    block_tables: Int[Tensor, "B M"],
    cu_seqlens_q: Int[Tensor, " B_plus_1"],
    context_lens: Int[Tensor, " B"],
    scale: float,
    window: int,
    plan: Int[Tensor, " size"],
    tiling: DecodeTiling,
    direct: bool,
    new: NewHeads | None = None,
    *,
    pdl: bool | None = None,
) -> Float[Tensor, "T N D"]:
    """Attention of at most one query per sequence, in the order of a `decode_plan` of the same tiling and `direct`.

    q holds the N query heads; with `new` it holds the projection's N + 2 K heads, and the caches are written. pdl:
    launch dependently (None: where the device can).
    """
    (tokens, heads, head_dim), (_, block_size, kv_heads, _) = q.shape, k_cache.shape
    heads -= 0 if new is None else 2 * kv_heads
    batch, group = context_lens.shape[0], heads // kv_heads
    out = q.new_empty(tokens, heads, head_dim)
    items = batch if direct else max_items(batch, kv_heads, q.device, tiling.programs)
    group_rows = triton.next_power_of_2(group)
    partial = stats = out  # placeholders: the direct form does not touch them
    if not direct:
        partial = torch.empty(items, kv_heads, group_rows, head_dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(items, kv_heads, group_rows, dtype=torch.float32, device=q.device)
    width = max(16, triton.next_power_of_2(head_dim))
    if max(tokens, items):
        q_norm, k_norm, eps, cos, sin, slots = new or (None, None, 0.0, None, None, None)
        _decode_kernel[(kv_heads, max(tokens, items))](
            q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens, out, partial, stats, plan,
            q_norm, k_norm, cos, sin, slots,
            tokens, batch, items, scale * math.log2(math.e), window, eps,
            q.stride(0), block_tables.stride(0), k_cache.stride(0), k_cache.stride(1),
            K=kv_heads, G=group, D=head_dim, S=block_size, DIVIDED=not direct, WINDOW=window > 0, HEADER=HEADER,
            BLOCK_G=max(16, group_rows), GROUP=group_rows, BLOCK_N=tiling.keys, BLOCK_D=width,
            BLOCK_J=max(1, min(16, 4096 // (group_rows * width))), STAGES=tiling.stages, NEW=new is not None,
            num_warps=tiling.warps, **launch_options(q.device, pdl),
        )  # fmt: skip
    return out


if triton is not None:

    @triton.jit(do_not_specialize=["tokens", "batch", "items", "window"])
    def _decode_kernel(
        q, k_cache, v_cache, tables, cu, lens, out, partial, stats, plan, q_norm, k_norm, cos, sin, slots,
        tokens, batch, items, scale_log2, window, eps, q_row, table_row, cache_block, cache_row,
        K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, S: tl.constexpr, DIVIDED: tl.constexpr,
        WINDOW: tl.constexpr, HEADER: tl.constexpr, BLOCK_G: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
        BLOCK_D: tl.constexpr, BLOCK_J: tl.constexpr, STAGES: tl.constexpr, NEW: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
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
        b = tl.load(plan + HEADER + item, mask=item < items, other=-1)
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
                if DIVIDED:
                    chunk = tl.load(plan)
                    first_item = tl.load(plan + HEADER + items + b)
                    pieces = tl.cdiv(length - begin, chunk)
                    # As many pieces as chunks of the plan's size would make, but alike: none of them is left empty.
                    piece_keys = tl.cdiv(tl.cdiv(length - begin, pieces), BLOCK_N) * BLOCK_N
                    low = begin + (item - first_item) * piece_keys
                    high = tl.minimum(low + piece_keys, length)
                if NEW:
                    newest = (high == length) & (length > 0)
                    high = tl.minimum(high, length - 1)  # the new key is none of the loop's
                table = tables + b * table_row
                page = pages(table, low, high, S, BLOCK_N)
                row = q + token * q_row
                acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
                top = tl.full((BLOCK_G,), -float("inf"), tl.float32)
                total = tl.zeros((BLOCK_G,), tl.float32)
                if NEW:
                    # All loads come before the first use of one, so that they are under way together.
                    few = tl.arange(0, GROUP)[:, None]
                    in_key = (d < D) & newest
                    one = row + head * D + tl.zeros((1, 1), tl.int32)
                    raw_heads = load_pairs(row + (head * G + few) * D, d, (few < G) & (d < D), D)
                    raw_key = load_pairs(one + K * G * D, d, in_key, D)
                    new_value = tl.load(one + (K * G + K) * D + d, mask=in_key, other=0.0, cache_modifier=".cg")
                    q_weights = load_norm(q_norm, d, D)
                    k_weights = load_norm(k_norm, d, D)
                    turn = load_turn(cos + token * (D // 2), sin + token * (D // 2), d, D)
                    slot = tl.load(slots + token).to(tl.int64)
                    heads = turned_heads(raw_heads, q_norm, q_weights, eps, turn, D)
                    new_key = turned_heads(raw_key, k_norm, k_weights, eps, turn, D)
                    # 64-bit offsets: a pool can hold more than 2^31 elements.
                    at = (slot // S) * cache_block + (slot % S) * cache_row + head * D + d
                    tl.store(k_cache + at, new_key, mask=in_key & (slot >= 0))
                    tl.store(v_cache + at, new_value, mask=in_key & (slot >= 0))
                    # The new key is the first that the running softmax sees.
                    score = tl.sum(heads.to(tl.float32) * new_key.to(tl.float32), 1)[:, None] * scale_log2
                    top = tl.where(newest, tl.reshape(repeated(score, GROUP, 1, BLOCK_G), (BLOCK_G,)), top)
                    total = tl.where(newest, 1.0, total)
                    acc += new_value.to(tl.float32)
                    query = repeated(heads, GROUP, BLOCK_D, BLOCK_G)
                else:
                    query = tl.load(row + (head * G + g) * D + d, mask=in_row, other=0.0)
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
                elif DIVIDED:
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
