"""What a soak run is checked against: each token by a forward pass over its whole sequence, in float32 on the CPU.

No cache, block, batch, graph or GPU kernel takes part. Of the engine's own functions only the layers (`score`) and the
noise are used; penalties, filters and endings are written out anew. The engine's logits may be off by `tolerance`
each: a token passes if some such logits give it, and counts as excused if those of the reference do not.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

import fnllm
from fnllm.sampler import gumbel_noise

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.12}  # of a logit; see `largest_logprob_error` in the results


class Drawn(NamedTuple):
    """What the engine said of a token that it drew."""

    position: int
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Turn(NamedTuple):
    """A sequence's tokens and how those from `start` on were asked for."""

    tokens: tuple[int, ...]
    start: int  # tokens before are given, or were drawn otherwise
    prompt_length: int
    most: int  # new tokens of this turn
    capacity: int  # tokens of any sequence
    sampling: fnllm.Sampling
    seed: int
    edits: tuple[fnllm.Edit, ...] = ()
    drawn: tuple[Drawn, ...] = ()
    ended: tuple[str, int | None] | None = None  # why, and by which stop id; None: it runs, or the end is not checked
    label: Mapping[str, Any] = {}  # where in the run this was

    @property
    def limit(self) -> int:
        """The length at which it ends."""
        return min(self.prompt_length + self.most, self.capacity)


class Verdict(NamedTuple):
    """What was found in some turns."""

    tokens: int = 0  # checked
    excused: int = 0  # not the reference's own choice, but within tolerance
    largest_logprob_error: float = 0.0
    faults: tuple[dict, ...] = ()


def reference_of(params: fnllm.Params) -> fnllm.Params:
    """The same weights, as they are now, in float32 on the CPU."""
    made: dict[int, Tensor] = {}  # a tied weight stays one tensor

    def copy(part: Any) -> Any:
        if isinstance(part, Tensor):
            return made.setdefault(id(part), part.detach().to("cpu", torch.float32, copy=True))
        if isinstance(part, dict):
            return {key: copy(value) for key, value in part.items()}
        return [copy(value) for value in part]

    return params._replace(tree=copy(params.tree), workspace={})


def judge(reference: fnllm.Params, turns: Sequence[Turn], tolerance: float) -> Verdict:
    """Check turns against the reference's logits."""
    turns = [turn for turn in turns if len(turn.tokens) > turn.start or turn.ended]
    asked = [fnllm.Capture("logits", tuple(range(turn.start - 1, max(turn.start, len(turn.tokens) - 1))))
             for turn in turns]  # fmt: skip
    with torch.no_grad():
        scored = fnllm.score(
            reference, [turn.tokens for turn in turns], edits=[turn.edits for turn in turns], capture=asked
        )
    tokens, excused, worst, faults = 0, 0, 0.0, []
    for turn, one in zip(turns, scored, strict=True):
        logits = one.captured["logits"][: len(turn.tokens) - turn.start].float()
        found = [*wrong_ending(turn, frozenset(reference.config.eos_token_ids))]
        if len(logits):
            problems, exact = wrong_tokens(turn, logits, tolerance, reference.config.eos_token_ids)
            tokens, excused = tokens + len(logits), excused + len(logits) - exact - len(problems)
            found += problems
        for drawn in turn.drawn:
            if drawn.position >= turn.start:
                error, problem = wrong_logprobs(drawn, logits[drawn.position - turn.start], 2 * tolerance)
                worst = max(worst, error)
                found += [problem] if problem else []
        for problem in found:
            faults.append(dict(
                problem, **turn.label, tokens=list(turn.tokens), start=turn.start, prompt_length=turn.prompt_length,
                limit=turn.limit, sampling=str(turn.sampling), seed=turn.seed, edits=[e.site for e in turn.edits],
            ))  # fmt: skip
    return Verdict(tokens, excused, worst, tuple(faults))


def stop_ids(sampling: fnllm.Sampling, eos: Sequence[int]) -> frozenset[int]:
    return frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else frozenset(eos))


def wrong_ending(turn: Turn, eos: frozenset[int]) -> list[dict]:
    """Whether the turn ended where it should: at the first stop id that may end it, else at its limit."""
    stops, first = stop_ids(turn.sampling, tuple(eos)), turn.prompt_length + turn.sampling.min_tokens
    places = [p for p in range(max(first, turn.start), len(turn.tokens)) if turn.tokens[p] in stops]
    problems = []
    if any(place != len(turn.tokens) - 1 for place in places):
        problems.append(dict(kind="ran past a stop id", position=places[0]))
    if len(turn.tokens) > max(turn.limit, turn.prompt_length):
        problems.append(dict(kind="ran past its limit", position=turn.limit))
    if turn.ended is not None:
        last = turn.tokens[-1] if places else None
        expected = ("stop", last) if places else ("length", None)
        if turn.ended != expected or (not places and len(turn.tokens) < turn.limit):
            problems.append(dict(kind="ended otherwise", found=list(turn.ended), expected=list(expected)))
    return problems


def wrong_tokens(turn: Turn, raw: Float[Tensor, "n V"], tolerance: float, eos: Sequence[int]) -> tuple[list[dict], int]:
    """Problems with the tokens from `start` on, and how many of those are the reference's own choice."""
    s, places = turn.sampling, torch.arange(turn.start, len(turn.tokens))
    logits = torch.stack([adjusted(turn, place, row, eos) for place, row in enumerate(raw, turn.start)])
    slack = 2 * tolerance * max(s.repetition_penalty, 1 / s.repetition_penalty)  # two logits, each off by that
    surely = perhaps = logits > -math.inf
    score = logits
    if s.temperature > 0:
        seeds = torch.full_like(places, turn.seed)
        score = logits + s.temperature * gumbel_noise(seeds, places, torch.arange(logits.shape[1]))
        surely, perhaps = kept(logits, s, slack)
    chosen = torch.tensor(turn.tokens[turn.start :])[:, None]
    best, other = score.masked_fill(~surely, -math.inf).max(-1)
    behind, may_be = best - score.gather(1, chosen)[:, 0], perhaps.gather(1, chosen)[:, 0]
    right = may_be & (behind <= slack)
    problems = [
        dict(kind="token", position=turn.start + n, token=int(chosen[n]), expected=int(other[n]),
             behind=float(behind[n]), may_be_kept=bool(may_be[n]))
        for n in (~right).nonzero()[:, 0].tolist()
    ]  # fmt: skip
    return problems, int((right & (behind <= 0)).sum())


def adjusted(turn: Turn, place: int, raw: Float[Tensor, " V"], eos: Sequence[int]) -> Float[Tensor, " V"]:
    """The logits after penalties, biases and the stop ids that may not come yet."""
    s, logits = turn.sampling, raw.double()
    if s.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(turn.tokens[:place])))
        repeated = logits[seen]
        logits[seen] = torch.where(repeated < 0, repeated * s.repetition_penalty, repeated / s.repetition_penalty)
    if s.frequency_penalty or s.presence_penalty:
        for token, times in Counter(turn.tokens[turn.prompt_length : place]).items():
            logits[token] -= s.frequency_penalty * times + s.presence_penalty
    for token, value in s.logit_bias:
        logits[token] += value
    if place < turn.prompt_length + s.min_tokens:
        logits[sorted(stop_ids(s, eos))] = -math.inf
    return logits


def kept(
    logits: Float[Tensor, "n V"], s: fnllm.Sampling, slack: float
) -> tuple[Bool[Tensor, "n V"], Bool[Tensor, "n V"]]:
    """Which tokens the filters keep for all logits within the tolerance, and which for some of them."""
    rising, count = logits.sort(-1).values, logits.shape[1]
    before_at_most = count - torch.searchsorted(rising, logits - slack) - 1  # itself is among them
    before_at_least = count - torch.searchsorted(rising, logits + slack, right=True)
    surely, perhaps = logits > -math.inf, logits > -math.inf
    if s.top_k:
        surely, perhaps = surely & (before_at_most < s.top_k), perhaps & (before_at_least < s.top_k)
    if s.top_p < 1:
        mass = torch.softmax(logits / s.temperature, -1)
        sums = torch.softmax(rising.flip(-1) / s.temperature, -1).cumsum(-1)
        sums = torch.cat([torch.zeros_like(sums[:, :1]), sums], -1)  # of the so many most likely ones
        factor = math.exp(min(2 * slack / s.temperature, 50))
        few, many = ((mass * mask).sum(-1, keepdim=True) for mask in (surely, perhaps))
        surely = surely & ((sums.gather(1, before_at_most) * factor < s.top_p * few) | (before_at_most == 0))
        perhaps = perhaps & (sums.gather(1, before_at_least) < s.top_p * many * factor)
    if s.min_p > 0:
        floor = logits.amax(-1, keepdim=True) + s.temperature * math.log(s.min_p)
        surely = surely & ((logits >= floor + slack) | (before_at_most == 0))
        perhaps = perhaps & ((logits >= floor - slack) | (before_at_least == 0))
    return surely, perhaps


def wrong_logprobs(drawn: Drawn, raw: Tensor, bound: float) -> tuple[float, dict | None]:
    """The largest error among a token's log-probability and those of the most likely ones, and a problem if too large.

    The bound is twice a logit's: the normaliser moves with the logits.
    """
    logprobs = torch.log_softmax(raw.double(), 0)
    best = logprobs.topk(len(drawn.top)).values.tolist()
    errors = [abs(drawn.logprob - float(logprobs[drawn.token]))]
    errors += [abs(value - float(logprobs[token])) for token, value in drawn.top]
    errors += [abs(value - exact) for (_, value), exact in zip(drawn.top, best, strict=True)]
    worst = max(errors)
    distinct = len({token for token, _ in drawn.top}) == len(drawn.top)
    if worst <= bound and distinct:
        return worst, None
    return worst, dict(kind="logprobs", position=drawn.position, error=worst, top=[list(pair) for pair in drawn.top])
