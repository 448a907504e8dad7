"""From the fused qkv projection to attention's inputs in one pass: per-head norm, rotary embedding, cache store.

Axes: T packed tokens, N query heads, K KV heads, D head dim (even), P cache blocks, S block size.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .dependent_launch import launch_options
from .kv_store import store_kv_reference
from .layouts import ANY_STRIDES, vectors
from .norm import rms_norm_reference

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


def qk_norm_rope_store(
    qkv: Float[Tensor, "T QKV"],
    q_norm: Float[Tensor, " D"] | None,
    k_norm: Float[Tensor, " D"] | None,
    eps: float,
    cos: Float[Tensor, "T half_D"],
    sin: Float[Tensor, "T half_D"],
    k_cache: Float[Tensor, "P S K D"],
    v_cache: Float[Tensor, "P S K D"],
    slots: Int[Tensor, " T"],
    num_heads: int,
    num_kv_heads: int,
) -> Float[Tensor, "T N D"]:
    """Norm the q and k heads (where a weight is given), rotate them, store k and v at `slots`; return q.

    A row of qkv holds N query heads, then K key heads, then K value heads. The norm is `rms_norm` over D; the rotation
    is of half pairs, (x1 cos - x2 sin, x2 cos + x1 sin), in float32, cast back. A row with slot -1 stores nothing, its
    q is still returned.
    Raises ValueError if the shapes do not belong together.
    """
    return _op(qkv, q_norm, k_norm, eps, cos, sin, k_cache, v_cache, slots, num_heads, num_kv_heads)


def check_heads(
    name: str, qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, num_heads: int, kv_heads: int
) -> None:
    """Raises ValueError, in the name of a function, unless a qkv projection fits the caches and the rotation."""
    head_dim = k_cache.shape[3]
    if head_dim % 2:
        raise ValueError(f"{name}: head_dim is {head_dim}; it must be even, for rotation pairs its halves")
    if qkv.shape[1] != (num_heads + 2 * kv_heads) * head_dim or k_cache.shape[2] != kv_heads:
        raise ValueError(
            f"{name}: qkv is {tuple(qkv.shape)} and the cache {tuple(k_cache.shape)}; with {num_heads} "
            f"heads and {kv_heads} KV heads of {head_dim} they must be "
            f"[T, {(num_heads + 2 * kv_heads) * head_dim}] and [P, S, {kv_heads}, {head_dim}]"
        )
    if k_cache.shape != v_cache.shape or k_cache.dtype != qkv.dtype or v_cache.dtype != qkv.dtype:
        raise ValueError(
            f"{name}: caches are {tuple(k_cache.shape)} {k_cache.dtype} and {tuple(v_cache.shape)} "
            f"{v_cache.dtype}; both must have one shape and the dtype of qkv, {qkv.dtype}"
        )
    if cos.shape != sin.shape or cos.shape[0] != qkv.shape[0] or cos.shape[1] != head_dim // 2:
        raise ValueError(
            f"{name}: cos is {tuple(cos.shape)}, sin {tuple(sin.shape)}; both must be [T, D / 2] with D "
            f"{head_dim}: make them with one row a token of qkv {tuple(qkv.shape)}"
        )


def qk_norm_rope_store_reference(
    qkv: Float[Tensor, "T QKV"],
    q_norm: Float[Tensor, " D"] | None,
    k_norm: Float[Tensor, " D"] | None,
    eps: float,
    cos: Float[Tensor, "T half_D"],
    sin: Float[Tensor, "T half_D"],
    k_cache: Float[Tensor, "P S K D"],
    v_cache: Float[Tensor, "P S K D"],
    slots: Int[Tensor, " T"],
    num_heads: int,
    num_kv_heads: int,
) -> Float[Tensor, "T N D"]:
    """Plain torch of `qk_norm_rope_store`."""
    heads = qkv.unflatten(1, (-1, k_cache.shape[3]))
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), 1)
    q = q if q_norm is None else rms_norm_reference(q, q_norm, eps)
    k = k if k_norm is None else rms_norm_reference(k, k_norm, eps)
    store_kv_reference(_rotate(k, cos, sin), v, k_cache, v_cache, slots)
    return _rotate(q, cos, sin)


def _rotate(x: Float[Tensor, "T N D"], cos: Float[Tensor, "T half_D"], sin: Float[Tensor, "T half_D"]) -> Tensor:
    low, high = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(x.dtype)


@torch.library.custom_op(
    "fnllm::qk_norm_rope_store",
    mutates_args=("k_cache", "v_cache"),
    tags=ANY_STRIDES,
    schema="(Tensor qkv, Tensor? q_norm, Tensor? k_norm, float eps, Tensor cos, Tensor sin, Tensor(a!) k_cache, "
    "Tensor(b!) v_cache, Tensor slots, int num_heads, int num_kv_heads) -> Tensor",
)
def _op(qkv, q_norm, k_norm, eps, cos, sin, k_cache, v_cache, slots, num_heads, num_kv_heads):
    # Here, where it is not traced into a compiled step.
    check_heads("qk_norm_rope_store", qkv, cos, sin, k_cache, v_cache, num_heads, num_kv_heads)
    run = _launch if qkv.is_cuda and triton is not None else qk_norm_rope_store_reference
    return run(qkv, q_norm, k_norm, eps, cos, sin, k_cache, v_cache, slots, num_heads, num_kv_heads)


@_op.register_fake
def _fake(qkv, q_norm, k_norm, eps, cos, sin, k_cache, v_cache, slots, num_heads, num_kv_heads):
    return qkv.new_empty(qkv.shape[0], num_heads, k_cache.shape[3])


def _launch(qkv, q_norm, k_norm, eps, cos, sin, k_cache, v_cache, slots, num_heads, num_kv_heads, *, pdl=None):
    tokens, head_dim = qkv.shape[0], k_cache.shape[3]
    if k_cache.stride()[2:] != (head_dim, 1) or k_cache.stride() != v_cache.stride():
        raise ValueError(
            f"qk_norm_rope_store: caches of strides {k_cache.stride()} and {v_cache.stride()}; the [K, D] part of both "
            "must be contiguous and the strides equal: allocate each as one [P, S, K, D] tensor"
        )
    qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
    cos, sin, (q_norm, k_norm, slots) = cos.contiguous(), sin.contiguous(), vectors(q_norm, k_norm, slots)
    q = qkv.new_empty(tokens, num_heads, head_dim)
    half = triton.next_power_of_2(head_dim // 2)
    total = num_heads + 2 * num_kv_heads
    # About 2048 elements a program and 32 a thread, whose loads are under way together: 56 us in place of 73 with 8 a
    # thread (8192 tokens of 48 heads). Not fewer for few tokens: a token's bits are its own.
    heads = max(1, min(triton.next_power_of_2(total), 2048 // (2 * half)))
    if tokens:
        _kernel[(tokens, triton.cdiv(total, heads))](
            qkv, q_norm, k_norm, cos, sin, q, k_cache, v_cache, slots, eps,
            qkv.stride(0), k_cache.shape[1], k_cache.stride(0), k_cache.stride(1),
            N=num_heads, K=num_kv_heads, HALF_D=head_dim // 2, BLOCK_H=heads, BLOCK_HALF=half,
            num_warps=max(1, heads * half // 512), **launch_options(qkv.device, pdl),
        )  # fmt: skip
    return q


if triton is not None:

    @triton.jit
    def _kernel(
        qkv, q_norm, k_norm, cos, sin, q, k_cache, v_cache, slots, eps,
        qkv_row, block_size, cache_block, cache_row,
        N: tl.constexpr, K: tl.constexpr, HALF_D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr,
        PDL: tl.constexpr,
    ):  # fmt: skip
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        token = tl.program_id(0).to(tl.int64)
        head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        pair = tl.arange(0, BLOCK_HALF)[None, :]
        wanted = pair < HALF_D
        inside = wanted & (head < N + 2 * K)
        row = qkv + token * qkv_row + head * (2 * HALF_D) + pair
        low_in = tl.load(row, mask=inside, other=0.0, cache_modifier=".cg")
        high_in = tl.load(row + HALF_D, mask=inside, other=0.0, cache_modifier=".cg")
        slot = tl.load(slots + token).to(tl.int64)
        c = tl.load(cos + token * HALF_D + pair, mask=wanted, other=0.0).to(tl.float32)
        s = tl.load(sin + token * HALF_D + pair, mask=wanted, other=0.0).to(tl.float32)
        low, high = low_in.to(tl.float32), high_in.to(tl.float32)
        is_query = head < N
        is_key = (head >= N) & (head < N + K)
        if (q_norm is not None) or (k_norm is not None):
            rms = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF_D) + eps)[:, None]
            dtype: tl.constexpr = qkv.dtype.element_ty
            low_n, high_n = (low * rms).to(dtype).to(tl.float32), (high * rms).to(dtype).to(tl.float32)
            # Each product is rounded to the dtype, as in the reference.
            if q_norm is not None:
                w_low = tl.load(q_norm + pair, mask=wanted, other=0.0).to(tl.float32)
                w_high = tl.load(q_norm + HALF_D + pair, mask=wanted, other=0.0).to(tl.float32)
                low = tl.where(is_query, (low_n * w_low).to(dtype).to(tl.float32), low)
                high = tl.where(is_query, (high_n * w_high).to(dtype).to(tl.float32), high)
            if k_norm is not None:
                w_low = tl.load(k_norm + pair, mask=wanted, other=0.0).to(tl.float32)
                w_high = tl.load(k_norm + HALF_D + pair, mask=wanted, other=0.0).to(tl.float32)
                low = tl.where(is_key, (low_n * w_low).to(dtype).to(tl.float32), low)
                high = tl.where(is_key, (high_n * w_high).to(dtype).to(tl.float32), high)
        low_out = (low * c - high * s).to(qkv.dtype.element_ty)
        high_out = (high * c + low * s).to(qkv.dtype.element_ty)
        to_q = q + (token * N + head) * (2 * HALF_D) + pair
        tl.store(to_q, low_out, mask=inside & is_query)
        tl.store(to_q + HALF_D, high_out, mask=inside & is_query)
        if slot >= 0:
            # 64-bit offsets: a pool can hold more than 2^31 elements.
            at = (slot // block_size) * cache_block + (slot % block_size) * cache_row
            to_k = k_cache + at + (head - N) * (2 * HALF_D) + pair
            tl.store(to_k, low_out, mask=inside & is_key)
            tl.store(to_k + HALF_D, high_out, mask=inside & is_key)
            is_value = inside & (head >= N + K)
            to_v = v_cache + at + (head - N - K) * (2 * HALF_D) + pair
            tl.store(to_v, low_in, mask=is_value)
            tl.store(to_v + HALF_D, high_in, mask=is_value)
