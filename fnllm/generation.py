"""`generate` and `stream`: prompts in, completions out, a short loop over the engine's step."""

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple, SupportsIndex

from fnllm.ambient import full_collections_off, set_aside
from fnllm.capture import Capture, capture_bytes, captures_of_each, expand, union_of_sites
from fnllm.completion import Chunk, Completion, failed
from fnllm.distributed import agree, exchange_numbers
from fnllm.edits import Edit, channels_of, edits_of_each, with_own_values
from fnllm.engines import Engine, Flight
from fnllm.jobs import Variant
from fnllm.layers import Layers
from fnllm.machine import Machine
from fnllm.options import EngineOptions
from fnllm.parameters import check_model
from fnllm.progress import Meter, is_terminal
from fnllm.prompts import normalise, pair_sampling
from fnllm.sampler import prompt_seed
from fnllm.sampling import Sampling, check_sampling, check_seed, from_defaults
from fnllm.scheduler import Request, SchedulerConfig, TokenIds, blocks_for, check_prompt_length, length_limit
from fnllm.scoring import prompt_logprobs
from fnllm.state import State, abort, add_all
from fnllm.tracks import Track, absorb, start, track
from fnllm.workspace import machine_for
from fnllm_weights import Params


class Call(NamedTuple):
    """What a call of `generate` or `stream` asks for; fields as the arguments there."""

    prompts: Any
    sampling: Sampling | Sequence[Sampling] | None
    layers: Layers | None
    edits: Any
    capture: Any
    seed: SupportsIndex | None
    chat: Mapping[str, Any] | None
    errors: str
    options: Mapping[str, Any]


class Wish(NamedTuple):
    """What a call asks for one of its prompts."""

    ids: TokenIds | Exception  # why the prompt was refused
    sampling: Sampling
    edits: tuple[Edit, ...]
    capture: Capture


def generate(
    params: Params,
    prompts: Any,
    sampling: Sampling | Sequence[Sampling] | None = None,
    *,
    layers: Layers | None = None,
    edits: Any = (),
    capture: Any = None,
    seed: SupportsIndex | None = None,
    chat: Mapping[str, Any] | None = None,
    errors: str = "raise",
    progress: bool | None = None,
    **options: Any,
) -> list[Completion]:
    """Complete one prompt or a list of prompts; a prompt is text, a list of token ids, or a chat.

    - `sampling`: one `Sampling` for all prompts or a list with one per prompt. None uses the checkpoint's recommended
      settings. With `n` > 1 a prompt's samples follow one another in the result.
    - `layers`: swapped layer functions.
    - `edits`: changes to activations (see `Edit`), either edits for all prompts or a list with a list (or None) per
      prompt.
    - `capture`: activations to return in `Completion.captured`, either sites or a `Capture` for all prompts, or a list
      with a `Capture` (or None) per prompt.
    - `seed`: makes the whole call repeatable. Requests whose `Sampling` has a seed are always repeatable.
    - `chat`: options of the chat template.
    - `errors`: with "return", a request that is refused, or that has no token to draw because of NaN or +inf logits or
      because all are -inf, gets a completion with its error while the others run. With "raise" the error is raised.
    - `progress`: show a progress line. None shows it on a terminal.
    - `options`: those of `EngineOptions`.

    Under torchrun every rank must make the same call and gets the same completions; calls that differ are refused on
    all ranks. If the cache can hold all requests, those that may generate the most tokens start first, so that the call
    ends sooner. Raises TypeError or ValueError that names the argument before anything runs. While it runs, raises
    FloatingPointError for logits with NaN or +inf, and ValueError for logits that are all -inf.
    """
    done: dict[tuple[int, int], Completion] = {}
    call = Call(prompts, sampling, layers, edits, capture, seed, chat, errors, options)
    chunks = serve(params, call, progress=progress, live=False)
    with closing(chunks):  # whatever happens, the machine is free for other threads
        for chunk in chunks:
            if chunk.completion is not None:
                done[chunk.index, chunk.sample] = chunk.completion
    return [done[key] for key in sorted(done)]


def stream(
    params: Params,
    prompts: Any,
    sampling: Sampling | Sequence[Sampling] | None = None,
    *,
    layers: Layers | None = None,
    edits: Any = (),
    capture: Any = None,
    seed: SupportsIndex | None = None,
    chat: Mapping[str, Any] | None = None,
    errors: str = "raise",
    **options: Any,
) -> Iterator[Chunk]:
    """Like `generate`, but yields chunks as tokens are generated; a request's last chunk carries its completion.

    The call itself checks the arguments; the first step runs at the first `next`. If you stop iterating, the remaining
    requests are aborted and the params stay usable.
    """
    call = Call(prompts, sampling, layers, edits, capture, seed, chat, errors, options)
    return serve(params, call, progress=False, live=True)


def serve(params: Params, call: Call, *, progress: bool | None, live: bool) -> Generator[Chunk, None, None]:
    """The loop behind `generate` and `stream`, with every argument checked before it is returned.

    With `live`, chunks are yielded as their tokens come, and the caller may use the machine between them. Without it
    only the last chunk of each request matters, and no other thread uses the machine until the end.
    """
    layers = check_model(params, call.layers)
    seed = None if call.seed is None else check_seed("seed", call.seed)
    inputs = call._replace(layers=layers)._asdict()
    del inputs["seed"]
    seed = agree(params, seed, **inputs)
    wishes = wishes_of(params, call)
    edits, sites = [one.edits for one in wishes], union_of_sites(one.capture for one in wishes)
    variant = Variant(layers, channels_of(edits), sites)
    worker = Engine(params, machine_for(params, variant, None, EngineOptions(**call.options)), variant)
    state, tracks, refused = hand_in(worker, wishes, seed, call.errors, live)
    if variant.capture:
        worker.machine.reserve_for_captures(sum(bytes_captured(worker, one) for one in tracks.values()), worker.report)
    shown = params.shard.rank == 0 and (is_terminal() if progress is None else progress)
    chunks = run(worker, state, tracks, refused, edits, call.errors, shown)
    return chunks if live else alone(worker.machine, chunks)


def wishes_of(params: Params, call: Call) -> list[Wish]:
    """What a call asks for each of its prompts."""
    ids = normalise(call.prompts, params.tokenizer, params.config.vocab_size, errors=call.errors, chat=call.chat)
    sampling = call.sampling
    if sampling is None:
        sampling = from_defaults(params.config.generation_defaults)
    captures = (expand(params.config, one) for one in captures_of_each(call.capture, len(ids)))
    edits = with_own_values(edits_of_each(call.edits, len(ids)))
    each = zip(ids, pair_sampling(len(ids), sampling), edits, captures, strict=True)
    return [Wish(*one) for one in each]


def hand_in(
    worker: Engine, wishes: Sequence[Wish], seed: int, errors: str, live: bool
) -> tuple[State, dict[int, Track], list[Chunk]]:
    """Everything before the first token.

    Returns the state with a request for each sample of each prompt, their tracks, and a chunk for each refused sample.
    """
    params, machine = worker.params, worker.machine
    idle = machine.idle  # read once: another thread may take it meanwhile
    state = replace(idle, variant=worker.variant) if idle else worker.init()
    now = time.perf_counter()
    requests: list[Request] = []
    tracks: list[Track] = []
    refused: list[Chunk] = []
    for index, (ids, sampling, edits, capture) in enumerate(wishes):
        try:
            if isinstance(ids, Exception):
                raise ids
            check_sampling(sampling, vocab_size=params.config.vocab_size, has_tokenizer=params.tokenizer is not None)
            try:
                check_prompt_length(state.scheduler.config, len(ids))
            except ValueError as error:
                raise ValueError(f"prompts[{index}]: {error}") from None
            for sample in range(sampling.n):
                own = prompt_seed(seed, index)
                requests.append(worker.request_of(ids, sampling, own, sample, edits=edits, capture=capture))
                tracks.append(track(params, index, sample, ids, sampling, live, now, capture))
        except (TypeError, ValueError) as error:
            if errors == "raise":
                raise
            # One for each sample, so that the others' places do not depend on who was refused.
            refused += [Chunk(index=index, sample=i, completion=failed(error)) for i in range(sampling.n)]
    if not live:
        order = longest_first(requests, state.scheduler.config)
        requests, tracks = [requests[i] for i in order], [tracks[i] for i in order]
    state, seq_ids = add_all(state, requests)
    return state, dict(zip(seq_ids, tracks, strict=True)), refused


def longest_first(requests: Sequence[Request], config: SchedulerConfig) -> list[int]:
    """The order in which requests are added when only the time of the whole call counts.

    A step makes one token of each sequence, so those that may make the most start first. Otherwise they would continue
    by themselves at the end, in steps that read all weights for a few tokens. If the cache cannot hold all requests at
    full length, the order is the caller's, since many long ones at once would preempt each other.
    """
    order = list(range(len(requests)))
    longest = [min(len(one.prompt) + one.max_tokens, length_limit(config)) for one in requests]
    if sum(blocks_for(tokens, config.block_size) for tokens in longest) > config.num_blocks:
        return order
    return sorted(order, key=lambda i: len(requests[i].prompt) - longest[i])


def bytes_captured(worker: Engine, one: Track) -> int:
    """An upper bound on the bytes of a request's captured activations."""
    return capture_bytes(
        worker.params.config,
        one.capture,
        prompt_tokens=len(one.prompt),
        new_tokens=min(one.sampling.max_tokens, worker.machine.settings.max_model_len - len(one.prompt)),
        dtype=worker.machine.dtype,
    )


def alone(machine: Machine, chunks: Generator[Chunk, None, None]) -> Generator[Chunk, None, None]:
    """The same chunks, while no other thread may step on the machine, since both would lose cached blocks."""
    with machine.lock, full_collections_off(machine.graphs_traced):
        yield from chunks  # and closes them, if cut short, before the lock is given back


def run(
    worker: Engine,
    state: State,
    tracks: dict[int, Track],
    refused: Sequence[Chunk],
    edits: Sequence[Sequence[Edit]],
    errors: str,
    shown: bool,
) -> Generator[Chunk, None, None]:
    """Step until every track has ended; the final state serves the next call, even after an error."""
    machine = worker.machine
    machine.rest_at(None)  # until it is known where this ends
    meter: Meter | None = None
    flight: Flight | None = None
    try:
        yield from refused
        agree_on_weights(worker)
        score_prompts(worker.params, worker.variant.layers, tracks, edits, machine)
        meter = Meter(len(tracks)) if shown else None
        while tracks or flight is not None:
            chunks: list[Chunk] = []
            # Other threads get the machine between chunks: between steps they and we might write over each other's
            # prompts, where these take several steps, for ever.
            with machine.lock:
                while not chunks and (tracks or flight is not None):
                    # On a GPU the next step is launched before the last one's tokens are read: the device never waits.
                    now = time.perf_counter()
                    state, launched = worker.launch(state)
                    if launched is not None:
                        start(launched.plan, tracks, now)
                    if not machine.asynchronous:
                        flight, launched = launched, None  # read at once
                    landed, flight = flight, launched
                    if landed is not None:
                        state, step = worker.collect(state, landed)
                        state, chunks = absorb(state, step, tracks, time.perf_counter())
                        if meter is not None:
                            meter.step(step.plan, left=len(tracks))
                    elif flight is None:
                        raise RuntimeError(f"the scheduler has {len(tracks)} requests and no step for them")
            for chunk in chunks:
                if errors == "raise" and chunk.completion is not None and chunk.completion.error is not None:
                    raise chunk.completion.error
                yield chunk
    finally:
        if meter is not None:
            meter.close()
        machine.rest_at(settled(worker, state, flight))


def agree_on_weights(worker: Engine) -> None:
    """Treat the weights as changed on all ranks if they are on one, which may have written only its own shard.

    Otherwise that rank would compute a prefix that the others find cached, and their steps would not match.
    """
    machine = worker.machine
    if machine.tp.size == 1:
        return
    with machine.lock:
        numbers = [machine.version_of(worker.params, worker.variant), machine.versions.changes]
        ranks = exchange_numbers(machine.tp, machine.device, numbers)
        if any(numbers_there[0] != numbers[0] for numbers_there in ranks):
            machine.versions.catch_up(max(changes for _, changes in ranks))


def settled(worker: Engine, state: State, flight: Flight | None) -> State | None:
    """The state with all sequences removed, for the next call; None if a step failed half-way."""
    if flight is not None and flight.plan.step == state.scheduler.next_commit:
        try:
            state, _ = worker.collect(state, flight)
        except Exception:  # the device is lost, as whoever asks it next is told
            return None
    if state.scheduler.next_commit != state.scheduler.next_step:
        return None
    for seq_id, _ in state.scheduler.sequences.items():
        state = abort(state, seq_id)
    return state


def score_prompts(
    params: Params,
    layers: Layers,
    tracks: Mapping[int, Track],
    edits: Sequence[Sequence[Edit]],
    machine: Machine,
) -> None:
    """Compute the prompts' log-probabilities by `score` for the tracks that ask for them, without the prefix cache."""
    asked = {one.index: one for one in tracks.values() if one.sampling.prompt_logprobs is not None}
    if not asked:
        return
    with set_aside(machine.device):  # as the steps are, whose numbers these stand beside
        found = prompt_logprobs(
            params,
            [one.prompt for one in asked.values()],
            [one.sampling.prompt_logprobs or 0 for one in asked.values()],
            layers=layers,
            edits=[edits[index] for index in asked],
            numerics=machine.settings.numerics,
            max_batched_tokens=machine.settings.max_num_batched_tokens,
            tp=machine.tp,
        )
    of_prompt = dict(zip(asked, found, strict=True))
    for one in tracks.values():
        one.prompt_logprobs = of_prompt.get(one.index)
