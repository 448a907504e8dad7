"""A decoder layer for one token in five dependent kernels, used where nothing inside it is swapped or tapped.

The residual stream is one tensor here: the norms are prologues of the products behind them, the additions epilogues of
those before them. Every kernel fetches weights while the one before it still runs. The mathematics is that of
`layers.py`, in the same order of roundings but for the sums inside a product.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fnllm.context import Context
from fnllm.layers import Layers
from fnllm_kernels.decode_attention import HEAD_DIMS, decode_attention
from fnllm_kernels.small_linear import norm_linear, small_linear
from fnllm_weights import LayerParams

INSIDE = ("norm", "linear", "attention", "attend", "mlp", "activation")  # functions whose work these kernels do


def fuses(p: LayerParams, x: Float[Tensor, "T H"], ctx: Context) -> bool:
    """Whether this layer of this step can run fused: one bf16 token on a GPU, usual functions, no taps inside."""
    here = x.is_cuda and ctx.cache is not None and ctx.backend == "triton" and ctx.batch.max_seqlen == 1
    fits = here and x.shape[0] == 1 and x.dtype == torch.bfloat16 and ctx.config.head_dim in HEAD_DIMS
    if not fits or "gate_up" not in p or ctx.taps.look_into(ctx.layer):
        return False
    usual = Layers()
    return all(getattr(ctx.layers, name) is getattr(usual, name) for name in INSIDE)


def attention_counters(ctx: Context) -> Int[Tensor, " C"]:
    """What the attention kernel's programs count their arrivals with; zeros before and after each layer."""
    programs = ctx.batch.token_ids.shape[0] * ctx.sizes.heads
    return torch.zeros(programs, dtype=torch.int32, device=ctx.batch.cos.device)


def decode_layer(
    p: dict, stream: Float[Tensor, "T H"], counters: Int[Tensor, " C"], ctx: Context
) -> Float[Tensor, "T H"]:
    """The residual stream after this layer; the first rank's share of a sum holds the stream before and the bias."""
    eps, batch, first = ctx.config.rms_norm_eps, ctx.batch, ctx.tp.rank == 0
    qkv = norm_linear(stream, p["input_norm"], eps, p["qkv"], bias=p.get("qkv_bias"), fixed=True)
    out = decode_attention(
        qkv,
        p.get("q_norm"),
        p.get("k_norm"),
        eps,
        batch.cos,
        batch.sin,
        ctx.cache.k[ctx.layer],
        ctx.cache.v[ctx.layer],
        batch.block_tables,
        batch.context_lens,
        batch.slots,
        counters,
        num_heads=ctx.sizes.heads,
        scale=ctx.config.head_dim**-0.5,
        window=ctx.config.sliding_window[ctx.layer] or 0,
    )
    bias, before = (p.get("o_bias"), stream) if first else (None, None)
    stream = ctx.tp.all_reduce(small_linear(out, p["o"], bias=bias, residual=before, fixed=True))
    bias = p.get("gate_up_bias")
    gated = norm_linear(stream, p["post_norm"], eps, p["gate_up"], bias=bias, gated=True, fixed=True)
    bias, before = (p.get("down_bias"), stream) if first else (None, None)
    return ctx.tp.all_reduce(small_linear(gated, p["down"], bias=bias, residual=before, fixed=True))
