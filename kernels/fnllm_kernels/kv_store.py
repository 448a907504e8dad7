"""Writing keys and values into the paged cache, and copying whole cache blocks.

Axes: T packed tokens, K KV heads, D head dim, P cache blocks, S block size, C copies.
A slot is block * S + offset; -1 marks padding and is never used as an index.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .layouts import ANY_STRIDES, vectors

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


def store_kv(
    k: Float[Tensor, "T K D"],
    v: Float[Tensor, "T K D"],
    k_cache: Float[Tensor, "P S K D"],
    v_cache: Float[Tensor, "P S K D"],
    slots: Int[Tensor, " T"],
) -> None:
    """Write row t of k and v into slot slots[t] of the caches; rows with slot -1 are skipped.

    Raises ValueError if the shapes do not belong together.
    """
    if k.shape != v.shape or k.shape[1:] != k_cache.shape[2:] or k.shape[0] != slots.shape[0]:
        raise ValueError(
            f"store_kv: k {tuple(k.shape)}, v {tuple(v.shape)} and slots {tuple(slots.shape)} must be [T, K, D], "
            f"[T, K, D] and [T] with the K and D of the cache {tuple(k_cache.shape)}"
        )
    if k_cache.shape != v_cache.shape or k_cache.dtype != k.dtype:
        raise ValueError(
            f"store_kv: caches are {tuple(k_cache.shape)} {k_cache.dtype} and {tuple(v_cache.shape)} {v_cache.dtype}; "
            f"both must have one shape and the dtype of k, {k.dtype}"
        )
    if not k.is_cuda and not torch.compiler.is_compiling():
        # Nothing to trace: past the dispatch of an op, which costs as much as a small kernel.
        return store_kv_reference(k, v, k_cache, v_cache, slots)
    _store_kv_op(k, v, k_cache, v_cache, slots)


def store_kv_reference(
    k: Float[Tensor, "T K D"],
    v: Float[Tensor, "T K D"],
    k_cache: Float[Tensor, "P S K D"],
    v_cache: Float[Tensor, "P S K D"],
    slots: Int[Tensor, " T"],
) -> None:
    """Plain torch of `store_kv`; looks on the host whether there is padding."""
    if slots.shape[0] and int(slots.min()) < 0:
        keep = slots >= 0
        k, v, slots = k[keep], v[keep], slots[keep]
    for new, cache in ((k, k_cache), (v, v_cache)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots.long(), new)


def copy_blocks(
    k_cache: Float[Tensor, "P S K D"],
    v_cache: Float[Tensor, "P S K D"],
    src: Int[Tensor, " C"],
    dst: Int[Tensor, " C"],
) -> None:
    """Copy block src[c] onto block dst[c] in both caches; pairs with src -1 are skipped.

    No block may be both a source and a destination, or a destination twice: the copies run in any order.
    Raises ValueError if src and dst differ in length.
    """
    if src.shape != dst.shape:
        raise ValueError(f"copy_blocks: src is {tuple(src.shape)}, dst {tuple(dst.shape)}; give each src its dst")
    _copy_blocks_op(k_cache, v_cache, src, dst)


def copy_blocks_reference(
    k_cache: Float[Tensor, "P S K D"],
    v_cache: Float[Tensor, "P S K D"],
    src: Int[Tensor, " C"],
    dst: Int[Tensor, " C"],
) -> None:
    """Plain torch of `copy_blocks`."""
    keep = src >= 0
    src, dst = src[keep].long(), dst[keep].long()
    k_cache[dst] = k_cache[src]
    v_cache[dst] = v_cache[src]


@torch.library.custom_op(
    "fnllm::store_kv",
    mutates_args=("k_cache", "v_cache"),
    tags=ANY_STRIDES,
    schema="(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots) -> ()",
)
def _store_kv_op(k, v, k_cache, v_cache, slots):
    run = _store_kv_triton if k.is_cuda and triton is not None else store_kv_reference
    run(k, v, k_cache, v_cache, slots)


@_store_kv_op.register_fake
def _store_kv_fake(k, v, k_cache, v_cache, slots):
    return None


@torch.library.custom_op(
    "fnllm::copy_blocks",
    mutates_args=("k_cache", "v_cache"),
    schema="(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor src, Tensor dst) -> ()",
)
def _copy_blocks_op(k_cache, v_cache, src, dst):
    run = _copy_blocks_triton if k_cache.is_cuda and triton is not None else copy_blocks_reference
    run(k_cache, v_cache, src, dst)


@_copy_blocks_op.register_fake
def _copy_blocks_fake(k_cache, v_cache, src, dst):
    return None


def _rows_are_packed(x: Tensor) -> bool:
    return x.stride(-1) == 1 and x.stride(-2) == x.shape[-1]


def _store_kv_triton(k, v, k_cache, v_cache, slots):
    if not (_rows_are_packed(k_cache) and _rows_are_packed(v_cache) and k_cache.stride() == v_cache.stride()):
        raise ValueError(
            f"store_kv: caches of strides {k_cache.stride()} and {v_cache.stride()}; the [K, D] part of both must be "
            "contiguous and the strides equal: allocate each as one [P, S, K, D] tensor"
        )
    k, v = (x if _rows_are_packed(x) else x.contiguous() for x in (k, v))
    (slots,) = vectors(slots)
    width = k.shape[1] * k.shape[2]
    if k.shape[0] == 0:
        return
    block = min(triton.next_power_of_2(width), 2048)
    _store_kv_kernel[(k.shape[0], triton.cdiv(width, block))](
        k, v, k_cache, v_cache, slots, k_cache.shape[1], width,
        k.stride(0), v.stride(0), k_cache.stride(0), k_cache.stride(1),
        BLOCK=block, num_warps=max(1, min(8, block // 256)),
    )  # fmt: skip


def _copy_blocks_triton(k_cache, v_cache, src, dst):
    if not (k_cache[0].is_contiguous() and v_cache[0].is_contiguous()):
        raise ValueError(
            f"copy_blocks: caches of strides {k_cache.stride()} and {v_cache.stride()}; a block [S, K, D] must be "
            "contiguous: allocate each cache as one [P, S, K, D] tensor"
        )
    width, (src, dst) = k_cache[0].numel(), vectors(src, dst)
    block = min(triton.next_power_of_2(width), 4096)
    if src.shape[0] == 0:
        return
    _copy_blocks_kernel[(src.shape[0], triton.cdiv(width, block))](
        k_cache, v_cache, src, dst, width, k_cache.stride(0), v_cache.stride(0), BLOCK=block, num_warps=4
    )


if triton is not None:

    @triton.jit
    def _store_kv_kernel(
        k, v, k_cache, v_cache, slots, block_size, width, k_row, v_row, cache_block, cache_row, BLOCK: tl.constexpr
    ):
        token = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            inside = column < width
            # 64-bit offsets: a pool can hold more than 2^31 elements.
            at = (slot // block_size) * cache_block + (slot % block_size) * cache_row + column
            tl.store(k_cache + at, tl.load(k + token * k_row + column, mask=inside), mask=inside)
            tl.store(v_cache + at, tl.load(v + token * v_row + column, mask=inside), mask=inside)

    @triton.jit
    def _copy_blocks_kernel(k_cache, v_cache, src, dst, width, k_block, v_block, BLOCK: tl.constexpr):
        source = tl.load(src + tl.program_id(0)).to(tl.int64)
        if source >= 0:
            target = tl.load(dst + tl.program_id(0)).to(tl.int64)
            column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            inside = column < width
            keys = tl.load(k_cache + source * k_block + column, mask=inside)
            tl.store(k_cache + target * k_block + column, keys, mask=inside)
            values = tl.load(v_cache + source * v_block + column, mask=inside)
            tl.store(v_cache + target * v_block + column, values, mask=inside)
