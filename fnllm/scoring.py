"""Log-probabilities of given tokens: the layer functions of generation, without a cache, and differentiable."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute

from fnllm.ambient import at_device, in_torch_func
from fnllm.batch import Batch
from fnllm.capture import NOTHING, Capture, captures_of_each, expand, union_of_sites, wanted
from fnllm.completion import TokenLogprob
from fnllm.context import Context
from fnllm.distributed import agree, world
from fnllm.edits import Edit, channels_of, edits_of_each
from fnllm.layers import Layers
from fnllm.model import forward, head_logits
from fnllm.numerics import BACKEND, check_numerics, exchanges_for, layers_for
from fnllm.options import positive
from fnllm.parameters import check_model
from fnllm.prompts import normalise
from fnllm.rope import Rope, make_rope, rope_tables
from fnllm.rows import choices_of
from fnllm.sampler import log_normaliser, masked_logits, token_logprobs, top_tokens
from fnllm.taps import Taps, whole_site, whole_sites
from fnllm.tensor_parallel import SINGLE, TensorParallel
from fnllm.trial import check_reached, watched_edits, watched_layers
from fnllm_weights import Params, ParamTree, local_sizes

HEAD_ROWS = 1024  # rows of logits that exist at a time


class Scored(NamedTuple):
    """The log-probabilities of one sequence and its captured activations."""

    logprobs: Float[Tensor, " len_minus_1"]  # natural logs
    captured: dict[str, Tensor]  # site -> Float[Tensor, "tokens *width"]
    captured_at: tuple[int, ...]  # positions of those tokens


class Pass(NamedTuple):
    """One packed forward pass: which sequences, their context, and the hidden states after the final norm."""

    group: list[int]
    ctx: Context
    hidden: Float[Tensor, "T H"]


def score(
    params: Params,
    sequences: Any,
    *,
    layers: Layers | None = None,
    edits: Any = (),
    capture: Any = None,
    checkpoint: bool = False,
    numerics: str = "default",
    max_batched_tokens: int = 16384,
    tp: TensorParallel | None = None,
) -> list[Any]:
    """Natural log-probability of each token given those before it: a Float[Tensor, "len-1"] for each sequence.

    `sequences` is a text, a list of token ids or a chat, or a list of these. The first token of each has no score.
    Scores are computed from the raw logits, without temperature or filters. In grad mode they are differentiable with
    respect to `params.tree` and to the values of edits.

    - `layers`, `edits`: as in `generate`.
    - `capture`: as in `generate`, where a sequence counts as a prompt; the results are then `Scored`.
    - `checkpoint`: recompute each sublayer in the backward pass instead of keeping its activations.
    - `numerics`: as in `EngineOptions`.
    - `max_batched_tokens`: sequences are packed in order into forward passes of at most this many tokens, where each
      counts as long as the longest of its pass. A longer sequence gets its own pass.
    - `tp`: the group of ranks that holds the shards. None: the ranks that torchrun started.

    Under torchrun every rank must make the same call; calls that differ are refused on all ranks. Raises TypeError or
    ValueError for an empty sequence, an id outside the vocabulary, a wrong argument, or gradients over several ranks.
    """
    layers = check_model(params, layers)
    given = list(sequences) if isinstance(sequences, Iterator) else sequences
    if tp is None:
        asked = {"layers": layers, "edits": edits, "capture": capture, "checkpoint": checkpoint}
        options = {"numerics": numerics, "max_batched_tokens": max_batched_tokens}
        agree(params, 0, sequences=given, **asked, options=options)
    ids = normalise(given, params.tokenizer, params.config.vocab_size, name="sequence")
    looked = [expand(params.config, one) for one in captures_of_each(capture, len(ids))]
    results: list[Any] = []
    with at_device(params.tree["norm"].device):
        for one in passes(params, ids, layers, edits, looked, numerics, max_batched_tokens, tp, checkpoint=checkpoint):
            lengths = [len(ids[i]) for i in one.group]
            logprobs = [part[1:] for part in packed_logprobs(params.tree, one.hidden, one.ctx).split(lengths)]
            if capture is None:
                results += logprobs
            else:
                results += with_captured(params.tree, one, logprobs, [looked[i] for i in one.group], lengths)
    return results


def prompt_logprobs(
    params: Params,
    prompts: Sequence[Sequence[int]],
    counts: Sequence[int],
    *,
    layers: Layers,
    edits: Sequence[Sequence[Edit]],
    numerics: str,
    max_batched_tokens: int,
    tp: TensorParallel,
) -> list[tuple[TokenLogprob | None, ...]]:
    """Each prompt token's log-probability and the `counts[i]` most likely ones at its place; None for the first."""
    results: list[tuple[TokenLogprob | None, ...]] = []
    nothing = [NOTHING] * len(prompts)
    with torch.no_grad():
        for one in passes(params, prompts, layers, edits, nothing, numerics, max_batched_tokens, tp):
            most = max(counts[i] for i in one.group)
            parts = zip(*packed_tokens(params.tree, one, most), strict=True)
            ids, values, top_ids, top = (torch.cat(part).tolist() for part in parts)
            start = 0
            for i in one.group:
                found: list[TokenLogprob | None] = [None]
                for row in range(start, start + len(prompts[i]) - 1):
                    best = zip(top_ids[row][: counts[i]], top[row][: counts[i]], strict=True)
                    found.append(TokenLogprob(ids[row], values[row], tuple(best)))
                results.append(tuple(found))
                start += len(prompts[i])
    return results


def passes(
    params: Params,
    ids: Sequence[Sequence[int]],
    layers: Layers,
    edits: Any,
    captures: Sequence[Capture],
    numerics: str,
    max_batched_tokens: int,
    tp: TensorParallel | None,
    *,
    checkpoint: bool = False,
) -> Iterator[Pass]:
    """Packed forward passes over the sequences, in order."""
    check_numerics(numerics)
    limit = positive("max_batched_tokens", max_batched_tokens)
    if checkpoint and in_torch_func():
        raise ValueError("checkpoint=True cannot run inside torch.func; leave it out, or use backward()")
    device = params.tree["norm"].device
    rope = make_rope(params.config, device)
    layers = layers_for(watched_layers(layers), numerics)
    layers = checkpointed(layers) if checkpoint else layers
    tp = exchanges_for(tp or world(params.shard), numerics)
    chosen = edits_of_each(edits, len(ids))
    for edit in (edit for some in chosen for edit in some):
        expand(params.config, Capture(edit.site))
    for group in packs([len(s) for s in ids], limit):
        some = [ids[i] for i in group]
        flat = torch.tensor([token for one in some for token in one], device=device)
        batch = packed_batch(flat, [len(one) for one in some], rope)
        taps = packed_taps(some, [chosen[i] for i in group], [captures[i] for i in group], device)
        reached, sites = {"logits"}, (*taps.capture, *(channel.site for channel in taps.edits))
        taps = taps._replace(edits=watched_edits(taps.edits, reached))
        ctx = context(params, batch, layers, taps, tp)
        hidden = forward(params.tree, ctx)
        check_reached(layers, sites, reached | (taps.captured or {}).keys())
        yield Pass(group, ctx, hidden)


def packs(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Indices grouped in order so that each group, padded to its longest, has at most `limit` tokens, or one sequence.

    Attention pads so (packed_attention.py).

    >>> packs([3, 4, 9, 1, 1, 1, 5], 8)
    [[0, 1], [2], [3, 4, 5], [6]]
    """
    groups: list[list[int]] = []
    longest = 0
    for index, length in enumerate(lengths):
        longest = max(longest, length)
        if not groups or longest * (len(groups[-1]) + 1) > limit:
            groups.append([])
            longest = length
        groups[-1].append(index)
    return groups


def packed_batch(token_ids: Int[Tensor, " T"], lengths: Sequence[int], rope: Rope) -> Batch:
    """The batch of whole sequences laid end to end, for a forward pass without a cache."""
    device = token_ids.device
    lens = torch.tensor(lengths, device=device)
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=device)
    cu_seqlens[1:] = lens.cumsum(0)
    entry = torch.repeat_interleave(torch.arange(len(lengths), device=device), lens, output_size=sum(lengths))
    positions = torch.arange(sum(lengths), device=device) - cu_seqlens[entry]
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


def packed_taps(
    ids: Sequence[Sequence[int]], edits: Sequence[Sequence[Edit]], captures: Sequence[Capture], device: torch.device
) -> Taps:
    """The taps of a packed pass: each sequence's edits, the sites to capture, and which tokens are captured there."""
    channels, tokens, first = channels_of(edits), [], 0
    for one, capture in zip(ids, captures, strict=True):
        tokens.append(first + wanted(capture, len(one), 0, len(one)))
        first += len(one)
    index = torch.from_numpy(np.concatenate(tokens)).to(device)
    return Taps(union_of_sites(captures), channels, choices_of(channels, edits, device), index, {})


def context(
    params: Params,
    batch: Batch,
    layers: Layers,
    taps: Taps | None = None,
    tp: TensorParallel = SINGLE,
) -> Context:
    """The context of a forward pass without a cache."""
    return Context(
        config=params.config,
        sizes=local_sizes(params.config, params.shard),
        tp=tp,
        layers=layers,
        batch=batch,
        cache=None,
        backend=BACKEND,
        max_context=0,
        metadata=None,
        taps=taps or Taps(),
    )


def packed_logprobs(tree: ParamTree, hidden: Float[Tensor, "T H"], ctx: Context) -> Float[Tensor, " T"]:
    """Log-probability of every token of the batch given those before it; 0 for the first of each sequence."""

    def of_targets(logits: Tensor, targets: Tensor) -> Tensor:
        sizes = {"vocab_start": ctx.sizes.vocab_start, "vocab_limit": ctx.config.vocab_size}
        return token_logprobs(logits, targets, tp=ctx.tp, **sizes)

    parts = list(by_head(tree, hidden, ctx, of_targets))
    return torch.where(ctx.batch.positions == 0, 0.0, torch.cat(parts).roll(1))


def packed_tokens(tree: ParamTree, one: Pass, count: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """For the token after each row: (id, log-probability, ids and log-probabilities of the `count` most likely)."""
    ctx = one.ctx

    def of_targets(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        start, limit = ctx.sizes.vocab_start, ctx.config.vocab_size
        values = token_logprobs(logits, targets, vocab_start=start, vocab_limit=limit, tp=ctx.tp)
        raw = masked_logits(logits, start, limit)
        top_ids, top = top_tokens(raw, max(count, 1), vocab_start=start, tp=ctx.tp)
        top = torch.where(values.isnan()[:, None], torch.nan, top - log_normaliser(raw, tp=ctx.tp)[:, None])
        return targets, values, top_ids, top

    return by_head(tree, one.hidden, ctx, of_targets)


def by_head(
    tree: ParamTree, hidden: Float[Tensor, "T H"], ctx: Context, use: Callable[[Tensor, Tensor], Any]
) -> Iterator[Any]:
    """`use(logits, next tokens)` over HEAD_ROWS rows at a time: logits of the whole batch never exist at once."""
    targets = ctx.batch.token_ids.roll(-1)
    quiet = ctx._replace(taps=ctx.taps._replace(capture=()))

    def run(rows: Tensor, index: Tensor, following: Tensor) -> Any:
        at = quiet._replace(batch=ctx.batch.take(index))
        return use(head_logits(tree, rows, at), following)

    index = torch.arange(hidden.shape[0], device=hidden.device)
    parts = zip(hidden.split(HEAD_ROWS), index.split(HEAD_ROWS), targets.split(HEAD_ROWS), strict=True)
    for part in parts:
        if torch.is_grad_enabled() and hidden.shape[0] > HEAD_ROWS and not in_torch_func():
            yield recompute(run, *part, use_reentrant=False)
        else:
            yield run(*part)


def with_captured(
    tree: ParamTree, one: Pass, logprobs: Sequence[Tensor], captures: Sequence[Capture], lengths: Sequence[int]
) -> list[Scored]:
    """The scores of a pass with each sequence's captured activations."""
    ctx = one.ctx
    found = whole_sites(ctx.taps.captured or {}, ctx.config, ctx.tp)
    if "logits" in ctx.taps.capture:
        index = ctx.taps.tokens
        at = ctx._replace(batch=ctx.batch.take(index), taps=ctx.taps._replace(capture=()))
        logits = head_logits(tree, one.hidden[index], at)
        found["logits"] = whole_site("logits", logits, ctx.config, ctx.tp)
    results, first = [], 0
    for values, capture, length in zip(logprobs, captures, lengths, strict=True):
        at = wanted(capture, length, 0, length)
        # Copies: a view would keep, and save, the activations of all sequences of the pass.
        rows = {site: found[site][first : first + len(at)].clone() for site in capture.sites}
        results.append(Scored(values, rows, tuple(at.tolist())))
        first += len(at)
    return results


def checkpointed(layers: Layers) -> Layers:
    """The same layers, with each sublayer recomputed in the backward pass."""

    def wrap(function):
        return lambda p, x, ctx: recompute(function, p, x, ctx, use_reentrant=False)

    return layers._replace(attention=wrap(layers.attention), mlp=wrap(layers.mlp), moe=wrap(layers.moe))
