"""`generate` and `stream`: prompts in, completions out, a short loop over the engine's step."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fnllm_weights import Params

from fnllm.completion import Chunk, Completion, failed
from fnllm.distributed import agree
from fnllm.engines import Flight, engine
from fnllm.layers import Layers
from fnllm.progress import Meter, is_terminal
from fnllm.prompts import normalise, pair_sampling
from fnllm.sampling import Sampling, check_sampling
from fnllm.state import abort, add
from fnllm.taps import Edit
from fnllm.tracks import Track, absorb, track


def generate(
    params: Params,
    prompts: Any,
    sampling: Sampling | Sequence[Sampling] | None = None,
    *,
    layers: Layers | None = None,
    edits: Sequence[Edit] = (),
    capture: Sequence[str] = (),
    seed: int | None = None,
    chat: Mapping[str, Any] | None = None,
    errors: str = "raise",
    progress: bool | None = None,
    **options: Any,
) -> list[Completion]:
    """Complete each prompt: text, token ids, or a chat; one prompt, or a list of them.

    `sampling` is one for all or a list with one each; with `n` > 1 a prompt's samples follow one another in the result.
    `layers` swaps layer functions, `edits` change activations, `capture` returns them; `seed` makes the whole call
    repeatable (requests with a seed of their own always are). Under torchrun every rank makes the same call and gets the
    same completions; calls that differ are refused on all of them. `chat` are options of the chat template. With
    errors="return" a refused request's completion carries its error and the others run. `options` are those of
    `EngineOptions`. Raises TypeError or ValueError that names the argument, before anything runs.
    """
    done: dict[tuple[int, int], Completion] = {}
    for chunk in serve(params, prompts, sampling, layers, edits, capture, seed, chat, errors, progress, False, options):
        if chunk.completion is not None:
            done[chunk.index, chunk.sample] = chunk.completion
    return [done[key] for key in sorted(done)]


def stream(
    params: Params,
    prompts: Any,
    sampling: Sampling | Sequence[Sampling] | None = None,
    *,
    layers: Layers | None = None,
    edits: Sequence[Edit] = (),
    capture: Sequence[str] = (),
    seed: int | None = None,
    chat: Mapping[str, Any] | None = None,
    errors: str = "raise",
    **options: Any,
) -> Iterator[Chunk]:
    """As `generate`, but yields pieces as they come; a request's last chunk carries its completion.

    Stopping to iterate aborts what still runs and leaves everything usable.
    """
    return serve(params, prompts, sampling, layers, edits, capture, seed, chat, errors, False, True, options)


def serve(
    params: Params,
    prompts: Any,
    sampling: Sampling | Sequence[Sampling] | None,
    layers: Layers | None,
    edits: Sequence[Edit],
    capture: Sequence[str],
    seed: int | None,
    chat: Mapping[str, Any] | None,
    errors: str,
    progress: bool | None,
    live: bool,
    options: Mapping[str, Any],
) -> Iterator[Chunk]:
    """The loop behind `generate` and `stream`."""
    seed = agree(
        params,
        seed,
        prompts=prompts,
        sampling=sampling,
        layers=layers,
        edits=edits,
        capture=capture,
        chat=chat,
        errors=errors,
        options=options,
    )
    found = normalise(prompts, params.tokenizer, params.config.vocab_size, errors=errors, chat=chat)
    settings = pair_sampling(len(found.ids), sampling)
    worker = engine(params, layers=layers, edits=edits, capture=capture, **options)
    machine = worker.machine
    state = machine.idle or worker.init()
    machine.idle = None  # until this call has ended well
    tracks: dict[int, Track] = {}
    refused: list[Chunk] = []
    for index, (ids, setting) in enumerate(zip(found.ids, settings, strict=True)):
        try:
            if isinstance(ids, Exception):
                raise ids
            check_sampling(setting, vocab_size=params.config.vocab_size, has_tokenizer=params.tokenizer is not None)
            for sample in range(setting.n):
                state, seq_id = add(state, worker.request(ids, setting, seed=seed + index, sample=sample))
                tracks[seq_id] = track(params, index, sample, ids, setting, live, time.perf_counter())
        except (TypeError, ValueError) as error:
            if errors == "raise":
                raise
            refused.append(Chunk(index=index, completion=failed(error)))
    yield from refused
    shown = params.shard.rank == 0 and (is_terminal() if progress is None else progress)
    meter = Meter(len(tracks)) if shown else None
    flight: Flight | None = None
    try:
        while tracks or flight is not None:
            # On a GPU the next step is launched before the last one's tokens are read: the device never waits.
            state, launched = worker.launch(state)
            if not machine.asynchronous:
                flight, launched = launched, None  # read at once
            landed, flight = flight, launched
            if landed is not None:
                state, step = worker.collect(state, landed)
                state, chunks = absorb(state, step, tracks, time.perf_counter())
                if meter is not None:
                    meter.step(step.plan, left=len(tracks))
                yield from chunks
            elif flight is None:
                raise RuntimeError(f"the scheduler has {len(tracks)} requests and no step for them")
    finally:
        if flight is not None:
            state, _ = worker.collect(state, flight)
        for seq_id in tracks:
            state = abort(state, seq_id)
        machine.idle = state
        if meter is not None:
            meter.close()
