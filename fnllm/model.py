"""The model: one function over a parameter tree. Reading order: `forward`, then `layers.py`."""

from jaxtyping import Float
from torch import Tensor

from fnllm.context import Context
from fnllm.decode_layer import attention_counters, decode_layer, fuses
from fnllm.layers import add_norm
from fnllm_weights import ParamTree


def forward(tree: ParamTree, ctx: Context) -> Float[Tensor, "T H"]:
    """Hidden states after the final norm, for every token of `ctx.batch`.

    The residual stream is carried beside the sublayers' outputs, so that each addition meets the norm behind it in
    one kernel. Collectives: one all-reduce in `embed`, one in `attention`, one in `mlp`.
    """
    layers = ctx.layers
    x = layers.embed(tree["embed"], ctx.batch.token_ids, ctx)
    residual, counters = None, None
    for index, p in enumerate(tree["layers"]):
        at = ctx._replace(layer=index)
        if fuses(p, x, at):
            counters = attention_counters(at) if counters is None else counters
            x, residual = decode_layer(p, x if residual is None else residual + x, counters, at), None
            continue
        h, residual = tapped_add_norm(p["input_norm"], x, residual, "resid_pre", at)
        h = at.tap("attn_out", layers.attention(p, h, at))
        h, residual = tapped_add_norm(p["post_norm"], h, residual, "resid_mid", at)
        feed_forward = layers.moe if "router" in p else layers.mlp
        x = at.tap("mlp_out", feed_forward(p, h, at))
        if at.taps.wants(f"layers.{index}.resid_post"):
            x, residual = at.tap("resid_post", residual + x), None
    hidden, _ = add_norm(tree["norm"], x, residual, ctx)
    return ctx.tap("final_norm", hidden)


def head_logits(tree: ParamTree, hidden: Float[Tensor, "B H"], ctx: Context) -> Float[Tensor, "B V"]:
    """This rank's logits of some hidden states, seen at the site `logits` whatever `lm_head` is."""
    return ctx.tap("logits", ctx.layers.lm_head(tree["lm_head"], hidden, ctx))


def tapped_add_norm(
    weight: Float[Tensor, " H"], x: Float[Tensor, "T H"], residual: Float[Tensor, "T H"] | None, site: str, ctx: Context
) -> tuple[Float[Tensor, "T H"], Float[Tensor, "T H"]]:
    """`add_norm`, with the stream seen at `site` between the addition and the norm."""
    if not ctx.taps.wants(f"layers.{ctx.layer}.{site}"):
        return add_norm(weight, x, residual, ctx)
    residual = ctx.tap(site, x if residual is None else residual + x)
    return ctx.layers.norm(weight, residual, ctx), residual
