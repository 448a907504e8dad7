"""A decode step's new heads, made inside the attention kernel: norm, rotation, and the step from G rows to a tile.

Needs triton.
"""

import triton
import triton.language as tl


@triton.jit
def norm_weights(norm, d, D: tl.constexpr):
    """A head's norm weights and those of each element's partner in the rotation; without a norm nothing of use."""
    if norm is None:
        pair = (d, d)
    else:
        weight = tl.load(norm + d, mask=d < D, other=0.0).to(tl.float32)
        pair = (weight, tl.load(norm + (d + D // 2) % D, mask=d < D, other=0.0).to(tl.float32))
    return pair


@triton.jit
def turned_heads(head, norm, weights, eps, cos, sin, d, inside, D: tl.constexpr):
    """Heads [R, D] after RMSNorm (if there is a norm) and rotation, rounded as `qk_norm_rope_store` rounds them.

    Element d turns with element d + D / 2: each is read twice, and no thread asks another. `sin` has the sign of its
    half. Read past L1: the kernel before wrote them a moment ago.
    """
    dtype: tl.constexpr = head.dtype.element_ty
    x = tl.load(head + d, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    partner = tl.load(head + (d + D // 2) % D, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    if norm is not None:
        rms = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = ((x * rms).to(dtype).to(tl.float32) * weights[0]).to(dtype).to(tl.float32)
        partner = ((partner * rms).to(dtype).to(tl.float32) * weights[1]).to(dtype).to(tl.float32)
    return (x * cos + partner * sin).to(dtype)


@triton.jit
def repeated(x, R: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr):
    """The rows of x [R, W] over and over, as a tile [ROWS, W] that the tensor cores take."""
    if R == ROWS:
        tile = x
    else:
        tile = tl.reshape(tl.broadcast_to(x[None, :, :], (ROWS // R, R, W)), (ROWS, W))
    return tile
