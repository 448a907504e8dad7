"""The layer functions: each is `(p, x, ctx) -> y`, pure, and replaceable through the `Layers` record.

Axes: T packed tokens, B sequences, H hidden, N query heads, K KV heads, D head dim, I MLP width, V vocabulary rows.
Sizes are this rank's. `p` is one tensor or a dict of tensors; `ctx` is everything else to read (see context.py).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from fnllm.context import Context
from fnllm.edits import check_function
from fnllm.packed_attention import packed_attention
from fnllm.rope import apply_rope
from fnllm.sampler import Sampled, sample
from fnllm_kernels.attention import paged_attention
from fnllm_kernels.grouped_linear import grouped_linear
from fnllm_kernels.host_linear import host_linear
from fnllm_kernels.kv_store import store_kv
from fnllm_kernels.norm import add_rms_norm, rms_norm
from fnllm_kernels.qk_norm_rope_attention import qk_norm_rope_attention
from fnllm_kernels.qk_norm_rope_store import qk_norm_rope_store
from fnllm_kernels.silu_mul import silu_mul
from fnllm_kernels.small_linear import small_linear
from fnllm_weights import ModelConfig


def embed(p: Float[Tensor, "V H"], token_ids: Int[Tensor, " T"], ctx: Context) -> Float[Tensor, "T H"]:
    """Vocabulary-parallel look-up: each rank looks up the rows it owns, and the sum over ranks is the embedding."""
    local = token_ids - ctx.sizes.vocab_start
    mine = (local >= 0) & (local < p.shape[0])
    x = F.embedding(torch.where(mine, local, 0), p)
    return ctx.tp.all_reduce(torch.where(mine[:, None], x, 0))


def norm(p: Float[Tensor, " H"], x: Float[Tensor, "... H"], ctx: Context) -> Float[Tensor, "... H"]:
    """RMSNorm over the last axis, computed in float32 (Zhang and Sennrich 2019)."""
    if on_device(x, ctx):
        return rms_norm(x.reshape(-1, x.shape[-1]), p, ctx.config.rms_norm_eps).view(x.shape)
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + ctx.config.rms_norm_eps)
    return p * (wide * scale).to(x.dtype)


def add_norm(
    p: Float[Tensor, " H"], x: Float[Tensor, "T H"], residual: Float[Tensor, "T H"] | None, ctx: Context
) -> tuple[Float[Tensor, "T H"], Float[Tensor, "T H"]]:
    """Add a sublayer's output to the residual stream and norm the sum: (normed, stream)."""
    if residual is None:
        return ctx.layers.norm(p, x, ctx), x
    if on_device(x, ctx) and ctx.layers.norm is norm:
        return add_rms_norm(x, residual, p, ctx.config.rms_norm_eps)
    residual = residual + x
    return ctx.layers.norm(p, residual, ctx), residual


def on_device(x: Tensor, ctx: Context) -> bool:
    """Whether to use kernels that do several operations at once: on a GPU, while generating (they have no gradient)."""
    return x.is_cuda and ctx.cache is not None


def linear(p: Float[Tensor, "O I"], x: Float[Tensor, "T I"], ctx: Context) -> Float[Tensor, "T O"]:
    """x @ p.T; every projection of the model, and the head, goes through it."""
    if on_device(x, ctx):
        return small_linear(x, p, fixed=ctx.owns(p))
    return F.linear(x, p) if x.is_cuda or ctx.cache is None else host_linear(x, p)


def attention(
    p: dict, x: Float[Tensor, "T H"], ctx: Context, heads_of: Callable[..., tuple[Tensor, ...]] | None = None
) -> Float[Tensor, "T H"]:
    """Self-attention over this rank's heads: QKV, optional QK-norm, rope, attend, output projection, all-reduce.

    `heads_of` computes q, k and v where no fused kernel does; None stands for `turned_heads`.
    """
    qkv = ctx.layers.linear(p["qkv"], x, ctx)
    if "qkv_bias" in p:
        qkv = qkv + p["qkv_bias"]
    if on_device(x, ctx) and is_plain(ctx):
        out = attend_fused(p, qkv, ctx)
    else:
        q, k, v = (heads_of or turned_heads)(p, qkv, ctx)
        q, k, v = ctx.tap("q", q), ctx.tap("k", k), ctx.tap("v", v)
        out = ctx.layers.attend(q, k, v, ctx)
    y = ctx.tp.all_reduce(ctx.layers.linear(p["o"], out.flatten(1), ctx))
    return y + p["o_bias"] if "o_bias" in p else y


def turned_heads(
    p: dict, qkv: Float[Tensor, "T QKV"], ctx: Context
) -> tuple[Float[Tensor, "T N D"], Float[Tensor, "T K D"], Float[Tensor, "T K D"]]:
    """q, k and v of a projection: QK-norm where the model has it, and rope."""
    heads, kv_heads = ctx.sizes.heads, ctx.sizes.kv_heads
    qk, v = qkv.unflatten(-1, (-1, ctx.config.head_dim)).split([heads + kv_heads, kv_heads], 1)
    if "q_norm" in p:
        q, k = qk.split([heads, kv_heads], 1)
        qk = torch.cat((ctx.layers.norm(p["q_norm"], q, ctx), ctx.layers.norm(p["k_norm"], k, ctx)), 1)
    q, k = apply_rope(qk, ctx.batch.cos, ctx.batch.sin).split([heads, kv_heads], 1)
    return q, k, v


def is_plain(ctx: Context) -> bool:
    """Whether nothing between the QKV projection and attention's output is swapped, captured or edited."""
    if ctx.layers.attend is not attend or ctx.layers.norm is not norm:
        return False
    return ctx.taps.idle or not any(ctx.taps.wants(f"layers.{ctx.layer}.{name}") for name in ("q", "k", "v"))


def attend(
    q: Float[Tensor, "T N D"], k: Float[Tensor, "T K D"], v: Float[Tensor, "T K D"], ctx: Context
) -> Float[Tensor, "T N D"]:
    """Store the new keys and values, then causal attention over the paged cache; without a cache, over the batch.

    softmax(q k^T / sqrt(D)) v, with D the head dim, under the causal mask and the layer's sliding window if it has one.
    """
    batch = ctx.batch
    if ctx.cache is None:
        scale, window = ctx.config.head_dim**-0.5, ctx.config.sliding_window[ctx.layer] or 0
        return packed_attention(q, k, v, batch.cu_seqlens, batch.max_seqlen, scale=scale, window=window)
    store_kv(k, v, ctx.cache.k[ctx.layer], ctx.cache.v[ctx.layer], batch.slots)
    return attend_cached(q, ctx)


def attend_fused(p: dict, qkv: Float[Tensor, "T QKV"], ctx: Context) -> Float[Tensor, "T N D"]:
    """QK-norm, rope, store and attention over the paged cache: one kernel in a decode step, otherwise two."""
    batch, k_cache, v_cache = ctx.batch, ctx.cache.k[ctx.layer], ctx.cache.v[ctx.layer]
    heads = qkv, p.get("q_norm"), p.get("k_norm"), ctx.config.rms_norm_eps, batch.cos, batch.sin
    if ctx.backend != "triton" or batch.max_seqlen != 1:
        q = qk_norm_rope_store(*heads, k_cache, v_cache, batch.slots, ctx.sizes.heads, ctx.sizes.kv_heads)
        return attend_cached(q, ctx)
    window = ctx.config.sliding_window[ctx.layer] or 0
    plan = None if ctx.metadata is None else ctx.metadata.get(window)
    return qk_norm_rope_attention(
        *heads,
        k_cache,
        v_cache,
        batch.slots,
        batch.block_tables,
        batch.cu_seqlens,
        batch.context_lens,
        num_heads=ctx.sizes.heads,
        scale=ctx.config.head_dim**-0.5,
        window=window,
        metadata=plan if isinstance(plan, Tensor) else None,
        max_context=ctx.max_context,
    )


def attend_cached(q: Float[Tensor, "T N D"], ctx: Context) -> Float[Tensor, "T N D"]:
    """Causal attention of the new queries over the paged cache, which holds their own keys already."""
    window = ctx.config.sliding_window[ctx.layer] or 0
    return paged_attention(
        q,
        ctx.cache.k[ctx.layer],
        ctx.cache.v[ctx.layer],
        ctx.batch.block_tables,
        ctx.batch.cu_seqlens,
        ctx.batch.context_lens,
        max_seqlen_q=ctx.batch.max_seqlen,
        scale=ctx.config.head_dim**-0.5,
        window=window,
        backend=ctx.backend,
        metadata=None if ctx.metadata is None else ctx.metadata.get(window),
        max_context=ctx.max_context,
    )


def mlp(p: dict, x: Float[Tensor, "T H"], ctx: Context) -> Float[Tensor, "T H"]:
    """SwiGLU feed-forward (Shazeer 2020): gate and up in one matrix product, then one all-reduce."""
    y = ctx.tp.all_reduce(ctx.layers.linear(p["down"], gated(p, x, ctx), ctx))
    return y + p["down_bias"] if "down_bias" in p else y


def gated(p: dict, x: Float[Tensor, "T H"], ctx: Context) -> Float[Tensor, "T I"]:
    """The activation of gate and up; in one kernel if neither `linear` nor `activation` is swapped."""
    if on_device(x, ctx) and ctx.layers.linear is linear and ctx.layers.activation is activation:
        bias = p.get("gate_up_bias")
        fixed = ctx.owns(p["gate_up"]) and (bias is None or ctx.owns(bias))  # the kernel fetches both early
        return small_linear(x, p["gate_up"], bias=bias, gated=True, fixed=fixed)
    gate_up = ctx.layers.linear(p["gate_up"], x, ctx)
    if "gate_up_bias" in p:
        gate_up = gate_up + p["gate_up_bias"]
    return ctx.layers.activation(gate_up, ctx)


def activation(gate_up: Float[Tensor, "... two_I"], ctx: Context) -> Float[Tensor, "... I"]:
    """SiLU of the gate half times the up half."""
    if on_device(gate_up, ctx):
        return silu_mul(gate_up.reshape(-1, gate_up.shape[-1])).view(*gate_up.shape[:-1], -1)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def moe(p: dict, x: Float[Tensor, "T H"], ctx: Context) -> Float[Tensor, "T H"]:
    """Mixture of experts as Qwen3-MoE defines it: the top experts' outputs, weighted by the router's softmax.

    Each expert runs on the tokens that chose it. If `linear` is swapped, each expert instead runs on every token, with
    weight zero where it was not chosen. Each expert's width is split over the ranks.
    """
    chosen = ctx.config.num_experts_per_tok
    probs = F.softmax(ctx.layers.linear(p["router"], x, ctx).float(), dim=-1)
    top, index = probs.topk(chosen, dim=-1)
    if ctx.config.norm_topk_prob:
        top = top / top.sum(-1, keepdim=True)
    if ctx.layers.linear is linear:
        return ctx.tp.all_reduce(chosen_experts(p, x, top, index, ctx))
    weight = torch.zeros_like(probs).scatter(1, index, top).to(x.dtype)
    y = torch.zeros_like(x)
    for expert in range(ctx.config.num_experts):
        h = ctx.layers.activation(ctx.layers.linear(p["experts_gate_up"][expert], x, ctx), ctx)
        y = y + weight[:, expert, None] * ctx.layers.linear(p["experts_down"][expert], h, ctx)
    return ctx.tp.all_reduce(y)


def chosen_experts(
    p: dict, x: Float[Tensor, "T H"], weight: Float[Tensor, "T k"], index: Int[Tensor, "T k"], ctx: Context
) -> Float[Tensor, "T H"]:
    """Each token's k experts of `index`, their outputs added with `weight`.

    The T * k rows are sorted by expert, so that shapes are the same whatever the router chooses, and put back.
    """
    (tokens, chosen), experts = index.shape, torch.arange(p["router"].shape[0], device=x.device)
    expert, order = index.flatten().sort(stable=True)
    ends = torch.searchsorted(expert, experts, right=True, out_int32=True)
    if ctx.layers.activation is not activation:
        ctx = ctx._replace(batch=ctx.batch.take(order // chosen))  # it may look its rows up there
    h = ctx.layers.activation(grouped_linear(x[order // chosen], p["experts_gate_up"], ends), ctx)
    y = grouped_linear(h, p["experts_down"], ends)
    place = torch.empty_like(order).scatter(0, order, torch.arange(tokens * chosen, device=x.device))
    return (y[place].view(tokens, chosen, -1) * weight[..., None]).sum(1).to(x.dtype)


def lm_head(p: Float[Tensor, "V H"], x: Float[Tensor, "B H"], ctx: Context) -> Float[Tensor, "B V"]:
    """This rank's logits, only for the rows that need them."""
    return ctx.layers.linear(p, x, ctx)


def check_layers(layers: Any, config: ModelConfig) -> "Layers":
    """The layer functions to use; None stands for the defaults.

    Raises TypeError that names what is not a function, ValueError for a swapped feed-forward that no layer would use.
    """
    if layers is None:
        return Layers()
    if not isinstance(layers, Layers):
        raise TypeError(
            f"layers must be a fnllm.Layers, as in fnllm.Layers()._replace(mlp=mine); found {type(layers).__name__}"
        )
    for name, function in zip(layers._fields, layers, strict=True):
        check_function(f"layers.{name}", function)
    if layers.mlp is not mlp and layers.moe is moe and all(config.sparse_layers):
        raise ValueError("layers.mlp would never run: every layer of this model has experts; swap moe")
    if layers.moe is not moe and layers.mlp is mlp and not any(config.sparse_layers):
        raise ValueError("layers.moe would never run: no layer of this model has experts; swap mlp")
    return layers


class Layers(NamedTuple):
    """The functions that a step is made of; swap one with `Layers()._replace(mlp=mine)`.

    Each is `(p, x, ctx) -> y` except `attend(q, k, v, ctx)`, `activation(x, ctx)` and
    `sample(logits, rows, positions, **settings)`. `attention`, `mlp` and `moe` get the layer's dict as `p`, the others
    one weight. The defaults, in this module, give the shapes.
    """

    embed: Callable[..., Tensor] = embed
    norm: Callable[..., Tensor] = norm
    linear: Callable[..., Tensor] = linear
    attention: Callable[..., Tensor] = attention
    attend: Callable[..., Tensor] = attend
    mlp: Callable[..., Tensor] = mlp
    moe: Callable[..., Tensor] = moe
    activation: Callable[..., Tensor] = activation
    lm_head: Callable[..., Tensor] = lm_head
    sample: Callable[..., Sampled] = sample

    def swapped(self) -> dict[str, Callable]:
        """The functions that are not the usual ones, by name."""
        usual = self._field_defaults
        return {name: mine for name, mine in zip(self._fields, self, strict=True) if mine is not usual[name]}
