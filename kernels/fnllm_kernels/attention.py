"""The attention op over the paged cache: decode, chunked prefill and prefill after a cached prefix are one call.

Axes: T packed tokens, B sequences, N query heads, K KV heads, D head dim, P cache blocks, S block size, M blocks per
sequence. What runs is the caller's static choice (`backend`); `default_backend` says what suits a device.
"""

import functools
import importlib.util
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from . import attention_flash, attention_triton
from .attention_invariant import paged_attention_invariant
from .attention_reference import ReferencePlan, paged_attention_reference, plan_reference
from .layouts import ANY_STRIDES

BACKENDS = ("reference", "triton", "triton_invariant", "fa3", "fa2")


def paged_attention(
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
    backend: str,
    metadata: Tensor | ReferencePlan | None = None,
    max_context: int = 0,
) -> Float[Tensor, "T N D"]:
    """Causal attention of each sequence's newest tokens over its cached keys and values.

    Sequence b's queries are q[cu_seqlens_q[b]:cu_seqlens_q[b + 1]], the last of its context_lens[b] keys, which are
    already stored. Query head n reads KV head n // (N / K). A window of w lets a query see itself and the w - 1 keys
    before it; 0 means all. Rows of q past cu_seqlens_q[-1] give zeros; so does a sequence with context length 0.
    Table entries past a sequence's length may be anything. `max_seqlen_q` bounds the queries of a sequence;
    `max_context` (0: as many as the table holds) is a hint of the longest context to expect, which tunes how the work
    is divided. `metadata` is what `attention_metadata` gave for the same arguments, the hint among them: a plan made
    with another one may be of another form, and is not recognised.
    With max_seqlen_q 1 and T = B, row b belongs to sequence b, and sequences without a query come last.

    Raises ValueError if shapes do not belong together or the backend is unknown.
    """
    if not q.is_cuda and not torch.compiler.is_compiling():
        _check(q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens, backend)
        # Nothing to trace: past the dispatch of an op, which costs as much as a small kernel.
        return _on_host(backend)(
            q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens,
            max_seqlen_q=max_seqlen_q, scale=scale, window=window, metadata=metadata, max_context=max_context,
        )  # fmt: skip
    return _paged_attention_op(
        q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens,
        max_seqlen_q, scale, window, backend, metadata, max_context,
    )  # fmt: skip


def attention_metadata(
    context_lens: Int[Tensor, " B"],
    cu_seqlens_q: Int[Tensor, " B_plus_1"],
    *,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    max_blocks: int,
    max_seqlen_q: int,
    dtype: torch.dtype,
    backend: str,
    window: int = 0,
    max_context: int = 0,
    block_tables: Int[Tensor, "B M"] | None = None,
) -> Tensor | ReferencePlan | None:
    """What a backend wants computed once per step and passed to every layer with this window; None if nothing.

    `num_tokens` is T of the q to come (padding included), `max_blocks` the width M of its block tables. On a CPU the
    plan needs the `block_tables` themselves, and lengths on the host: there is none while a step is being compiled.
    """
    if not context_lens.is_cuda and block_tables is not None and not torch.compiler.is_compiling():
        if _on_host(backend) is paged_attention_invariant:
            return None
        return plan_reference(
            block_tables, cu_seqlens_q, context_lens,
            num_tokens=num_tokens, block_size=block_size, window=window, dtype=dtype,
        )  # fmt: skip
    decode = max_seqlen_q == 1 and num_tokens == context_lens.shape[0]
    if backend == "fa3" and context_lens.is_cuda and decode:
        return attention_flash.fa3_metadata(
            context_lens, num_heads, num_kv_heads, head_dim, block_size, max_blocks, dtype, window
        )
    if backend == "triton" and max_seqlen_q == 1 and context_lens.is_cuda:
        longest = max_context or max_blocks * block_size
        return attention_triton.triton_metadata(
            context_lens, cu_seqlens_q, num_kv_heads, head_dim, dtype, window, longest
        )
    return None


def default_backend(device: torch.device | str, dtype: torch.dtype, head_dim: int, block_size: int = 0) -> str:
    """The backend for a device: fa3 on Hopper, else fa2 where its pages fit, else triton; reference on a CPU.

    fa2 is chosen only if `block_size` is given and is a multiple of 256, the only pages it takes.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return "reference"
    capability = torch.cuda.get_device_capability(device)
    flash_fits = dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= 256
    if flash_fits and capability[0] == 9 and importlib.util.find_spec("flash_attn_interface"):
        return "fa3"
    pages_fit = block_size > 0 and block_size % 256 == 0
    if flash_fits and pages_fit and capability[0] >= 8 and importlib.util.find_spec("flash_attn"):
        return "fa2"
    return "triton" if importlib.util.find_spec("triton") else "reference"


def _on_host(backend: str) -> Callable[..., Tensor]:
    return paged_attention_invariant if backend == "triton_invariant" else paged_attention_reference


def _check(q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens, backend) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"paged_attention: backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    if q.dim() != 3 or k_cache.dim() != 4 or k_cache.shape != v_cache.shape or q.shape[2] != k_cache.shape[3]:
        raise ValueError(
            f"paged_attention: q is {tuple(q.shape)}, the caches {tuple(k_cache.shape)} and {tuple(v_cache.shape)}; "
            "they must be [T, N, D] and twice [P, S, K, D]"
        )
    if q.shape[1] % k_cache.shape[2]:
        raise ValueError(
            f"paged_attention: {q.shape[1]} query heads over {k_cache.shape[2]} KV heads; the first must be a multiple "
            "of the second: pad the groups with zero heads"
        )
    if q.dtype != k_cache.dtype or q.dtype != v_cache.dtype:
        raise ValueError(
            f"paged_attention: q is {q.dtype}, the caches {k_cache.dtype} and {v_cache.dtype}; all must have one dtype"
        )
    if block_tables.shape[0] != context_lens.shape[0] or cu_seqlens_q.shape[0] != context_lens.shape[0] + 1:
        raise ValueError(
            f"paged_attention: block_tables {tuple(block_tables.shape)}, cu_seqlens_q {tuple(cu_seqlens_q.shape)}, "
            f"context_lens {tuple(context_lens.shape)}; they must be [B, M], [B + 1] and [B]"
        )


@torch.library.custom_op(
    "fnllm::paged_attention",
    mutates_args=(),
    tags=ANY_STRIDES,
    schema="(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor cu_seqlens_q, Tensor context_lens, "
    "SymInt max_seqlen_q, float scale, int window, str backend, Tensor? metadata, SymInt max_context) -> Tensor",
)
def _paged_attention_op(
    q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens,
    max_seqlen_q, scale, window, backend, metadata, max_context,
):  # fmt: skip
    # Here, where it is not traced into a compiled step.
    _check(q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens, backend)
    run = (
        {
            "reference": paged_attention_reference,
            "triton": attention_triton.paged_attention_triton,
            "triton_invariant": functools.partial(attention_triton.paged_attention_triton, invariant=True),
            "fa3": attention_flash.paged_attention_fa3,
            "fa2": attention_flash.paged_attention_fa2,
        }[backend]
        if q.is_cuda
        else _on_host(backend)
    )
    return run(
        q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens,
        max_seqlen_q=max_seqlen_q, scale=scale, window=window, metadata=metadata, max_context=max_context,
    )  # fmt: skip


@_paged_attention_op.register_fake
def _paged_attention_fake(
    q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens,
    max_seqlen_q, scale, window, backend, metadata, max_context,
):  # fmt: skip
    return q.new_empty(q.shape)
