"""One token per row from logits, as pure functions that trace into the decode step."""

from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fnllm.sampler.features import SamplerFeatures
from fnllm.sampler.filters import Source, keep_mask
from fnllm.sampler.history import History, penalise, token_counts
from fnllm.sampler.logprobs import log_normaliser, logits_at, masked_logits, top_tokens, valid_columns
from fnllm.sampler.rows import SamplerRows
from fnllm.tensor_parallel import SINGLE, TensorParallel
from fnllm_kernels.noise import gumbel_noise
from fnllm_kernels.order_keys import NAN_KEY, or_failed, pack, packed_ids
from fnllm_kernels.sample_logits import sample_logits


class Sampled(NamedTuple):
    """The result of `sample`, equal on every rank; natural log-probabilities under the raw logits."""

    ids: Int[Tensor, " B"]
    logprob: Float[Tensor, " B"] | None = None
    top_ids: Int[Tensor, "B n"] | None = None
    top_logprobs: Float[Tensor, "B n"] | None = None


def sample(
    logits: Float[Tensor, "B V"],
    rows: SamplerRows,
    positions: Int[Tensor, " B"],
    *,
    features: SamplerFeatures,
    vocab_limit: int,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    history: History | None = None,
    tp: TensorParallel = SINGLE,
    kernels: bool | None = None,
) -> Sampled:
    """Draw one id per row from this rank's slice of the logits, [vocab_start, vocab_start + V), and the other ranks'.

    `rows` and `history` hold B rows; `positions` are those of the drawn tokens in their sequences; ids from
    `vocab_limit` on are never drawn. In order: logits_fn, penalties, bias, min_tokens, temperature, top-k, top-p,
    min-p. Temperature 0 takes the largest logit, the lowest id on ties, whatever the filters. Instead of an id, a row
    gets NAN_ID if one of its logits, before or after logits_fn, is NaN or +inf, which have no softmax, and NOTHING_ID
    if all are -inf.

    Ranks exchange one integer per row, and for filters and log-probabilities a few more, but no logits. Only
    `logits_fn` gathers them, since it gets the first `vocab_size` (default: vocab_limit) columns of the vocabulary.

    With `kernels` (default: on a GPU) noise and argmax are `fnllm::sample_logits`, one pass over the logits.

    Raises:
        ValueError: if `features` needs a history and there is none.
    """
    if features.penalties and history is None:
        raise ValueError("features.penalties needs history; pass a History of the batch's rows")
    kernels = logits.is_cuda if kernels is None else kernels
    if kernels and not needs_logits(features):
        # Nothing reads the logits but the draw: they are not copied to float32.
        source = Source(logits, valid_columns(logits.shape[1], vocab_start, vocab_limit))
        found = draw(
            logits, rows, positions, features=features, vocab_start=vocab_start, tp=tp, source=source, kernels=True
        )
        return Sampled(found)
    width = vocab_limit if vocab_size is None else vocab_size
    valid = valid_columns(logits.shape[1], vocab_start, vocab_limit)
    broken = has_no_maximum(logits, valid)
    # Log-probabilities are those of the model's whole vocabulary, which scoring sees, too.
    raw = masked_logits(logits, vocab_start, width)
    if logits.dtype == torch.float64:  # log-probabilities keep their digits; draws and their filters are of float32
        logits = logits.float()
    drawable = raw.float() if width == vocab_limit else masked_logits(raw.float(), vocab_start, vocab_limit)
    adjusted = drawable
    if features.logits_fns:
        adjusted = _apply_logits_fns(drawable, rows, history, features, vocab_start, width, tp)
        broken = broken | has_no_maximum(adjusted, valid)
    if features.penalties:
        counts, seen = token_counts(history, vocab_start, raw.shape[1])
        adjusted = penalise(adjusted, counts, seen, rows)
    if features.bias:
        adjusted = _add_at(adjusted, rows.bias_ids, rows.bias_values, vocab_start)
    if features.stops:
        early = (positions < rows.min_position)[:, None] & (rows.stop_ids >= 0)
        adjusted = _add_at(adjusted, rows.stop_ids, torch.where(early, -torch.inf, 0.0), vocab_start)
    if adjusted is not drawable:
        # Nothing above may bring back what must not be drawn.
        adjusted = masked_logits(adjusted, vocab_start, vocab_limit)
    source = Source(adjusted, adjusted.shape[1])
    if adjusted is drawable:
        source = Source(logits, valid)
    ids = draw(
        adjusted, rows, positions, features=features, vocab_start=vocab_start, tp=tp, source=source, kernels=kernels,
        broken=broken,
    )  # fmt: skip
    if features.logprobs is None:
        return Sampled(ids)
    normaliser = log_normaliser(raw, tp=tp)
    logprob = logits_at(raw, ids.clamp(min=0), vocab_start=vocab_start, tp=tp) - normaliser
    if features.logprobs == 0:
        return Sampled(ids, logprob)
    top_ids, top = top_tokens(raw, features.logprobs, vocab_start=vocab_start, tp=tp)
    return Sampled(ids, logprob, top_ids, top - normaliser[:, None])


def draw(
    logits: Float[Tensor, "B V"],
    rows: SamplerRows,
    positions: Int[Tensor, " B"],
    *,
    features: SamplerFeatures,
    vocab_start: int = 0,
    tp: TensorParallel = SINGLE,
    source: Source | None = None,
    kernels: bool | None = None,
    broken: Bool[Tensor, " B"] | None = None,
) -> Int[Tensor, " B"]:
    """Temperature, filters and the draw, for float32 logits without NaN; `source` as in `keep_mask`.

    Rows that are `broken` on any rank get NAN_ID on all.
    """
    source = Source(logits, logits.shape[1]) if source is None else source
    if features.top_k or features.top_p or features.min_p:
        keep = keep_mask(logits, rows, features=features, tp=tp, source=source)
        logits = torch.where(keep, logits, -torch.inf)
        source = Source(logits, logits.shape[1])
    if logits.is_cuda if kernels is None else kernels:
        temperature = rows.temperature if features.noise else torch.zeros_like(rows.temperature)
        key = sample_logits(source.logits, temperature, rows.seed, positions, vocab_start, source.valid)
        if broken is not None:
            key = torch.where(broken, NAN_KEY, key)
        return packed_ids(tp.all_reduce_max(key))
    if features.noise:
        ids = vocab_start + torch.arange(logits.shape[1], device=logits.device)
        # logits + T * noise has the argmax of logits / T + noise, needs no division and is exact at T = 0.
        logits = logits + rows.temperature[:, None] * gumbel_noise(rows.seed, positions, ids)
    index = logits.argmax(-1, keepdim=True)  # the first of equal ones
    key = or_failed(pack(logits.gather(1, index), vocab_start + index).squeeze(1), broken)
    return packed_ids(tp.all_reduce_max(key))


def has_no_maximum(logits: Float[Tensor, "B V"], valid: int) -> Bool[Tensor, " B"]:
    """Which rows have NaN or +inf among their first `valid` columns; a maximum is one pass and passes NaN on."""
    if not valid:
        return torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)
    return ~(logits[:, :valid].amax(-1) < torch.inf)


def needs_logits(features: SamplerFeatures) -> bool:
    """Whether anything but greedy and temperature is on."""
    return replace(features, noise=False) != SamplerFeatures()


def _apply_logits_fns(
    logits: Float[Tensor, "B V"],
    rows: SamplerRows,
    history: History | None,
    features: SamplerFeatures,
    vocab_start: int,
    width: int,
    tp: TensorParallel,
) -> Float[Tensor, "B V"]:
    whole = tp.all_gather(logits, -1)
    changed = whole[:, :width]
    for i, fn in enumerate(features.logits_fns):
        # Copies, which cost a compiled step nothing where nobody writes to them: other rows have the same logits, and
        # log-probabilities and penalties read logits and history afterwards.
        own = None if history is None else History(*(x.clone() for x in history))
        changed = torch.where((rows.logits_fn == i)[:, None], fn(whole[:, :width].clone(), own), changed)
    changed = torch.cat([changed, whole[:, width:]], -1)
    return changed[:, vocab_start : vocab_start + logits.shape[1]]


def _add_at(
    logits: Float[Tensor, "B V"], ids: Int[Tensor, "B K"], values: Float[Tensor, "B K"], vocab_start: int
) -> Float[Tensor, "B V"]:
    """Logits plus `values` at `ids`, where those are in this rank's slice (padding, -1, is in none)."""
    local = ids - vocab_start
    here = (ids >= 0) & (local >= 0) & (local < logits.shape[1])
    return logits.scatter_add(1, local.clamp(0, logits.shape[1] - 1), torch.where(here, values.to(logits.dtype), 0.0))
