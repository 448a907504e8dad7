"""Top-k, top-p and min-p without sorting the vocabulary, exact on a sharded vocabulary.

Order the tokens of a row by (logit falling, id rising). Top-k keeps the first k. Top-p, over the probabilities that are
left after top-k, keeps a token when those before it sum to less than p, so the one that crosses p stays, and the first
always. Both keep a prefix of that order, and a prefix is a `Cut`: a logit, and how many of the tokens that equal it.
Min-p keeps tokens whose probability is at least min_p times the largest. These are transformers' rules and order
(temperature, top-k, top-p, min-p), except that ties at a cut are kept by lowest id where transformers keeps all (top-k)
or an arbitrary part (top-p).

The masses of top-p are integers (`masses`), so that their sums are the same in any order: over a row, tiles or ranks.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fnllm.sampler.features import CANDIDATES, SamplerFeatures
from fnllm.sampler.rows import SamplerRows
from fnllm.tensor_parallel import TensorParallel
from fnllm_kernels.order_keys import from_sortable

# One unit of mass is 2**-40 of the likeliest token's: 2**22 tokens of full mass still fit in 63 bits.
MASS_ONE = 2.0**40
# Smaller temperatures act like this one; it keeps the division below out of float32's denormals, which GPUs may flush.
SMALLEST_TEMPERATURE = 1e-30
EVERYTHING = 2**62
MINUS_INFINITY = -0x7F800001  # order_keys.sortable of it


class Cut(NamedTuple):
    """Keeps logits above `value` and, by lowest id, `quota` of those equal to it."""

    value: Float[Tensor, " B"]
    quota: Int[Tensor, " B"]


def keep_mask(
    logits: Float[Tensor, "B V"],
    rows: SamplerRows,
    *,
    features: SamplerFeatures,
    tp: TensorParallel,
    coarse: bool = False,
) -> Bool[Tensor, "B V"]:
    """Which tokens of this rank's slice each row may draw. `logits` are before temperature and without NaN.

    `coarse` says that the logits are values of bfloat16, which halves the search.
    """
    top = tp.all_reduce_max(logits.amax(-1))
    temperature = rows.temperature.clamp(min=SMALLEST_TEMPERATURE)
    keep = torch.ones_like(logits, dtype=torch.bool)
    if features.top_k or features.top_p:
        find = _cut_of_candidates if features.candidates else _cut_by_search
        cut = find(logits, top, temperature, rows, features, tp, coarse)
        keep = _within(logits, cut, tp)
    if features.min_p:
        # As logarithms, so that a small temperature does not underflow both sides to equal zeros.
        floor = top + temperature * torch.log(rows.min_p)
        keep = keep & ((logits >= floor[:, None]) | (rows.min_p[:, None] <= 0) | (logits == top[:, None]))
    return keep


def masses(
    logits: Float[Tensor, "B W"], top: Float[Tensor, " B"], temperature: Float[Tensor, " B"]
) -> Float[Tensor, "B W"]:
    """exp((logits - top) / temperature) in whole units of 2**-40, as float32, which holds each exactly."""
    # Equal to the top, or an infinite top: the difference is 0 and not inf - inf.
    below = torch.where(logits == top[:, None], 0.0, logits - top[:, None])
    return torch.floor(torch.exp(below / temperature[:, None]) * MASS_ONE)


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
    logits: Tensor, top: Tensor, temperature: Tensor, rows: SamplerRows, features: SamplerFeatures, tp: TensorParallel,
    coarse: bool,
) -> Cut:  # fmt: skip
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
    logits: Tensor, top: Tensor, temperature: Tensor, rows: SamplerRows, features: SamplerFeatures, tp: TensorParallel,
    coarse: bool,
) -> Cut:  # fmt: skip
    """The cut by a search over the bits of the logits: each pass counts, or weighs, what lies above a few values."""
    mass = masses(logits, top, temperature)

    def count_above(value: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
        return (logits > value[:, None]).sum(-1)

    def mass_above(value: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
        return torch.where(logits > value[:, None], mass, 0.0).long().sum(-1)

    k = torch.where(rows.top_k > 0, rows.top_k.long(), EVERYTHING)
    value = _lowest(count_above, k, tp, coarse)
    quota = k - tp.all_reduce(count_above(value))
    if not features.top_p:
        return Cut(value, quota)
    each = masses(value[:, None], top, temperature).squeeze(1).long()
    total = tp.all_reduce(mass_above(value)) + torch.where(rows.top_k > 0, quota * each, 0)
    target = _target(rows.top_p, total)
    value_p = _lowest(mass_above, target, tp, coarse)
    each = masses(value_p[:, None], top, temperature).squeeze(1).long().clamp(min=1)
    quota_p = (target - tp.all_reduce(mass_above(value_p)) + each - 1) // each
    # Both are prefixes of one order: the shorter one is what passes both.
    tied = torch.minimum(quota, quota_p)
    quota = torch.where(value > value_p, quota, torch.where(value_p > value, quota_p, tied))
    return Cut(torch.maximum(value, value_p), quota)


def _lowest(
    measure_above: Callable[[Float[Tensor, " B"]], Int[Tensor, " B"]],
    target: Int[Tensor, " B"],
    tp: TensorParallel,
    coarse: bool,
) -> Float[Tensor, " B"]:
    """The lowest float above which the measure, summed over the ranks, is less than `target` (>= 1).

    That is the logit at which the running measure of the falling order reaches `target`, or -inf if it never does. Found
    digit by digit from the top of `order_keys.sortable`: 32 bits, or the upper 16 where all logits are bfloat16's.
    """
    # A pass reads all logits once. A digit of two bits takes three probes in one pass: fewer passes, which is what costs
    # on a GPU, for more comparisons, which is what costs on a CPU.
    width = 1 if target.device.type == "cpu" else 2
    bits, unit = (16, 2**16) if coarse else (32, 1)
    low = torch.full_like(target, MINUS_INFINITY // unit)
    for shift in reversed(range(0, bits, width)):
        probes = [_from_digits(low + (digit << shift) - 1, unit) for digit in range(1, 1 << width)]
        measures = tp.all_reduce(torch.stack([measure_above(probe) for probe in probes]))
        low = low + ((measures >= target).sum(0) << shift)
    return _from_digits(low, unit)


def _from_digits(key: Int[Tensor, " B"], unit: int) -> Float[Tensor, " B"]:
    """The float whose sortable key, cut to its upper bits when `unit` > 1, is `key`; NaN (above nothing) past infinity."""
    # bfloat16 values have 16 zero bits at the end, which the key of a negative one has turned to ones.
    filled = key * unit + torch.where(key < 0, unit - 1, 0)
    return from_sortable(filled.clamp(max=2**31 - 1).int())
