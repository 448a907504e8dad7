"""Which parts of the sampler a batch needs: a static value, so that a step compiles only those.

A feature that is on changes nothing for a row that does not ask for it; so any superset of what a batch needs gives the
same tokens, and a step may be compiled for a few broad sets.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fnllm.edits import full_name

# Rows that filter and all have 1 <= top_k <= CANDIDATES are filtered among their CANDIDATES largest logits, which is
# exact; any other row needs a search over the whole vocabulary.
CANDIDATES = 128


@dataclass(frozen=True)
class SamplerFeatures:
    """Static switches of `sample`. The default is greedy."""

    noise: bool = False  # some row has temperature > 0
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    candidates: bool = False  # every row with top_k or top_p has 1 <= top_k <= CANDIDATES
    penalties: bool = False  # needs a History
    bias: int = 0  # width of SamplerRows.bias_ids
    stops: int = 0  # width of SamplerRows.stop_ids, masked until min_tokens
    logprobs: int | None = None  # None: none; 0: the drawn token's; n: also those of the n most likely
    logits_fns: tuple[Callable, ...] = ()  # SamplerRows.logits_fn indexes this


def features_of(samplings: Sequence[Any], *, eos_token_ids: Sequence[int] = ()) -> SamplerFeatures:
    """The smallest features that serve objects with the fields of `Sampling`; widths are powers of two."""
    drawn = [s for s in samplings if s.temperature > 0]
    filtered = [s for s in drawn if s.top_k > 0 or s.top_p < 1]
    logprobs = [s.logprobs for s in samplings if s.logprobs is not None]
    return SamplerFeatures(
        noise=bool(drawn),
        top_k=any(s.top_k > 0 for s in drawn),
        top_p=any(s.top_p < 1 for s in drawn),
        min_p=any(s.min_p > 0 for s in drawn),
        candidates=bool(filtered) and all(1 <= s.top_k <= CANDIDATES for s in filtered),
        penalties=any(has_penalty(s) for s in samplings),
        bias=_width(len(s.logit_bias) for s in samplings),
        stops=_width(len(stop_ids(s, eos_token_ids)) for s in samplings),
        logprobs=max(logprobs, default=None),
        logits_fns=in_one_order(s.logits_fn for s in samplings if s.logits_fn is not None),
    )


def union(a: SamplerFeatures, b: SamplerFeatures) -> SamplerFeatures:
    """The smallest features that serve both `a`'s rows and `b`'s; `logits_fns` may have other indices than in `a`."""
    filtering = [f for f in (a, b) if f.top_k or f.top_p]
    logprobs = [f.logprobs for f in (a, b) if f.logprobs is not None]
    return SamplerFeatures(
        noise=a.noise or b.noise,
        top_k=a.top_k or b.top_k,
        top_p=a.top_p or b.top_p,
        min_p=a.min_p or b.min_p,
        candidates=bool(filtering) and all(f.candidates for f in filtering),
        penalties=a.penalties or b.penalties,
        bias=max(a.bias, b.bias),
        stops=max(a.stops, b.stops),
        logprobs=max(logprobs, default=None),
        logits_fns=in_one_order(a.logits_fns + b.logits_fns),
    )


def in_one_order(functions: Iterable[Callable]) -> tuple[Callable, ...]:
    """Each function once, in an order independent of the rows, since a step would be compiled for each order.

    The order is by name, for the compiler's cache on disk, and by hash where names are equal, as for closures.
    """
    return tuple(sorted(dict.fromkeys(functions), key=lambda function: (full_name(function), hash(function))))


def rounded(features: SamplerFeatures) -> SamplerFeatures:
    """A superset of `features` out of few, so that a step is compiled few times.

    Any filter brings all filters; the numbers of log-probabilities are rounded up to a power of two.
    """
    filters = features.top_k or features.top_p or features.min_p
    logprobs = features.logprobs
    return replace(
        features,
        top_k=filters,
        top_p=filters,
        min_p=filters,
        candidates=features.candidates or (filters and not (features.top_k or features.top_p)),
        logprobs=logprobs if not logprobs else _width([logprobs]),
    )


def stop_ids(sampling: Any, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    """The token ids that a row may not draw before its `min_tokens`: those that would end it."""
    if sampling.min_tokens <= 0:
        return ()
    eos = () if sampling.ignore_eos else tuple(eos_token_ids)
    return tuple(sorted({*eos, *sampling.stop_token_ids}))


def has_penalty(s: Any) -> bool:
    """Whether a request asks for one of the three penalties."""
    return s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0


def _width(counts: Any) -> int:
    most = max(counts, default=0)
    return 1 << (most - 1).bit_length() if most else 0
