"""One token per sequence from qkv to attention output in one kernel: QK-norm, RoPE, KV store, split paged attention.

The splits of a sequence's keys are merged by the program that finishes last, so no second kernel runs. On sm_90 the
first keys are fetched while the qkv projection still runs.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, library

from fnllm_kernels.decode_tiles import triton
from fnllm_kernels.dependent_launch import launch_options
from fnllm_kernels.layouts import ANY_STRIDES, in_pairs, vectors

if triton is not None:
    import triton.language as tl

    from fnllm_kernels.decode_attend import attention_piece, load_head_tables, load_keys, split_range

    @triton.jit
    def decode_attention_kernel(
        qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, cache_k, cache_v, tables_ptr, contexts_ptr, slots_ptr, y_ptr,
        part_ptr, stat_ptr, counter_ptr, blocks, eps, scale, window,
        G: tl.constexpr, NS: tl.constexpr, KW: tl.constexpr, KI: tl.constexpr, PAIRS: tl.constexpr,
        HEADS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, LEAST: tl.constexpr, NORM: tl.constexpr,
        PDL: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """Program (sequence, G query heads, split); bf16 tensors as int32 pairs, cos and sin as int64 pairs."""
        if PDL and EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        row = tl.program_id(0).to(tl.int64)
        query = tl.program_id(1) * G
        head = query // (HEADS // KV_HEADS)
        split = tl.program_id(2)
        pair = tl.arange(0, PAIRS)[None, None, :] + 0 * tl.arange(0, KW)[:, None, None]
        context = tl.load(contexts_ptr + row)
        slot = tl.load(slots_ptr + row)
        lower, first, last, count = split_range(context, window, split, NS, KW * KI, LEAST)
        table_ptr = tables_ptr + row * blocks
        keys, values = load_keys(
            cache_k, cache_v, table_ptr, head, first, last, pair, KW, KI, PAIRS, KV_HEADS, BLOCK_SIZE
        )
        cos_row = cos_ptr + row * (PAIRS // 2)
        sin_row = sin_ptr + row * (PAIRS // 2)
        q_tables = load_head_tables(q_norm_ptr, cos_row, sin_row, pair, PAIRS, NORM)
        k_tables = load_head_tables(k_norm_ptr, cos_row, sin_row, pair, PAIRS, NORM)
        if PDL:
            tl.extra.cuda.gdc_wait()
        if PDL and not EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        y_row = y_ptr + row * (HEADS * 2 * PAIRS)
        if context > 0:
            if split < count:
                piece = row * (HEADS // G) + tl.program_id(1)
                attention_piece(
                    qkv_ptr + row * ((HEADS + 2 * KV_HEADS) * PAIRS), q_tables, k_tables, cache_k, cache_v, table_ptr,
                    slot, y_row, part_ptr + piece * (NS * G * 2 * PAIRS), stat_ptr + piece * (NS * G),
                    counter_ptr + piece, keys, values, lower, first, last, count, split, query, eps, scale, pair,
                    G, NS, KW, KI, PAIRS, HEADS, KV_HEADS, BLOCK_SIZE, NORM,
                )  # fmt: skip
        elif split == 0:
            for g in tl.static_range(G):
                at = (query + g) * (2 * PAIRS) + tl.arange(0, 2 * PAIRS)
                tl.store(y_row + at, tl.zeros((2 * PAIRS,), tl.bfloat16))


def decode_attention_reference(
    qkv, q_norm, k_norm, eps, cos, sin, k_cache, v_cache, block_tables, context_lens, slots, num_heads, scale, window
) -> Tensor:
    """The same in plain torch, one sequence at a time in float32."""
    head_dim, kv_heads = k_cache.shape[3], k_cache.shape[2]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    q, k, v = heads.split((num_heads, kv_heads, kv_heads), dim=1)

    def turned(x, norm):
        if norm is not None:
            wide = x.float()
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
            x = norm * wide.to(x.dtype)
        left, right = x.float().chunk(2, dim=-1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat((left * c - right * s, right * c + left * s), dim=-1).to(x.dtype)

    q, k = turned(q, q_norm), turned(k, k_norm)
    k_flat, v_flat = k_cache.view(-1, kv_heads, head_dim), v_cache.view(-1, kv_heads, head_dim)
    size, rows = k_cache.shape[1], []
    for t in range(qkv.shape[0]):
        context = int(context_lens[t])
        if context == 0:
            rows.append(torch.zeros_like(q[t]))
            continue
        if slots[t] >= 0:
            k_flat[slots[t]], v_flat[slots[t]] = k[t], v[t]
        first = max(0, context - window) if window else 0
        at = torch.arange(first, context - 1, device=qkv.device)
        at = block_tables[t, at // size].long() * size + at % size
        keys = torch.cat((k_flat[at], k[t : t + 1])).float().repeat_interleave(num_heads // kv_heads, dim=1)
        values = torch.cat((v_flat[at], v[t : t + 1])).float().repeat_interleave(num_heads // kv_heads, dim=1)
        weights = torch.softmax(torch.einsum("nd,snd->ns", q[t].float(), keys) * scale, dim=-1)
        rows.append(torch.einsum("ns,snd->nd", weights, values).to(qkv.dtype))
    return torch.stack(rows).flatten(1)


def launch_decode_attention(
    qkv, q_norm, k_norm, eps, cos, sin, k_cache, v_cache, block_tables, context_lens, slots, counters, num_heads, scale,
    window, *, splits=16, warps=4, keys=64, least=64, each=1, early=True,
):  # fmt: skip
    """Runs the Triton kernel; keys: keys a program loads at once, least: keys worth a split of their own, each: query
    heads of a program, a divisor of those that share a KV head. The defaults are the fastest of a sweep on an H200 at
    batch 1 and 128 to 1024 keys (benchmarks/results/decode_kernels.json): heads that share keys read them from the L2
    cache again, which costs less than working on several heads in turn."""
    rows, (_, size, kv_heads, head_dim) = qkv.shape[0], k_cache.shape
    pairs = head_dim // 2
    wide = max(1, warps * 128 // pairs)  # keys side by side: a thread reads four pairs
    inner = max(1, keys // wide)
    y = qkv.new_empty(rows, num_heads * head_dim)
    scratch = qkv.new_empty(rows * num_heads * splits * (head_dim + 1), dtype=torch.float32)
    parts = rows * num_heads * splits * head_dim
    qkv, q_norm, k_norm, cos, sin = (x if x is None else in_pairs(x) for x in (qkv, q_norm, k_norm, cos, sin))
    context_lens, slots = vectors(context_lens, slots)
    ints = lambda x: None if x is None else x.view(torch.int32)  # noqa: E731
    decode_attention_kernel[(rows, num_heads // each, splits)](
        ints(qkv), ints(q_norm), ints(k_norm), cos.view(torch.int64), sin.view(torch.int64), ints(k_cache),
        ints(v_cache), block_tables, context_lens, slots, y, scratch, scratch[parts:], counters,
        block_tables.shape[1], eps, scale, window, G=each, NS=splits, KW=wide, KI=inner, PAIRS=pairs,
        HEADS=num_heads, KV_HEADS=kv_heads, BLOCK_SIZE=size, LEAST=least, NORM=q_norm is not None, EARLY=early,
        num_warps=warps, **launch_options(qkv.device),
    )  # fmt: skip
    return y


HEAD_DIMS = (32, 64, 128, 256)


def takes_attention(qkv, k_cache, block_tables) -> bool:
    """Whether the Triton kernel takes these operands: bf16 on a GPU, one of its head sizes."""
    fits = qkv.dtype == k_cache.dtype == torch.bfloat16 and k_cache.shape[3] in HEAD_DIMS
    return fits and qkv.is_cuda and triton is not None and block_tables.is_contiguous() and k_cache.is_contiguous()


@library.custom_op("fnllm::decode_attention", mutates_args=("k_cache", "v_cache", "counters"), tags=ANY_STRIDES)
def _decode_attention(
    qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor, k_cache: Tensor,
    v_cache: Tensor, block_tables: Tensor, context_lens: Tensor, slots: Tensor, counters: Tensor, num_heads: int,
    scale: float, window: int,
) -> Tensor:  # fmt: skip
    if takes_attention(qkv, k_cache, block_tables):
        return launch_decode_attention(
            qkv, q_norm, k_norm, eps, cos, sin, k_cache, v_cache, block_tables, context_lens, slots, counters,
            num_heads, scale, window,
        )  # fmt: skip
    return decode_attention_reference(
        qkv, q_norm, k_norm, eps, cos, sin, k_cache, v_cache, block_tables, context_lens, slots, num_heads, scale,
        window,
    )  # fmt: skip


@_decode_attention.register_fake
def _(qkv, q_norm, k_norm, eps, cos, sin, k_cache, v_cache, block_tables, context_lens, slots, counters, num_heads,
      scale, window):  # fmt: skip
    return qkv.new_empty(qkv.shape[0], num_heads * k_cache.shape[3])


def decode_attention(
    qkv: Float[Tensor, "T QKV"],
    q_norm: Float[Tensor, " D"] | None,
    k_norm: Float[Tensor, " D"] | None,
    eps: float,
    cos: Float[Tensor, "T half_D"],
    sin: Float[Tensor, "T half_D"],
    k_cache: Float[Tensor, "P S K D"],
    v_cache: Float[Tensor, "P S K D"],
    block_tables: Int[Tensor, "T M"],
    context_lens: Int[Tensor, " T"],
    slots: Int[Tensor, " T"],
    counters: Int[Tensor, " C"],
    *,
    num_heads: int,
    scale: float,
    window: int = 0,
) -> Float[Tensor, "T ND"]:
    """Attention of one new token per sequence; writes its key and value to `slots` of the caches (-1: to none).

    context_lens counts the new token; a sequence of length 0 is padding and gives zeros. counters: int32 zeros, one for
    each row and query head, zeros again afterwards, so that one tensor serves every layer. Raises ValueError for heads
    that do not divide, one norm of two or too few counters.
    """
    kv_heads = k_cache.shape[2]
    if num_heads % kv_heads:
        raise ValueError(f"num_heads={num_heads} is not a multiple of the cache's {kv_heads} KV heads")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm go together: give both or none (qk_norm_rope_store takes one alone)")
    if counters.numel() < qkv.shape[0] * num_heads:
        raise ValueError(f"counters has {counters.numel()} numbers, {qkv.shape[0]} rows x {num_heads} heads need more")
    return _decode_attention(
        qkv, q_norm, k_norm, eps, cos, sin, k_cache, v_cache, block_tables, context_lens, slots, counters, num_heads,
        scale, window,
    )  # fmt: skip
