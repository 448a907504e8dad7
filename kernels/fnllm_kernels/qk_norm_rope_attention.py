"""A decode step from the qkv projection to attention's output: per-head norm, rotary embedding, cache store, attention.

Axes: T packed tokens, B sequences, N query heads, K KV heads, D head dim (even), P cache blocks, S block size, M blocks
per sequence. The Triton kernel is that of decode attention, which makes the new heads itself (NewHeads).
"""

from jaxtyping import Float, Int
from torch import Tensor, library

from .attention_reference import paged_attention_reference
from .attention_triton import decode_attention_triton
from .attention_triton_decode import NewHeads, triton
from .layouts import ANY_STRIDES, vectors
from .qk_norm_rope_store import check_heads, qk_norm_rope_store_reference


def qk_norm_rope_attention(
    qkv: Float[Tensor, "T QKV"],
    q_norm: Float[Tensor, " D"] | None,
    k_norm: Float[Tensor, " D"] | None,
    eps: float,
    cos: Float[Tensor, "T half_D"],
    sin: Float[Tensor, "T half_D"],
    k_cache: Float[Tensor, "P S K D"],
    v_cache: Float[Tensor, "P S K D"],
    slots: Int[Tensor, " T"],
    block_tables: Int[Tensor, "B M"],
    cu_seqlens_q: Int[Tensor, " B_plus_1"],
    context_lens: Int[Tensor, " B"],
    *,
    num_heads: int,
    scale: float,
    window: int = 0,
    metadata: Int[Tensor, " size"] | None = None,
    max_context: int = 0,
) -> Float[Tensor, "T N D"]:
    """`qk_norm_rope_store`, then `paged_attention` of at most one query per sequence, in one kernel.

    `slots` is where a token's key and value go, the place of its sequence's last key: context_lens counts it. A
    sequence with a query and slot -1 stores nothing and gets finite numbers of no meaning. The arguments from
    `block_tables` on are those of `paged_attention` with the backend "triton". Raises ValueError if the shapes do not
    belong together.
    """
    return _op(
        qkv, q_norm, k_norm, eps, cos, sin, k_cache, v_cache, slots, block_tables, cu_seqlens_q, context_lens,
        num_heads, scale, window, metadata, max_context,
    )  # fmt: skip


def qk_norm_rope_attention_reference(
    qkv: Float[Tensor, "T QKV"],
    q_norm: Float[Tensor, " D"] | None,
    k_norm: Float[Tensor, " D"] | None,
    eps: float,
    cos: Float[Tensor, "T half_D"],
    sin: Float[Tensor, "T half_D"],
    k_cache: Float[Tensor, "P S K D"],
    v_cache: Float[Tensor, "P S K D"],
    slots: Int[Tensor, " T"],
    block_tables: Int[Tensor, "B M"],
    cu_seqlens_q: Int[Tensor, " B_plus_1"],
    context_lens: Int[Tensor, " B"],
    *,
    num_heads: int,
    scale: float,
    window: int = 0,
    metadata: Int[Tensor, " size"] | None = None,
    max_context: int = 0,
) -> Float[Tensor, "T N D"]:
    """Plain torch of `qk_norm_rope_attention`."""
    q = qk_norm_rope_store_reference(
        qkv, q_norm, k_norm, eps, cos, sin, k_cache, v_cache, slots, num_heads, k_cache.shape[2]
    )
    return paged_attention_reference(
        q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens, max_seqlen_q=1, scale=scale, window=window
    )


def qk_norm_rope_attention_triton(
    qkv, q_norm, k_norm, eps, cos, sin, k_cache, v_cache, slots, block_tables, cu_seqlens_q, context_lens,
    *, num_heads, scale, window=0, metadata=None, max_context=0, pdl=None,
) -> Tensor:  # fmt: skip
    """`qk_norm_rope_attention` by the Triton kernel; pdl: launch dependently (None: where the device can)."""
    q_norm, k_norm, slots = vectors(q_norm, k_norm, slots)
    new = NewHeads(q_norm, k_norm, eps, cos.contiguous(), sin.contiguous(), slots)
    return decode_attention_triton(
        qkv.unflatten(1, (-1, k_cache.shape[3])), k_cache, v_cache, block_tables, cu_seqlens_q, context_lens,
        scale=scale, window=window, metadata=metadata, max_context=max_context, new=new, pdl=pdl,
    )  # fmt: skip


def _check(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    num_heads: int,
) -> None:
    """Called inside the op, where it is not traced into a compiled step."""
    kv_heads, batch = k_cache.shape[2], context_lens.shape[0]
    check_heads("qk_norm_rope_attention", qkv, cos, sin, k_cache, v_cache, num_heads, kv_heads)
    if num_heads % kv_heads:
        raise ValueError(
            f"qk_norm_rope_attention: {num_heads} query heads over {kv_heads} KV heads; the first must be a multiple "
            "of the second: pad the groups with zero heads"
        )
    if block_tables.shape[0] != batch or cu_seqlens_q.shape[0] != batch + 1 or slots.shape[0] != qkv.shape[0]:
        raise ValueError(
            f"qk_norm_rope_attention: block_tables {tuple(block_tables.shape)}, cu_seqlens_q "
            f"{tuple(cu_seqlens_q.shape)}, context_lens {tuple(context_lens.shape)}, slots {tuple(slots.shape)} for "
            f"{qkv.shape[0]} tokens; they must be [B, M], [B + 1], [B] and [T]"
        )


@library.custom_op(
    "fnllm::qk_norm_rope_attention",
    mutates_args=("k_cache", "v_cache"),
    tags=ANY_STRIDES,
    schema="(Tensor qkv, Tensor? q_norm, Tensor? k_norm, float eps, Tensor cos, Tensor sin, Tensor(a!) k_cache, "
    "Tensor(b!) v_cache, Tensor slots, Tensor block_tables, Tensor cu_seqlens_q, Tensor context_lens, int num_heads, "
    "float scale, int window, Tensor? metadata, SymInt max_context) -> Tensor",
)
def _op(
    qkv, q_norm, k_norm, eps, cos, sin, k_cache, v_cache, slots, block_tables, cu_seqlens_q, context_lens,
    num_heads, scale, window, metadata, max_context,
):  # fmt: skip
    _check(qkv, cos, sin, k_cache, v_cache, slots, block_tables, cu_seqlens_q, context_lens, num_heads)
    fused = qkv.is_cuda and triton is not None
    run = qk_norm_rope_attention_triton if fused else qk_norm_rope_attention_reference
    return run(
        qkv, q_norm, k_norm, eps, cos, sin, k_cache, v_cache, slots, block_tables, cu_seqlens_q, context_lens,
        num_heads=num_heads, scale=scale, window=window, metadata=metadata, max_context=max_context,
    )  # fmt: skip


@_op.register_fake
def _fake(
    qkv, q_norm, k_norm, eps, cos, sin, k_cache, v_cache, slots, block_tables, cu_seqlens_q, context_lens,
    num_heads, scale, window, metadata, max_context,
):  # fmt: skip
    return qkv.new_empty(qkv.shape[0], num_heads, k_cache.shape[3])
