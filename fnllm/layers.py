"""The layer functions: each is `(p, x, ctx) -> y`, pure, and replaceable through the `Layers` record.

Axes: T packed tokens, B sequences, H hidden, N query heads, K KV heads, D head dim, I MLP width, V vocabulary rows.
Sizes are this rank's. Parameters are plain dicts of tensors; `ctx` is the explicit rest (see context.py).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from fnllm_kernels.attention import paged_attention
from fnllm_kernels.kv_store import store_kv
from jaxtyping import Float, Int
from torch import Tensor

from fnllm.context import Context
from fnllm.packed_attention import packed_attention
from fnllm.rope import apply_rope


def embed(p: Float[Tensor, "V H"], token_ids: Int[Tensor, " T"], ctx: Context) -> Float[Tensor, "T H"]:
    """Vocabulary-parallel look-up: each rank contributes the rows it owns, and the sum is the embedding."""
    local = token_ids - ctx.sizes.vocab_start
    mine = (local >= 0) & (local < p.shape[0])
    x = F.embedding(torch.where(mine, local, 0), p)
    return ctx.tp.all_reduce(torch.where(mine[:, None], x, 0))


def norm(p: Float[Tensor, " H"], x: Float[Tensor, "... H"], ctx: Context) -> Float[Tensor, "... H"]:
    """RMSNorm over the last axis, computed in float32 (Zhang and Sennrich 2019)."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + ctx.config.rms_norm_eps)
    return p * (wide * scale).to(x.dtype)


def linear(p: Float[Tensor, "O I"], x: Float[Tensor, "T I"], ctx: Context) -> Float[Tensor, "T O"]:
    """The product of activations with a weight; every projection of the model, and the head, goes through it."""
    return F.linear(x, p)


def attention(p: dict, x: Float[Tensor, "T H"], ctx: Context) -> Float[Tensor, "T H"]:
    """Self-attention over this rank's heads: QKV, optional QK-norm, rope, attend, output projection, all-reduce."""
    heads, kv_heads, dim = ctx.sizes.heads, ctx.sizes.kv_heads, ctx.config.head_dim
    qkv = ctx.layers.linear(p["qkv"], x, ctx)
    if "qkv_bias" in p:
        qkv = qkv + p["qkv_bias"]
    q, k, v = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
    q, k, v = (rearrange(t, "T (N D) -> T N D", D=dim) for t in (q, k, v))
    if "q_norm" in p:
        q, k = ctx.layers.norm(p["q_norm"], q, ctx), ctx.layers.norm(p["k_norm"], k, ctx)
    q, k = apply_rope(q, ctx.batch.cos, ctx.batch.sin), apply_rope(k, ctx.batch.cos, ctx.batch.sin)
    q, k, v = ctx.tap("q", q), ctx.tap("k", k), ctx.tap("v", v)
    out = ctx.layers.attend(q, k, v, ctx)
    y = ctx.tp.all_reduce(ctx.layers.linear(p["o"], rearrange(out, "T N D -> T (N D)"), ctx))
    return y + p["o_bias"] if "o_bias" in p else y


def attend(
    q: Float[Tensor, "T N D"], k: Float[Tensor, "T K D"], v: Float[Tensor, "T K D"], ctx: Context
) -> Float[Tensor, "T N D"]:
    """Store the new keys and values, then causal attention over the paged cache; without a cache, over the batch."""
    scale = ctx.config.head_dim**-0.5
    window = ctx.config.sliding_window[ctx.layer] or 0
    batch = ctx.batch
    if ctx.cache is None:
        return packed_attention(q, k, v, batch.cu_seqlens, batch.max_seqlen, scale=scale, window=window)
    assert batch.slots is not None and batch.block_tables is not None
    k_cache, v_cache = ctx.cache.k[ctx.layer], ctx.cache.v[ctx.layer]
    store_kv(k, v, k_cache, v_cache, batch.slots)
    return paged_attention(
        q,
        k_cache,
        v_cache,
        batch.block_tables,
        batch.cu_seqlens,
        batch.context_lens,
        max_seqlen_q=batch.max_seqlen,
        scale=scale,
        window=window,
        backend=ctx.backend,
        metadata=None if ctx.metadata is None else ctx.metadata.get(window),
    )


def mlp(p: dict, x: Float[Tensor, "T H"], ctx: Context) -> Float[Tensor, "T H"]:
    """SwiGLU feed-forward (Shazeer 2020), gate and up in one product, one all-reduce."""
    gate_up = ctx.layers.linear(p["gate_up"], x, ctx)
    if "gate_up_bias" in p:
        gate_up = gate_up + p["gate_up_bias"]
    y = ctx.tp.all_reduce(ctx.layers.linear(p["down"], ctx.layers.activation(gate_up, ctx), ctx))
    return y + p["down_bias"] if "down_bias" in p else y


def activation(gate_up: Float[Tensor, "... two_I"], ctx: Context) -> Float[Tensor, "... I"]:
    """SiLU of the gate half times the up half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def moe(p: dict, x: Float[Tensor, "T H"], ctx: Context) -> Float[Tensor, "T H"]:
    """Mixture of experts as Qwen3-MoE defines it: the top experts' outputs, weighted by the router's softmax.

    Every expert runs on every token and unchosen ones get weight zero: exact and traceable, at E / k times the needed
    arithmetic. Each expert's width is split over the ranks.
    """
    chosen = ctx.config.num_experts_per_tok
    probs = F.softmax(ctx.layers.linear(p["router"], x, ctx).float(), dim=-1)
    top, index = probs.topk(chosen, dim=-1)
    if ctx.config.norm_topk_prob:
        top = top / top.sum(-1, keepdim=True)
    weight = torch.zeros_like(probs).scatter(1, index, top).to(x.dtype)
    y = torch.zeros_like(x)
    for expert in range(ctx.config.num_experts):
        h = ctx.layers.activation(ctx.layers.linear(p["experts_gate_up"][expert], x, ctx), ctx)
        y = y + weight[:, expert, None] * ctx.layers.linear(p["experts_down"][expert], h, ctx)
    return ctx.tp.all_reduce(y)


def lm_head(p: Float[Tensor, "V H"], x: Float[Tensor, "B H"], ctx: Context) -> Float[Tensor, "B V"]:
    """This rank's logits, for the rows that need them only."""
    return ctx.tap("logits", ctx.layers.linear(p, x, ctx))


class Layers(NamedTuple):
    """The functions a step is made of; swap one with `Layers()._replace(mlp=mine)`."""

    embed: Callable[..., Tensor] = embed
    norm: Callable[..., Tensor] = norm
    linear: Callable[..., Tensor] = linear
    attention: Callable[..., Tensor] = attention
    attend: Callable[..., Tensor] = attend
    mlp: Callable[..., Tensor] = mlp
    moe: Callable[..., Tensor] = moe
    activation: Callable[..., Tensor] = activation
    lm_head: Callable[..., Tensor] = lm_head
