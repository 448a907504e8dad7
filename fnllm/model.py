"""The model: one function over a parameter tree. Reading order: `forward`, then `layers.py`."""

from jaxtyping import Float, Int
from torch import Tensor

from fnllm.context import Context
from fnllm.decode_layer import attention_counters, decode_layer, fuses
from fnllm.layers import Layers, add_norm
from fnllm.numerics import layers_for
from fnllm_weights import ParamTree

AFTER_ATTENTION = ("norm", "linear", "mlp", "moe", "activation")  # functions of the rest of a layer


def forward(tree: ParamTree, ctx: Context, tokens: Int[Tensor, " W"] | None = None) -> Float[Tensor, "W H"]:
    """Hidden states after the final norm, for the tokens of `ctx.batch` at the indices `tokens` (None: all).

    The residual stream is passed along separately from the sublayers' outputs, so that each addition and the norm after
    it are one kernel. Collectives: one all-reduce in `embed`, and per layer one in `attention` and one in `mlp`. The
    last layer's feed-forward runs only for `tokens`, if that makes no difference beyond rounding.
    """
    layers, last = ctx.layers, len(tree["layers"]) - 1
    x = layers.embed(tree["embed"], ctx.batch.token_ids, ctx)
    residual, counters = None, None
    for index, p in enumerate(tree["layers"]):
        at = ctx._replace(layer=index, own=tuple(x for x in p.values() if isinstance(x, Tensor)))
        if fuses(p, x, at):
            counters = attention_counters(at) if counters is None else counters
            x, residual = decode_layer(p, x if residual is None else residual + x, counters, at), None
            continue
        h, residual = tapped_add_norm(p["input_norm"], x, residual, "resid_pre", at)
        h = at.tap("attn_out", layers.attention(p, h, at))
        if tokens is not None and index == last and rest_by_token(at):
            h, residual = h[tokens], residual[tokens]
            ctx = ctx._replace(batch=ctx.batch.take(tokens))
            at, tokens = at._replace(batch=ctx.batch), None
        h, residual = tapped_add_norm(p["post_norm"], h, residual, "resid_mid", at)
        feed_forward = layers.moe if "router" in p else layers.mlp
        x = at.tap("mlp_out", feed_forward(p, h, at))
        if at.taps.wants(f"layers.{index}.resid_post"):
            x, residual = at.tap("resid_post", residual + x), None
    hidden, _ = add_norm(tree["norm"], x, residual, ctx)
    hidden = ctx.tap("final_norm", hidden)
    return hidden if tokens is None else hidden[tokens]


def rest_by_token(ctx: Context) -> bool:
    """Whether everything after this layer's attention treats tokens independently and is not captured or edited.

    False in decode steps, where every token needs the head, and where logits are captured or edited.
    """
    usual = Layers(), layers_for(Layers(), "batch_invariant")
    by_token = all(any(getattr(ctx.layers, f) is getattr(own, f) for own in usual) for f in AFTER_ATTENTION)
    sites = "final_norm", "logits", *(f"layers.{ctx.layer}.{name}" for name in ("resid_mid", "mlp_out", "resid_post"))
    return by_token and ctx.batch.max_seqlen > 1 and not any(map(ctx.taps.wants, sites))


def head_logits(tree: ParamTree, hidden: Float[Tensor, "B H"], ctx: Context) -> Float[Tensor, "B V"]:
    """This rank's logits for some hidden states, with the site `logits`, whatever `lm_head` is."""
    p = tree["lm_head"]
    at = ctx._replace(own=(p,) if isinstance(p, Tensor) else ())
    return ctx.tap("logits", ctx.layers.lm_head(p, hidden, at))


def tapped_add_norm(
    weight: Float[Tensor, " H"], x: Float[Tensor, "T H"], residual: Float[Tensor, "T H"] | None, site: str, ctx: Context
) -> tuple[Float[Tensor, "T H"], Float[Tensor, "T H"]]:
    """`add_norm`, with the residual stream passed through `site` between the addition and the norm."""
    if not ctx.taps.wants(f"layers.{ctx.layer}.{site}"):
        return add_norm(weight, x, residual, ctx)
    residual = ctx.tap(site, x if residual is None else residual + x)
    return ctx.layers.norm(weight, residual, ctx), residual
