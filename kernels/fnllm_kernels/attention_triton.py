"""The project's own paged attention kernels behind one entry: decode, or prefill, by the static query length.

Axes: T packed tokens, B sequences, N query heads, K KV heads, D head dim, P cache blocks, S block size, M blocks per
sequence.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .attention_triton_decode import NewHeads, decode_attention
from .attention_triton_plan import decode_plan, decode_tiling, plan_size, runs_direct
from .attention_triton_prefill import prefill_attention, prefill_tiling
from .layouts import vectors

_INVARIANT_ROWS = 64  # rows of the batch-invariant form's tile: for prefill at some rate, for decode at some waste


def paged_attention_triton(
    q: Float[Tensor, "T N D"],
    k_cache: Float[Tensor, "P S K D"],
    v_cache: Float[Tensor, "P S K D"],
    block_tables: Int[Tensor, "B M"],
    cu_seqlens_q: Int[Tensor, " B_plus_1"],
    context_lens: Int[Tensor, " B"],
    *,
    max_seqlen_q: int,
    scale: float,
    window: int = 0,
    metadata: Tensor | None = None,
    max_context: int = 0,
    invariant: bool = False,
) -> Float[Tensor, "T N D"]:
    """`paged_attention` by Triton kernels: float32, bfloat16, float16; any head dim, group and block size.

    `invariant` runs one kernel with one tiling whatever the batch, so that a token's result depends on its own sequence
    alone. Raises ValueError for a dtype or cache layout the kernels cannot take.
    """
    if max_seqlen_q == 1 and not invariant:
        return decode_attention_triton(
            q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens,
            scale=scale, window=window, metadata=metadata, max_context=max_context,
        )  # fmt: skip
    q, block_tables = _ready(q, k_cache, v_cache, block_tables)
    cu_seqlens_q, context_lens = vectors(cu_seqlens_q, context_lens)
    rows = _INVARIANT_ROWS if invariant else max_seqlen_q * (q.shape[1] // k_cache.shape[2])
    shared = torch.cuda.get_device_properties(q.device).shared_memory_per_block_optin if q.is_cuda else 1 << 20
    tiling = prefill_tiling(q.dtype, q.shape[2], rows, shared)
    return prefill_attention(
        q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens, max_seqlen_q, scale, window, tiling
    )


def decode_attention_triton(
    q: Float[Tensor, "T heads D"],
    k_cache: Float[Tensor, "P S K D"],
    v_cache: Float[Tensor, "P S K D"],
    block_tables: Int[Tensor, "B M"],
    cu_seqlens_q: Int[Tensor, " B_plus_1"],
    context_lens: Int[Tensor, " B"],
    *,
    scale: float,
    window: int = 0,
    metadata: Tensor | None = None,
    max_context: int = 0,
    new: NewHeads | None = None,
    pdl: bool | None = None,
) -> Float[Tensor, "T N D"]:
    """A decode step's attention; with `new`, q is the qkv projection in heads and the new keys and values are stored.

    metadata: `triton_metadata` of the same max_context, or None: the table's width bounds the context where that is 0.
    pdl: launch dependently (None: where the device can). Raises ValueError as `paged_attention_triton` does.
    """
    q, block_tables = _ready(q, k_cache, v_cache, block_tables)
    cu_seqlens_q, context_lens = vectors(cu_seqlens_q, context_lens)
    (_, block_size, kv_heads, head_dim), batch = k_cache.shape, context_lens.shape[0]
    tiling = decode_tiling(q.dtype, head_dim, batch, kv_heads)
    direct = runs_direct(batch, kv_heads, max_context or block_tables.shape[1] * block_size)
    if metadata is None:
        metadata = decode_plan(context_lens, cu_seqlens_q, kv_heads, window, tiling, direct)
    return decode_attention(
        q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens, scale, window, metadata, tiling, direct, new,
        pdl=pdl,
    )  # fmt: skip


def _ready(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor) -> tuple[Tensor, Tensor]:
    """q and the tables in the layout that the kernels read."""
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"triton: q is {q.dtype}; the kernels take float32, bfloat16 or float16")
    if k_cache.stride()[2:] != (k_cache.shape[3], 1) or k_cache.stride() != v_cache.stride():
        raise ValueError(
            f"triton: caches of strides {k_cache.stride()} and {v_cache.stride()}; the [K, D] part of both must be "
            "contiguous and the strides equal: allocate each as one [P, S, K, D] tensor"
        )
    if q.stride()[1:] != (q.shape[2], 1):
        q = q.contiguous()
    return q, block_tables if block_tables.stride(1) == 1 else block_tables.contiguous()


def triton_metadata(
    context_lens: Int[Tensor, " B"],
    cu_seqlens_q: Int[Tensor, " B_plus_1"],
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    window: int,
    max_context: int,
) -> Int[Tensor, " size"]:
    """The order and division of a decode step's work over sequences of at most `max_context` keys."""
    return _decode_plan_op(context_lens, cu_seqlens_q, num_kv_heads, head_dim, dtype, window, max_context)


@torch.library.custom_op(
    "fnllm::decode_plan",
    mutates_args=(),
    schema="(Tensor context_lens, Tensor cu_seqlens_q, int num_kv_heads, int head_dim, ScalarType dtype, int window, "
    "SymInt max_context) -> Tensor",
)
def _decode_plan_op(context_lens, cu_seqlens_q, num_kv_heads, head_dim, dtype, window, max_context):
    batch, (context_lens, cu_seqlens_q) = context_lens.shape[0], vectors(context_lens, cu_seqlens_q)
    tiling, direct = decode_tiling(dtype, head_dim, batch, num_kv_heads), runs_direct(batch, num_kv_heads, max_context)
    return decode_plan(context_lens, cu_seqlens_q, num_kv_heads, window, tiling, direct)


@_decode_plan_op.register_fake
def _decode_plan_fake(context_lens, cu_seqlens_q, num_kv_heads, head_dim, dtype, window, max_context):
    size = plan_size(context_lens.shape[0], num_kv_heads, context_lens.device)
    return context_lens.new_empty(size, dtype=torch.int32)
