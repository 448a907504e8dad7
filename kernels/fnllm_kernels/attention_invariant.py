"""Batch-invariant paged attention in plain torch: a query's bits depend on its own sequence only.

Axes: T packed tokens, B sequences, N query heads, K KV heads, D head dim, P cache blocks, S block size, M blocks per
sequence, G = N / K. Queries are taken a fixed number at a time and keys in tiles at fixed positions of the sequence, so
that neither the batch, nor how a prompt was cut into chunks, nor the block size changes an operation on a query's way.
A tile that a query does not see leaves its sums as they are, exactly.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

_QUERIES = 16
_KEYS = 64
_ALIGN = 16  # head dims are padded to it: batched products of unaligned matrices differ in their order of sums


def paged_attention_invariant(
    q: Float[Tensor, "T N D"],
    k_cache: Float[Tensor, "P S K D"],
    v_cache: Float[Tensor, "P S K D"],
    block_tables: Int[Tensor, "B M"],
    cu_seqlens_q: Int[Tensor, " B_plus_1"],
    context_lens: Int[Tensor, " B"],
    *,
    max_seqlen_q: int,
    scale: float,
    window: int = 0,
    metadata: Tensor | None = None,
    max_context: int = 0,
) -> Float[Tensor, "T N D"]:
    """`paged_attention` with a fixed order of sums; reads the lengths on the host. Sums in float32 or wider."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    counts = cu_seqlens_q.diff().long()
    entry = torch.repeat_interleave(torch.arange(counts.shape[0], device=q.device), counts)
    token = torch.arange(entry.shape[0], device=q.device)
    position = context_lens.long()[entry] - cu_seqlens_q.long()[entry + 1] + token
    # A query of a sequence without keys, as padding has, sees nothing and keeps its zeros.
    seeing = token[position >= 0]
    for start in range(0, seeing.shape[0], _QUERIES):
        some = seeing[start : start + _QUERIES]
        index = torch.cat((some, some[-1:].expand(_QUERIES - some.shape[0])))
        rows = _attend(
            q[index], k_cache, v_cache, block_tables[entry[index]].long(), position[index], scale=scale, window=window
        )
        out[some] = rows[: some.shape[0]]
    return out


def _attend(
    q: Float[Tensor, "Q N D"],
    k_cache: Float[Tensor, "P S K D"],
    v_cache: Float[Tensor, "P S K D"],
    tables: Int[Tensor, "Q M"],
    position: Int[Tensor, " Q"],
    *,
    scale: float,
    window: int,
) -> Float[Tensor, "Q N D"]:
    """One query of each of a fixed number of (sequence, position) pairs."""
    count, _, head_dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    wide = torch.promote_types(q.dtype, torch.float32)
    padding = (0, -head_dim % _ALIGN)
    query = pad(q.to(wide), padding).unflatten(1, (kv_heads, -1)).flatten(0, 1).contiguous()  # [Q K, G, D]
    top = query.new_full((*query.shape[:2], 1), -torch.inf)
    total, acc = torch.zeros_like(top), torch.zeros_like(query)
    lowest = (position - window + 1).clamp(min=0) if window else torch.zeros_like(position)
    for tile in range(int(lowest.min()) // _KEYS, int(position.max()) // _KEYS + 1):
        key = tile * _KEYS + torch.arange(_KEYS, device=q.device)
        seen = (key <= position[:, None]) & (key >= lowest[:, None])
        # An unseen key reads the query's own, which is finite: its weight is zero.
        at = torch.minimum(key, position[:, None])
        slots = tables.gather(1, at // block_size) * block_size + at % block_size
        keys, values = (
            pad(cache.flatten(0, 1)[slots].to(wide), padding).transpose(1, 2).flatten(0, 1).contiguous()
            for cache in (k_cache, v_cache)
        )
        scores = torch.bmm(query, keys.transpose(1, 2)) * scale
        scores = torch.where(seen.repeat_interleave(kv_heads, 0)[:, None], scores, -torch.inf)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        base = torch.where(new_top == -torch.inf, 0.0, new_top)
        weights, shrink = torch.exp(scores - base), torch.exp(top - base)
        total = total * shrink + weights.sum(-1, keepdim=True)
        acc = acc * shrink + torch.bmm(weights, values)
        top = new_top
    return (acc / total)[..., :head_dim].reshape(count, -1, head_dim).to(q.dtype)
