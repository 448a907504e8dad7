"""The loop's record of each running request, and how a step's results become chunks and completions."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fnllm.capture import NOTHING, Capture, CapturedRows, site_shape
from fnllm.completion import Chunk, Completion, Timings, TokenLogprob
from fnllm.engines import StepEvents
from fnllm.sampling import Sampling
from fnllm.scheduler import Plan, TokenIds
from fnllm.state import State, abort, finish, tokens
from fnllm.text import output as text_output
from fnllm_weights import Params


@dataclass
class Track:
    """One running request. Read and changed only by the loop of one `generate` or `stream` call."""

    index: int  # of its prompt
    sample: int
    prompt: TokenIds
    sampling: Sampling
    text: text_output.Output
    began: float  # seconds of the host's clock, as `scheduled` and `first_token`
    live: bool  # its text is needed while it runs
    scheduled: float | None = None
    first_token: float | None = None
    fed: int = 0  # new tokens that have become text
    shown: list[str] = field(default_factory=list)
    cached: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    captured: dict[str, list[Tensor]] = field(default_factory=dict)  # of each site the rows so far, at first none
    captured_at: list[int] = field(default_factory=list)  # positions, rising
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    capture: Capture = NOTHING


def track(
    params: Params,
    index: int,
    sample: int,
    prompt: TokenIds,
    sampling: Sampling,
    live: bool,
    now: float,
    capture: Capture = NOTHING,
) -> Track:
    """The track of a request that is about to be added."""
    text = text_output.begin(params.tokenizer, sampling)
    weight = params.tree["norm"]
    none = {site: [weight.new_empty(0, *site_shape(params.config, site))] for site in capture.sites}
    live = live or bool(sampling.stop)
    return Track(index, sample, prompt, sampling, text, now, live, captured=none, capture=capture)


def start(plan: Plan, tracks: dict[int, Track], now: float) -> None:
    """Note when the tracks that begin in a plan were scheduled."""
    for join in plan.joins:
        if join.first and join.seq_id in tracks:
            tracks[join.seq_id].scheduled = now


def absorb(state: State, step: StepEvents, tracks: dict[int, Track], now: float) -> tuple[State, list[Chunk]]:
    """Take a step's results into the tracks.

    Returns the state without the requests that ended, and the chunks to show; ended requests leave `tracks`.
    """
    keep_outputs(step, tracks)
    events, chunks = step.events, []
    for seq_id, cached in events.cached:
        if seq_id in tracks:
            tracks[seq_id].cached = cached
    ended = {end.seq_id: (end.reason, end.stop_id) for end in events.finished if end.seq_id in tracks}
    errors = dict(step.failed)
    for seq_id, token in zip(events.seq_ids.tolist(), events.tokens.tolist(), strict=True):
        one = tracks.get(seq_id)
        if one is None:
            continue
        one.first_token = now if one.first_token is None else one.first_token
        if one.live and seq_id not in ended:
            text = feed(one, (token,))
            chunks.append(Chunk(index=one.index, sample=one.sample, text=text, token_ids=(token,)))
            if one.text.matched is not None:
                state = finish(state, seq_id, "stop")
                ended[seq_id] = ("stop", None)
    for seq_id, (reason, stop_id) in ended.items():
        chunks.append(close(tracks.pop(seq_id), tokens(state, seq_id), reason, stop_id, now, errors.get(seq_id)))
        state = abort(state, seq_id)
    return state, chunks


def feed(one: Track, ids: tuple[int, ...]) -> str:
    """Turn new tokens into text; returns what may be shown of it."""
    one.text, text, used = text_output.feed(one.text, ids)
    one.fed += used
    one.shown.append(text)
    return text


def close(
    one: Track, known: tuple[int, ...], reason: str, stop_id: int | None, now: float, error: Exception | None = None
) -> Chunk:
    """The last chunk of a request, with its completion. `known` are its tokens, prompt first."""
    new = known[len(one.prompt) :]
    already = one.fed
    text = feed(one, new[already : len(new) - (stop_id is not None)])
    ended_by = one.text.matched
    if ended_by is None:
        one.text, rest = text_output.finish(one.text, stop_id)
        one.shown.append(rest)
        text, one.fed = text + rest, len(new)
        ended_by = one.text.matched
    completion = Completion(
        text="".join(one.shown),
        token_ids=new[: one.fed],
        finish_reason=reason if ended_by is None else "stop",
        stop_reason=ended_by or stop_id,
        logprobs=None if one.sampling.logprobs is None else tuple(one.logprobs[: one.fed]),
        prompt_logprobs=one.prompt_logprobs,
        prompt_tokens=len(one.prompt),
        cached_tokens=one.cached,
        timings=Timings(
            queued=(now if one.scheduled is None else one.scheduled) - one.began,
            first_token=None if one.first_token is None else one.first_token - one.began,
            total=now - one.began,
        ),
        error=named(error, one) if ended_by is None else None,
        **captured_until(one, len(one.prompt) + one.fed),
    )
    return Chunk(index=one.index, sample=one.sample, text=text, token_ids=new[already : one.fed], completion=completion)


def named(error: Exception | None, one: Track) -> Exception | None:
    """The error of a request with the request's place in the call in front."""
    where = f"prompts[{one.index}]" + (f", sample {one.sample}" if one.sampling.n > 1 else "")
    return None if error is None else type(error)(f"{where}: {error}")


def keep_outputs(step: StepEvents, tracks: dict[int, Track]) -> None:
    """Keep the log-probabilities and captured activations of the requests that asked for them."""
    if step.results.logprob is not None:
        for entry in np.flatnonzero(step.plan.samples).tolist():
            one = tracks.get(int(step.plan.seq_ids[entry]))
            if one is not None and one.sampling.logprobs is not None:
                one.logprobs.append(token_logprob(step, entry, one.sampling.logprobs))
    for rows in step.captured:
        if rows.seq_id in tracks:
            keep_captured(tracks[rows.seq_id], rows, step.results.captured)


def keep_captured(one: Track, rows: CapturedRows, captured: dict[str, Tensor]) -> None:
    """Keep a sequence's rows of a step, but for positions it has from before a preemption."""
    known = one.captured_at[-1] if one.captured_at else -1
    new = rows.positions[rows.positions > known]
    first = rows.first + len(rows.positions) - len(new)
    one.captured_at += new.tolist()
    for site in one.capture.sites:
        one.captured[site].append(captured[site][first : first + len(new)])


def captured_until(one: Track, length: int) -> dict:
    """The captured activations of the first `length` tokens, as fields of a completion."""
    at = tuple(position for position in one.captured_at if position < length)
    return {"captured": {site: torch.cat(parts)[: len(at)] for site, parts in one.captured.items()}, "captured_at": at}


def token_logprob(step: StepEvents, entry: int, count: int) -> TokenLogprob:
    """The log-probability of the token that an entry drew, and of the `count` most likely ones."""
    results = step.results
    assert results.logprob is not None
    top: tuple[tuple[int, float], ...] = ()
    if count:
        assert results.top_ids is not None and results.top_logprobs is not None
        ids, logprobs = results.top_ids[entry, :count].tolist(), results.top_logprobs[entry, :count].tolist()
        top = tuple(zip(ids, logprobs, strict=True))
    return TokenLogprob(int(results.ids[entry]), float(results.logprob[entry]), top)
