"""Log-probabilities of given tokens: the same functions as generation, without a cache, and differentiable."""

from collections.abc import Sequence

import torch
from fnllm_weights import Params, local_sizes
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute

from fnllm.batch import Batch
from fnllm.context import Context
from fnllm.distributed import world
from fnllm.layers import Layers
from fnllm.model import forward
from fnllm.prompts import normalise
from fnllm.rope import Rope, make_rope, rope_tables
from fnllm.taps import Edit, Taps
from fnllm.tensor_parallel import SINGLE, TensorParallel

HEAD_ROWS = 1024  # rows of logits that exist at a time


def score(
    params: Params,
    sequences: Sequence[Sequence[int]],
    *,
    layers: Layers | None = None,
    edits: tuple[Edit, ...] = (),
    checkpoint: bool = False,
    max_batched_tokens: int = 16384,
    tp: TensorParallel | None = None,
) -> list[Float[Tensor, " len_minus_1"]]:
    """Log-probability of each token after the first, given those before it, for each sequence of token ids.

    From raw logits, without temperature or filters. Differentiable with respect to `params.tree` in grad mode;
    `checkpoint` recomputes each sublayer in the backward pass instead of keeping its activations. Sequences are packed
    into passes of at most `max_batched_tokens` tokens (a longer one makes a pass of its own).
    Raises ValueError for an empty sequence or an id outside the vocabulary.
    """
    ids = normalise(list(sequences), params.tokenizer, params.config.vocab_size).ids
    rope = make_rope(params.config, params.tree["norm"].device)
    layers = layers or Layers()
    if checkpoint:
        layers = checkpointed(layers)
    results: list[Tensor] = []
    for group in packs([len(s) for s in ids], max_batched_tokens):
        flat = torch.tensor([t for i in group for t in ids[i]], device=params.tree["norm"].device)
        lengths = [len(ids[i]) for i in group]
        batch = packed_batch(flat, lengths, rope)
        logprobs = packed_logprobs(params.tree, context(params, batch, layers, edits, tp or world(params.shard)))
        results += [part[1:] for part in logprobs.split(lengths)]
    return results


def packs(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Indices grouped in order so that each group's lengths sum to at most `limit`, one at least in each.

    >>> packs([3, 4, 9, 1], 8)
    [[0, 1], [2], [3]]
    """
    groups: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        if not groups or length > room:
            groups.append([])
            room = limit
        groups[-1].append(index)
        room -= length
    return groups


def packed_batch(token_ids: Int[Tensor, " T"], lengths: Sequence[int], rope: Rope) -> Batch:
    """The batch of whole sequences laid end to end, for a forward pass without a cache."""
    device = token_ids.device
    lens = torch.tensor(lengths, device=device)
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=device)
    cu_seqlens[1:] = lens.cumsum(0)
    entry = torch.repeat_interleave(torch.arange(len(lengths), device=device), lens, output_size=token_ids.shape[0])
    positions = torch.arange(token_ids.shape[0], device=device) - cu_seqlens[entry]
    cos, sin = rope_tables(rope, positions, lens[entry])
    return Batch(
        token_ids=token_ids,
        positions=positions,
        entry=entry,
        slots=None,
        cu_seqlens=cu_seqlens,
        context_lens=lens.int(),
        block_tables=None,
        cos=cos,
        sin=sin,
        max_seqlen=max(lengths),
    )


def context(params: Params, batch: Batch, layers: Layers, edits: tuple[Edit, ...] = (), tp: TensorParallel = SINGLE) -> Context:
    """The context of a forward pass without a cache."""
    return Context(
        config=params.config,
        sizes=local_sizes(params.config, params.shard),
        tp=tp,
        layers=layers,
        batch=batch,
        cache=None,
        backend="packed",
        metadata=None,
        taps=Taps(edits=edits, captured={}),
    )


def packed_logprobs(tree: dict, ctx: Context) -> Float[Tensor, " T"]:
    """Log-probability of every token of the batch given those before it; 0 for the first of each sequence."""
    hidden = forward(tree, ctx)
    targets = ctx.batch.token_ids.roll(-1)
    parts = []
    for rows, wanted in zip(hidden.split(HEAD_ROWS), targets.split(HEAD_ROWS), strict=True):
        if torch.is_grad_enabled() and hidden.shape[0] > HEAD_ROWS:
            parts.append(recompute(head_logprobs, tree["lm_head"], rows, wanted, ctx, use_reentrant=False))
        else:
            parts.append(head_logprobs(tree["lm_head"], rows, wanted, ctx))
    return torch.where(ctx.batch.positions == 0, 0.0, torch.cat(parts).roll(1))


def head_logprobs(
    head: Float[Tensor, "V H"], hidden: Float[Tensor, "B H"], targets: Int[Tensor, " B"], ctx: Context
) -> Float[Tensor, " B"]:
    """Log-softmax of the head's logits at the targets, over a vocabulary that may be sharded."""
    logits = ctx.layers.lm_head(head, hidden, ctx)
    logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    local = targets - ctx.sizes.vocab_start
    real = torch.arange(logits.shape[1], device=logits.device) + ctx.sizes.vocab_start < ctx.config.vocab_size
    logits = torch.where(real, logits, -torch.inf)
    top = ctx.tp.all_reduce_max(logits.detach().amax(-1))
    total = ctx.tp.all_reduce((logits - top[:, None]).exp().sum(-1))
    mine = (local >= 0) & (local < logits.shape[1])
    picked = logits.gather(1, torch.where(mine, local, 0)[:, None])[:, 0]
    return ctx.tp.all_reduce(torch.where(mine, picked - top, 0.0)) - total.log()


def checkpointed(layers: Layers) -> Layers:
    """The same layers, with each sublayer recomputed in the backward pass."""

    def wrap(function):
        return lambda p, x, ctx: recompute(function, p, x, ctx, use_reentrant=False)

    return layers._replace(attention=wrap(layers.attention), mlp=wrap(layers.mlp), moe=wrap(layers.moe))
