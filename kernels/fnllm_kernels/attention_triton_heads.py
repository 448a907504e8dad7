"""A decode step's new heads, made inside the attention kernel: norm, rotation, and the step from G rows to a tile.

Needs triton.
"""

import triton
import triton.language as tl


@triton.jit
def load_norm(norm, d, D: tl.constexpr):
    """A head's norm weights and those of each element's partner in the rotation; without a norm nothing of use."""
    if norm is None:
        pair = (d, d)
    else:
        weight = tl.load(norm + d, mask=d < D, other=0.0).to(tl.float32)
        pair = (weight, tl.load(norm + (d + D // 2) % D, mask=d < D, other=0.0).to(tl.float32))
    return pair


@triton.jit
def load_pairs(head, d, inside, D: tl.constexpr):
    """Heads [R, D] and each element's partner in the rotation, D / 2 away, which is read again: no thread asks another.

    Read past L1: the kernel before wrote them a moment ago.
    """
    x = tl.load(head + d, mask=inside, other=0.0, cache_modifier=".cg")
    return x, tl.load(head + (d + D // 2) % D, mask=inside, other=0.0, cache_modifier=".cg")


@triton.jit
def load_turn(cos, sin, d, D: tl.constexpr):
    """A token's rotation for each element of a head: what multiplies it, and what multiplies its partner."""
    c = tl.load(cos + d % (D // 2), mask=d < D, other=0.0).to(tl.float32)
    s = tl.load(sin + d % (D // 2), mask=d < D, other=0.0).to(tl.float32)
    return c, tl.where(d < D // 2, -s, s)


@triton.jit
def turned_heads(pairs, norm, weights, eps, turn, D: tl.constexpr):
    """Heads [R, D] after RMSNorm (if there is a norm) and rotation, rounded as `qk_norm_rope_store` rounds them."""
    dtype: tl.constexpr = pairs[0].dtype
    x, partner = pairs[0].to(tl.float32), pairs[1].to(tl.float32)
    if norm is not None:
        rms = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = ((x * rms).to(dtype).to(tl.float32) * weights[0]).to(dtype).to(tl.float32)
        partner = ((partner * rms).to(dtype).to(tl.float32) * weights[1]).to(dtype).to(tl.float32)
    return (x * turn[0] + partner * turn[1]).to(dtype)


@triton.jit
def repeated(x, R: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr):
    """The rows of x [R, W] over and over, as a tile [ROWS, W] that the tensor cores take."""
    if R == ROWS:
        tile = x
    else:
        tile = tl.reshape(tl.broadcast_to(x[None, :, :], (ROWS // R, R, W)), (ROWS, W))
    return tile
