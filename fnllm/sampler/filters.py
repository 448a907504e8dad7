"""Top-k, top-p and min-p without sorting the vocabulary, exact on a sharded vocabulary.

Order the tokens of a row by (logit falling, id rising). Top-k keeps the first k. Top-p, over the probabilities that are
left after top-k, keeps a token when those before it sum to less than p, so the one that crosses p stays, and the first
always. Both keep a prefix of that order, and a prefix is a `Cut`: a logit, and how many of the tokens that equal it.
Min-p keeps tokens whose probability is at least min_p times the largest. These are transformers' rules and order
(temperature, top-k, top-p, min-p), except that ties at a cut are kept by lowest id where transformers keeps all (top-k)
or an arbitrary part (top-p).

The masses of top-p are integers (`masses`), so that their sums are the same in any order: over a row, tiles or ranks.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fnllm.sampler.features import CANDIDATES, SamplerFeatures
from fnllm.sampler.rows import SamplerRows
from fnllm.tensor_parallel import TensorParallel
from fnllm_kernels.threshold import DIGIT, MINUS_INFINITY, key_to_float, masses, measure_above, reach, search_range

EVERYTHING = 2**62


class Cut(NamedTuple):
    """Keeps logits above `value` and, by lowest id, `quota` of those equal to it."""

    value: Float[Tensor, " B"]
    quota: Int[Tensor, " B"]


class Source(NamedTuple):
    """The logits as the search reads them: the first `valid` columns of `logits`, the others being -inf."""

    logits: Float[Tensor, "B V"]
    valid: int


def keep_mask(
    logits: Float[Tensor, "B V"],
    rows: SamplerRows,
    *,
    features: SamplerFeatures,
    tp: TensorParallel,
    source: Source | None = None,
) -> Bool[Tensor, "B V"]:
    """Which tokens of this rank's slice each row may draw. `logits` are float32, before temperature, without NaN.

    `source` may give the same values in bfloat16, which halves what the search reads and how often.
    """
    source = Source(logits, logits.shape[1]) if source is None else source
    top = tp.all_reduce_max(logits.amax(-1))
    # Not 0, which divides, nor denormal, which a GPU may flush to 0; filters do not matter to such rows.
    temperature = rows.temperature.clamp(min=1e-30)
    keep = torch.ones_like(logits, dtype=torch.bool)
    if features.top_k or features.top_p:
        if features.candidates:
            cut = _cut_of_candidates(logits, top, temperature, rows, tp)
        else:
            cut = _cut_by_search(source, top, temperature, rows, features, tp)
        keep = _within(logits, cut, tp)
    if features.min_p:
        # As logarithms, so that a small temperature does not underflow both sides to equal zeros.
        floor = top + temperature * torch.log(rows.min_p)
        keep = keep & ((logits >= floor[:, None]) | (rows.min_p[:, None] <= 0) | (logits == top[:, None]))
    return keep


def _within(logits: Float[Tensor, "B V"], cut: Cut, tp: TensorParallel) -> Bool[Tensor, "B V"]:
    ties = logits == cut.value[:, None]
    rank_of_tie = ties.long().cumsum(-1)
    if tp.size > 1:
        # Ids rise with the ranks: the ties of lower ranks come first.
        per_rank = tp.all_gather(rank_of_tie[:, -1:], -1)
        rank_of_tie = rank_of_tie + per_rank[:, : tp.rank].sum(-1, keepdim=True)
    return (logits > cut.value[:, None]) | (ties & (rank_of_tie <= cut.quota[:, None]))


def _target(p: Float[Tensor, " B"], total: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
    """Masses before a kept token sum to less than this; at least 1, so that the first token stays. p >= 1 keeps all."""
    wanted = torch.ceil(p.double() * total.double()).long().clamp(min=1)
    return torch.where(p >= 1, EVERYTHING, wanted)


def _cut_of_candidates(
    logits: Float[Tensor, "B V"],
    top: Float[Tensor, " B"],
    temperature: Float[Tensor, " B"],
    rows: SamplerRows,
    tp: TensorParallel,
) -> Cut:
    """The cut from each row's CANDIDATES largest values; exact for rows with 1 <= top_k <= CANDIDATES or no filter."""
    values = torch.topk(logits, min(CANDIDATES, logits.shape[-1]), dim=-1).values
    if tp.size > 1:
        gathered = tp.all_gather(values, -1)
        values = torch.topk(gathered, min(CANDIDATES, gathered.shape[-1]), dim=-1).values
    place = torch.arange(values.shape[-1], device=values.device)[None, :]
    unfiltered = (rows.top_k <= 0) & (rows.top_p >= 1)
    k = torch.where(rows.top_k > 0, rows.top_k.long(), values.shape[-1])[:, None]
    keep = place < k
    mass = masses(values, top, temperature).long() * keep
    before = mass.cumsum(-1) - mass
    keep = keep & (before < _target(rows.top_p, mass.sum(-1))[:, None])
    kept = keep.sum(-1)
    value = values.gather(1, kept[:, None] - 1).squeeze(1)
    quota = kept - (values > value[:, None]).sum(-1)
    return Cut(torch.where(unfiltered, -torch.inf, value), torch.where(unfiltered, EVERYTHING, quota))


def _cut_by_search(
    source: Source,
    top: Float[Tensor, " B"],
    temperature: Float[Tensor, " B"],
    rows: SamplerRows,
    features: SamplerFeatures,
    tp: TensorParallel,
) -> Cut:
    """The cut by a search over the bits of the logits: each pass counts, or weighs, what lies above a few values."""

    def reach_target(target: Int[Tensor, " B"], by_mass: bool) -> tuple[Float[Tensor, " B"], Int[Tensor, " B"]]:
        if tp.size == 1:
            return reach(source.logits, top, temperature, target, by_mass, source.valid)
        return _reach_over_ranks(source, top, temperature, target, by_mass, tp)

    def mass_of(value: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
        return masses(value[:, None], top, temperature).squeeze(1).long()

    value, quota = torch.full_like(top, -torch.inf), torch.full_like(rows.top_k, EVERYTHING, dtype=torch.int64)
    if features.top_k:
        k = torch.where(rows.top_k > 0, rows.top_k.long(), EVERYTHING)
        value, count = reach_target(k, False)
        quota = k - count
    if not features.top_p:
        return Cut(value, quota)
    above = measure_above(source.logits, top, temperature, value[:, None], True, source.valid)
    ties = torch.where(rows.top_k > 0, quota * mass_of(value), 0)
    target = _target(rows.top_p, tp.all_reduce(above.squeeze(1)) + ties)
    value_p, before = reach_target(target, True)
    each = mass_of(value_p).clamp(min=1)
    quota_p = (target - before + each - 1) // each
    # Both are prefixes of one order: the shorter one is what passes both.
    tied = torch.minimum(quota, quota_p)
    quota = torch.where(value > value_p, quota, torch.where(value_p > value, quota_p, tied))
    return Cut(torch.maximum(value, value_p), quota)


def _reach_over_ranks(
    source: Source,
    top: Float[Tensor, " B"],
    temperature: Float[Tensor, " B"],
    target: Int[Tensor, " B"],
    by_mass: bool,
    tp: TensorParallel,
) -> tuple[Float[Tensor, " B"], Int[Tensor, " B"]]:
    """`fnllm_kernels.threshold.reach` over all ranks' slices: the same search, the measures summed after each pass."""
    bits, unit = search_range(source.logits.dtype)
    digits = torch.arange(1, 1 << DIGIT, device=target.device)
    key = torch.full_like(target, MINUS_INFINITY // unit)
    most = torch.full_like(target, -1)
    for shift in reversed(range(0, bits, DIGIT)):
        probes = key_to_float(key[:, None] + (digits << shift) - 1, unit)
        measures = tp.all_reduce(measure_above(source.logits, top, temperature, probes, by_mass, source.valid))
        reached = measures >= target[:, None]
        key = key + (reached.sum(-1) << shift)
        # The key that the search ends at was a probe of some pass: of those below the target it measures most.
        most = torch.maximum(most, torch.where(reached, -1, measures).amax(-1))
    return key_to_float(key, unit), most
