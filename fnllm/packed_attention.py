"""Attention over whole sequences without a cache, for `score`: plain torch, differentiable."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


def packed_attention(
    q: Float[Tensor, "T N D"],
    k: Float[Tensor, "T K D"],
    v: Float[Tensor, "T K D"],
    cu_seqlens: Int[Tensor, " B_plus_1"],
    max_seqlen: int,
    *,
    scale: float,
    window: int = 0,
) -> Float[Tensor, "T N D"]:
    """Causal attention inside each packed sequence; `window` w > 0 lets a token see itself and w - 1 before it."""
    num_tokens, num_sequences = q.shape[0], cu_seqlens.shape[0] - 1
    token = torch.arange(num_tokens, device=q.device)
    entry = torch.searchsorted(cu_seqlens[1:], token, right=True)
    place = token - cu_seqlens[entry]
    # sequences side by side in a padded array: padding stands behind the tokens, where causal queries never look
    padded = (entry * max_seqlen + place).long()

    def spread(x: Tensor) -> Tensor:
        wide = x.new_zeros(num_sequences * max_seqlen, *x.shape[1:]).index_copy(0, padded, x)
        return wide.view(num_sequences, max_seqlen, *x.shape[1:]).transpose(1, 2)

    mask = None
    if window:
        at = torch.arange(max_seqlen, device=q.device)
        distance = at[:, None] - at[None, :]
        mask = (distance >= 0) & (distance < window)
    out = F.scaled_dot_product_attention(
        spread(q),
        spread(k),
        spread(v),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.transpose(1, 2).reshape(num_sequences * max_seqlen, *q.shape[1:])[padded]
