"""Six swapped layer functions. Each is a plain function passed to `generate`; paging, prefix cache, chunked prefill and
compilation work as usual.

    python examples/swap_layers.py [folder or hub id]
"""

import sys
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

import fnllm
from fnllm.layers import Layers
from fnllm.packed_attention import packed_attention
from fnllm.sampler import Sampled, sample
from fnllm_kernels.attention import paged_attention
from fnllm_kernels.kv_store import store_kv

WINDOW, SINKS = 16, 4


def windowed(q: Tensor, k: Tensor, v: Tensor, ctx) -> Tensor:
    """Attention in which a token sees itself and the WINDOW - 1 tokens before it."""
    scale = ctx.config.head_dim**-0.5
    if ctx.cache is None:  # `score` has whole sequences and no cache
        return packed_attention(q, k, v, ctx.batch.cu_seqlens, ctx.batch.max_seqlen, scale=scale, window=WINDOW)
    k_cache, v_cache = ctx.cache.k[ctx.layer], ctx.cache.v[ctx.layer]
    store_kv(k, v, k_cache, v_cache, ctx.batch.slots)
    return paged_attention(
        q,
        k_cache,
        v_cache,
        ctx.batch.block_tables,
        ctx.batch.cu_seqlens,
        ctx.batch.context_lens,
        max_seqlen_q=ctx.batch.max_seqlen,
        scale=scale,
        window=WINDOW,
        backend=ctx.backend,
    )


def windowed_with_sinks(q: Tensor, k: Tensor, v: Tensor, ctx) -> Tensor:
    """A window plus the first SINKS tokens of the sequence (Xiao et al. 2023, attention sinks), read from the pages."""
    batch = ctx.batch
    back = batch.positions[:, None] - torch.arange(WINDOW, device=q.device)  # the window, newest first
    first = torch.arange(SINKS, device=q.device).expand(q.shape[0], -1)
    key = torch.cat([back, first], 1).long()
    seen = torch.cat([back >= 0, first <= back[:, -1:] - 1], 1)  # a sink inside the window counts once
    place = torch.minimum(key.clamp(min=0), batch.positions[:, None].long())
    if ctx.cache is None:  # `score`: the sequences lie whole in the batch
        slots = batch.cu_seqlens[batch.entry, None] + place
    else:
        k_cache, v_cache = ctx.cache.k[ctx.layer], ctx.cache.v[ctx.layer]
        store_kv(k, v, k_cache, v_cache, batch.slots)
        size, tables = k_cache.shape[1], batch.block_tables[batch.entry].long()
        slots = (tables.gather(1, place // size) * size + place % size).clamp(min=0)
        k, v = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    keys, values = (x[slots].transpose(1, 2) for x in (k, v))  # [T, K, W, D]
    grouped = q.unflatten(1, (keys.shape[1], -1))
    out = F.scaled_dot_product_attention(
        grouped, keys, values, attn_mask=seen[:, None, None], scale=ctx.config.head_dim**-0.5
    )
    return out.flatten(1, 2)


def relu2_mlp(p: dict, x: Float[Tensor, "T H"], ctx) -> Float[Tensor, "T H"]:
    """A gated MLP with squared ReLU in place of SiLU (So et al. 2021, Primer)."""
    gate, up = ctx.layers.linear(p["gate_up"], x, ctx).chunk(2, dim=-1)
    return ctx.tp.all_reduce(ctx.layers.linear(p["down"], F.relu(gate).square() * up, ctx))


def top_k_mlp(p: dict, x: Float[Tensor, "T H"], ctx) -> Float[Tensor, "T H"]:
    """SwiGLU of which each token keeps a quarter of this rank's hidden units: those of largest magnitude."""
    h = ctx.layers.activation(ctx.layers.linear(p["gate_up"], x, ctx), ctx)
    least = h.abs().topk(h.shape[-1] // 4, dim=-1).values[:, -1:]
    return ctx.tp.all_reduce(ctx.layers.linear(p["down"], torch.where(h.abs() >= least, h, 0), ctx))


class Int8(NamedTuple):
    """A weight in 8 bits: row o is scale[o] times integers."""

    values: Int[Tensor, "O I"]
    scale: Float[Tensor, " O"]


def quantise(weight: Float[Tensor, "O I"]) -> Int8:
    """Symmetric, one scale for each output."""
    scale = weight.float().abs().amax(1).clamp(min=1e-12) / 127
    return Int8((weight.float() / scale[:, None]).round().to(torch.int8), scale.to(weight.dtype))


def quantised(params: fnllm.Params) -> fnllm.Params:
    """The same model with its projections in 8 bits; embedding, norms and head are unchanged."""
    names = ("qkv", "o", "gate_up", "down")
    layers = [{k: quantise(x) if k in names else x for k, x in p.items()} for p in params.tree["layers"]]
    return params._replace(tree={**params.tree, "layers": layers}, workspace={})


def int8_linear(p: Int8 | Tensor, x: Float[Tensor, "T I"], ctx) -> Float[Tensor, "T O"]:
    """Weight-only quantisation: the integers take x's dtype where they are read."""
    if isinstance(p, Int8):
        return F.linear(x, p.values.to(x.dtype)) * p.scale
    return F.linear(x, p)


def sample_above_the_mean(logits: Float[Tensor, "B V"], rows, positions: Int[Tensor, " B"], **settings) -> Sampled:
    """The usual sampler with every token whose logit is below its row's mean left out."""
    high = logits >= logits.float().mean(-1, keepdim=True)
    return sample(torch.where(high, logits, -torch.inf), rows, positions, **settings)


SWAPS = {
    "a sliding window": Layers()._replace(attend=windowed),
    "a window with sinks": Layers()._replace(attend=windowed_with_sinks),
    "squared ReLU": Layers()._replace(mlp=relu2_mlp),
    "a top-k sparse MLP": Layers()._replace(mlp=top_k_mlp),
    "a sampler of one's own": Layers()._replace(sample=sample_above_the_mean),
}


def main(path: str | None = None) -> None:
    params = fnllm.load(path or None)
    prompt, greedy = "In the beginning", fnllm.Sampling(temperature=0, max_tokens=24)
    runs = {"nothing": (params, Layers()), **{name: (params, layers) for name, layers in SWAPS.items()}}
    runs["8-bit weights"] = (quantised(params), Layers()._replace(linear=int8_linear))
    for name, (p, layers) in runs.items():
        text = fnllm.generate(p, prompt, greedy, layers=layers, max_num_seqs=4, max_model_len=256)[0].text
        print(f"{name:24}{text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
