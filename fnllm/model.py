"""The model: one function over a parameter tree. Reading order: `forward`, then `layers.py`."""

from fnllm_weights import ModelConfig
from jaxtyping import Float
from torch import Tensor

from fnllm.batch import Batch
from fnllm.cache import KVCache
from fnllm.context import Context
from fnllm.layers import Layers


def forward(tree: dict, ctx: Context) -> Float[Tensor, "T H"]:
    """Hidden states after the final norm, for every token of `ctx.batch`.

    The residual stream is carried beside the sublayers' outputs, so that each addition meets the norm behind it in
    one kernel. Collectives: one all-reduce in `embed`, one in `attention`, one in `mlp`.
    """
    layers = ctx.layers
    x = layers.embed(tree["embed"], ctx.batch.token_ids, ctx)
    residual = None
    for index, p in enumerate(tree["layers"]):
        at = ctx._replace(layer=index)
        h, residual = add_norm(p["input_norm"], x, residual, "resid_pre", at)
        h = at.tap("attn_out", layers.attention(p, h, at))
        h, residual = add_norm(p["post_norm"], h, residual, "resid_mid", at)
        feed_forward = layers.moe if "router" in p else layers.mlp
        x = at.tap("mlp_out", feed_forward(p, h, at))
        if at.taps.wants(f"layers.{index}.resid_post"):
            x, residual = at.tap("resid_post", residual + x), None
    hidden, _ = add_norm(tree["norm"], x, residual, None, ctx)
    return ctx.tap("final_norm", hidden)


def add_norm(
    weight: Float[Tensor, " H"], x: Float[Tensor, "T H"], residual: Float[Tensor, "T H"] | None, site: str | None, ctx: Context
) -> tuple[Float[Tensor, "T H"], Float[Tensor, "T H"]]:
    """Add a sublayer's output to the residual stream and norm the sum: (normed, stream)."""
    residual = x if residual is None else residual + x
    if site is not None:
        residual = ctx.tap(site, residual)
    return ctx.layers.norm(weight, residual, ctx), residual
