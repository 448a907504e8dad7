"""Paged attention in plain torch: the definition, and the path on a CPU.

Axes: T packed tokens, B sequences, N query heads, K KV heads, D head dim, P cache blocks, S block size, M blocks per
sequence. A sequence's result depends on its own queries and keys only: sequences are computed alone, or side by side
where their gathered keys have the same padded length.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_SPAN_STEP = 64  # keys of a decoding sequence are padded to a multiple of this many, so that similar lengths meet
_QUERY_STEP = 256  # queries of a longer sequence are taken this many at a time, which bounds the score matrix


class DecodeGroup(NamedTuple):
    """Sequences with one query each, whose gathered keys have one padded length."""

    rows: Int[Tensor, " B"] | None  # of q; None: every row, in order
    slots: Int[Tensor, " B_span"]  # of each sequence's keys, `span` columns each
    mask: Float[Tensor, "B 1 1 span"]  # 0 where there is a key, -inf behind the last


class Chunk(NamedTuple):
    """A sequence with several queries."""

    sequence: int
    start: int  # of its rows in q
    stop: int
    length: int  # keys, those of its queries included


class ReferencePlan(NamedTuple):
    """What the lengths and tables of a step say, which is the same for every layer with one window."""

    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]


def plan_reference(
    block_tables: Int[Tensor, "B M"],
    cu_seqlens_q: Int[Tensor, " B_plus_1"],
    context_lens: Int[Tensor, " B"],
    *,
    num_tokens: int,
    block_size: int,
    window: int,
    dtype: torch.dtype,
) -> ReferencePlan:
    """The plan for `num_tokens` rows of q and keys of `dtype`; reads the lengths on the host."""
    starts, lengths = cu_seqlens_q.tolist(), context_lens.tolist()
    decoding: dict[int, list[tuple[int, int]]] = {}
    chunks = []
    for b, length in enumerate(lengths):
        queries = starts[b + 1] - starts[b]
        if queries == 1 and length > 0:
            first = _first_key(length - 1, window)
            span = -(-(length - first) // _SPAN_STEP) * _SPAN_STEP
            decoding.setdefault(span, []).append((b, first))
        elif queries > 0 and length > 0:
            chunks.append(Chunk(b, starts[b], starts[b + 1], length))
    groups = []
    for span, members in decoding.items():
        index = torch.tensor([b for b, _ in members], device=context_lens.device)
        first = torch.tensor([f for _, f in members], device=context_lens.device)
        rows = None if len(members) == len(lengths) == num_tokens else cu_seqlens_q.long()[index]
        last = context_lens[index][:, None] - 1
        position = first[:, None] + torch.arange(span, device=context_lens.device)
        mask = torch.zeros(position.shape, dtype=dtype, device=position.device)
        mask = mask.masked_fill(position > last, -torch.inf)[:, None, None]
        # A column past the length reads the sequence's own last key and is masked: a table entry or a slot
        # that was never written is neither an index nor a value (NaN there would survive a zero weight).
        position = torch.minimum(position, last)
        blocks = block_tables[index].long().gather(1, position // block_size)
        groups.append(DecodeGroup(rows, (blocks * block_size + position % block_size).flatten(), mask))
    return ReferencePlan(tuple(groups), tuple(chunks))


def paged_attention_reference(
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
    backend: str = "reference",
    metadata: ReferencePlan | None = None,
    max_context: int = 0,
) -> Float[Tensor, "T N D"]:
    """Plain torch of `fnllm_kernels.attention.paged_attention`."""
    plan = metadata
    if plan is None:
        plan = plan_reference(
            block_tables, cu_seqlens_q, context_lens,
            num_tokens=q.shape[0], block_size=k_cache.shape[1], window=window, dtype=q.dtype,
        )  # fmt: skip
    if len(plan.groups) == 1 and plan.groups[0].rows is None:
        return _attend_one_each(q, k_cache, v_cache, plan.groups[0], scale)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for group in plan.groups:
        out[group.rows] = _attend_one_each(q[group.rows], k_cache, v_cache, group, scale)
    for b, start, stop, length in plan.chunks:
        out[start:stop] = _attend_many(q[start:stop], k_cache, v_cache, block_tables[b], length, scale, window)
    return out


def _first_key(position: int, window: int) -> int:
    return max(0, position - window + 1) if window else 0


def _attend_one_each(
    q: Float[Tensor, "B N D"],
    k_cache: Float[Tensor, "P S K D"],
    v_cache: Float[Tensor, "P S K D"],
    group: DecodeGroup,
    scale: float,
) -> Float[Tensor, "B N D"]:
    """One query per sequence over the gathered keys of its group."""
    keys, values = (
        cache.flatten(0, 1).index_select(0, group.slots).unflatten(0, (q.shape[0], -1)).transpose(1, 2)
        for cache in (k_cache, v_cache)
    )
    grouped = q.unflatten(1, (k_cache.shape[2], -1))  # the heads that share a KV head are the rows of one product
    out = scaled_dot_product_attention(grouped, keys, values, attn_mask=group.mask, scale=scale)
    return out.flatten(1, 2)


def _attend_many(
    q: Float[Tensor, "n N D"],
    k_cache: Float[Tensor, "P S K D"],
    v_cache: Float[Tensor, "P S K D"],
    block_table: Int[Tensor, " M"],
    length: int,
    scale: float,
    window: int,
) -> Float[Tensor, "n N D"]:
    """The last n queries of one sequence of `length` keys, causal."""
    count, heads, head_dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    base = _first_key(length - count, window) // block_size * block_size
    blocks = block_table[base // block_size : -(-length // block_size)].long()
    keys, values = (cache[blocks].flatten(0, 1)[: length - base].transpose(0, 1) for cache in (k_cache, v_cache))
    parts = []
    for start in range(0, count, _QUERY_STEP):
        rows = q[start : start + _QUERY_STEP]
        low = length - count + start  # position of the first of these queries
        position = torch.arange(low, low + rows.shape[0], device=q.device)[:, None]
        begin, end = _first_key(low, window) - base, low + rows.shape[0] - base
        key = torch.arange(base + begin, base + end, device=q.device)
        seen = key <= position if window == 0 else (key <= position) & (key > position - window)
        grouped = rows.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
        out = scaled_dot_product_attention(
            grouped[None],
            keys[None, :, begin:end],
            values[None, :, begin:end],
            attn_mask=seen.repeat(heads // kv_heads, 1)[None, None],
            scale=scale,
        )
        parts.append(out[0].unflatten(1, (-1, rows.shape[0])).permute(2, 0, 1, 3).reshape(-1, heads, head_dim))
    return torch.cat(parts)
