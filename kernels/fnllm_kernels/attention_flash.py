"""FlashAttention 3 and 2 behind the paged attention op; both packages are imported only when a call needs them.

Axes: T packed tokens, B sequences, N query heads, K KV heads, D head dim, P cache blocks, S block size, M blocks per
sequence. The packages' own Python wrappers do not trace whole-graph under torch.compile; inside our op they need not.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .layouts import in_order
from .zero_tail import zero_tail


def paged_attention_fa3(
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
) -> Float[Tensor, "T N D"]:
    """`paged_attention` by FlashAttention 3 (sm_90, fp16 and bf16, head dims that are multiples of 8 up to 256)."""
    forward = _fa3().fwd
    _check_flash("fa3", q)
    decode = max_seqlen_q == 1 and q.shape[0] == context_lens.shape[0]
    left, right = (window - 1, 0) if window else (-1, -1)
    q, block_tables, context_lens = in_order(q), in_order(block_tables), context_lens.contiguous()
    out = torch.empty_like(q)
    # In decode each row is its own sequence and is always written, with zeros where the context is empty.
    forward(
        q[:, None] if decode else q,
        k_cache,
        v_cache,
        out=out[:, None] if decode else out,
        cu_seqlens_q=None if decode else cu_seqlens_q.contiguous(),
        seqused_k=context_lens,
        max_seqlen_q=None if decode else max_seqlen_q,
        page_table=block_tables,
        softmax_scale=scale,
        is_causal=True,
        window_size_left=left,
        window_size_right=right,
        scheduler_metadata=metadata,
        # Prompts fill the machine without being split; left to itself the package may split their keys by the width of
        # the page table, and combining the parts then costs more than the attention.
        num_splits=0 if decode else 1,
    )
    if not decode:
        zero_tail(out, cu_seqlens_q)
    return out


def fa3_metadata(
    context_lens: Int[Tensor, " B"],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    max_blocks: int,
    dtype: torch.dtype,
    window: int,
) -> Int[Tensor, " size"]:
    """How FlashAttention 3 divides a decode step's work; without it each layer runs one more kernel."""
    return _fa3_metadata_op(context_lens, num_heads, num_kv_heads, head_dim, block_size, max_blocks, dtype, window)


def _metadata_size(batch: int, head_dim: int, max_keys: int, window: int) -> int:
    """Entries of FA3's metadata: a counter, and up to four vectors of B rounded up to 4.

    Two vectors are always there; full attention sorts the sequences by a third, causal and local attention order the
    heads by a fourth. One query per sequence counts as causal at head dims 65 to 128 only. Source:
    `mha_fwd_get_scheduler_metadata` in the package's flash_api.cpp.
    """
    local = 0 < window < max_keys
    orders_heads = local or 64 < head_dim <= 128
    return 1 + (batch + 3) // 4 * 4 * (2 + (not local) + orders_heads)


@torch.library.custom_op(
    "fnllm::fa3_metadata",
    mutates_args=(),
    schema="(Tensor context_lens, int num_heads, int num_kv_heads, int head_dim, int block_size, int max_blocks, "
    "ScalarType dtype, int window) -> Tensor",
)
def _fa3_metadata_op(context_lens, num_heads, num_kv_heads, head_dim, block_size, max_blocks, dtype, window):
    left, right = (window - 1, 0) if window else (-1, -1)
    batch, max_keys = context_lens.shape[0], max_blocks * block_size
    made = _fa3().get_scheduler_metadata(
        batch, 1, max_keys, num_heads, num_kv_heads, head_dim, head_dim, dtype, context_lens.contiguous(),
        None, page_size=block_size, is_causal=True, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    expected = _metadata_size(batch, head_dim, max_keys, window)
    if made.numel() != expected:
        raise RuntimeError(
            f"fa3: this build's scheduler metadata has {made.numel()} entries for a batch of {batch}, expected "
            f"{expected}; pass metadata=None, or install the tokenspeed-fa3 release the project names"
        )
    return made


@_fa3_metadata_op.register_fake
def _fa3_metadata_fake(context_lens, num_heads, num_kv_heads, head_dim, block_size, max_blocks, dtype, window):
    size = _metadata_size(context_lens.shape[0], head_dim, max_blocks * block_size, window)
    return context_lens.new_empty(size, dtype=torch.int32)


def paged_attention_fa2(
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
) -> Float[Tensor, "T N D"]:
    """`paged_attention` by FlashAttention 2 (sm_80 and later, fp16 and bf16, pages of a multiple of 256)."""
    try:
        import flash_attn
    except ImportError as error:
        raise ImportError("fa2: the package flash_attn is not installed; use backend='triton'") from error
    _check_flash("fa2", q)
    if k_cache.shape[1] % 256:
        raise ValueError(
            f"fa2: block size is {k_cache.shape[1]}; FlashAttention 2 takes pages of a multiple of 256 keys: "
            "use such blocks or backend='triton'"
        )
    sides = (window - 1, 0) if window else (-1, -1)
    q, block_tables = in_order(q), in_order(block_tables)
    if max_seqlen_q == 1 and q.shape[0] == context_lens.shape[0]:
        return flash_attn.flash_attn_with_kvcache(
            q[:, None], k_cache, v_cache, cache_seqlens=context_lens, block_table=block_tables, softmax_scale=scale,
            causal=True, window_size=sides,
        )[:, 0]  # fmt: skip
    ends = torch.nn.functional.pad(context_lens.cumsum(0, dtype=torch.int32), (1, 0))
    out = flash_attn.flash_attn_varlen_func(
        q, k_cache, v_cache, cu_seqlens_q, ends, max_seqlen_q, max_context or block_tables.shape[1] * k_cache.shape[1],
        softmax_scale=scale, causal=True, window_size=sides, block_table=block_tables,
    )  # fmt: skip
    zero_tail(out, cu_seqlens_q)
    return out


def _fa3():
    try:
        import flash_attn_interface  # noqa: F401  importing it registers torch.ops.flash_attn_3
    except ImportError as error:
        raise ImportError(
            "fa3: the module flash_attn_interface is not installed (package tokenspeed-fa3); use backend='triton'"
        ) from error
    return torch.ops.flash_attn_3


def _check_flash(name: str, q: Tensor) -> None:
    if q.dtype not in (torch.bfloat16, torch.float16) or q.shape[2] % 8 or q.shape[2] > 256:
        raise ValueError(
            f"{name}: q is {q.dtype} with head_dim {q.shape[2]}; FlashAttention takes float16 or bfloat16 and head "
            "dims that are multiples of 8 up to 256: use backend='triton'"
        )
