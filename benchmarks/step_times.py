"""The time of each step of W1, from CUDA events, with the GPU's clock and draw meanwhile.

    python benchmarks/step_times.py --size 8b --out w1_steps.json

Steps are put together by their number of sequences, in ranges of 16. A row has their mean milliseconds, what reading
their cache takes at the measured bandwidth (`workloads.py`), and what is left: products, the rest of a layer, the head.
"""

import argparse
import json
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from provenance import provenance, random_params
from workloads import READ_BYTES_PER_S, cost, headline

import fnllm

RANGES = ((1, 1), (2, 8), (9, 16), *((first, first + 15) for first in range(17, 257, 16)))


class Step(NamedTuple):
    """One step: its decoding sequences, prompt tokens, keys that the sequences read, and milliseconds."""

    sequences: int
    prompt_tokens: int
    keys: int
    ms: float


def run(engine: fnllm.Engine, prompts: list[list[int]], lengths: list[int]) -> list[Step]:
    """All requests at once, one step launched ahead of the one that is waited for."""
    cuda = engine.machine.asynchronous
    state = engine.init()
    for prompt, length in zip(prompts, lengths, strict=True):
        sampling = fnllm.Sampling(temperature=0.6, max_tokens=length, ignore_eos=True)
        state, _ = fnllm.add(state, engine.request(prompt, sampling))

    def mark() -> Any:
        if not cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    marks, plans = [mark()], []
    state, flight = engine.launch(state)
    while flight is not None:
        marks.append(mark())
        plans.append(flight.plan)
        state, ahead = engine.launch(state)
        state, _ = engine.collect(state, flight)
        # A step that waited for this one's tokens could not be planned before.
        state, flight = (state, ahead) if ahead is not None else engine.launch(state)
    if cuda:
        torch.cuda.synchronize()
    spans = zip(marks, marks[1:], strict=False)
    each = [a.elapsed_time(b) if cuda else (b - a) * 1e3 for a, b in spans]
    found = []
    for plan, ms in zip(plans, each, strict=True):
        decoding = plan.num_decode
        keys = int((plan.starts[:decoding] + 1).sum())
        found.append(Step(decoding, int(plan.query_lens[decoding:].sum()), keys, ms))
    return found


def by_sequences(steps: list[Step], cache_bytes: int) -> list[dict]:
    """Rows of the steps without prompt tokens, by their number of sequences."""
    rows = []
    for first, last in RANGES:
        some = [step for step in steps if not step.prompt_tokens and first <= step.sequences <= last]
        if some:
            ms = float(np.mean([step.ms for step in some]))
            cache = float(np.mean([step.keys for step in some])) * cache_bytes / READ_BYTES_PER_S * 1e3
            row = dict(sequences=[first, last], steps=len(some), ms=ms, cache_ms=cache, rest_ms=ms - cache)
            rows.append({name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()})
    return rows


def watch_clock(seconds: list[tuple[float, int, float]], done: threading.Event) -> None:
    """Append (second, MHz, watts) twenty times a second; nothing where NVML's package is missing."""
    began = time.perf_counter()
    try:
        while not done.wait(0.05):
            now = time.perf_counter() - began
            seconds.append((now, torch.cuda.clock_rate(), torch.cuda.power_draw() / 1e3))
    except (ModuleNotFoundError, RuntimeError) as error:
        print(f"no clock: {error}")


def of_each_second(samples: list[tuple[float, int, float]], place: int) -> list[int]:
    last = int(samples[-1][0]) if samples else 0
    return [int(np.mean([s[place] for s in samples if second <= s[0] < second + 1])) for second in range(last)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="8b")
    parser.add_argument("--compile", default="graphs", help="the engine's mode")
    parser.add_argument("--seed", type=int, default=0, help="of the requests")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    params = random_params(args.size, dtype="bfloat16" if args.device == "cuda" else "float32", device=args.device)
    prompts, lengths = headline(args.seed)
    prompts = [[token % params.config.vocab_size for token in prompt] for prompt in prompts]
    blocks = 2600 if args.device == "cuda" else None  # of 128 tokens: room for all requests
    engine = fnllm.engine(params, compile=args.compile, max_model_len=2048, num_blocks=blocks)
    engine.prepare(fnllm.Sampling(temperature=0.6))
    warm = [[token + 1] * 100 for token in range(64)]
    run(engine, warm, [4] * len(warm))
    samples: list[tuple[float, int, float]] = []
    done = threading.Event()
    watcher = threading.Thread(target=watch_clock, args=(samples, done))
    if args.device == "cuda":
        watcher.start()
    began = time.perf_counter()
    steps = run(engine, prompts, lengths)
    seconds = time.perf_counter() - began
    done.set()
    if args.device == "cuda":
        watcher.join()
    prefill = [step for step in steps if step.prompt_tokens]
    result = dict(
        **provenance(),
        size=args.size,
        compile=args.compile,
        seconds=round(seconds, 3),
        prefill_steps=len(prefill),
        prefill_ms=round(sum(step.ms for step in prefill), 1),
        decode_ms=round(sum(step.ms for step in steps if not step.prompt_tokens), 1),
        decode=by_sequences(steps, cost(args.size).cache_bytes if args.device == "cuda" else 0),
        clock_mhz_of_each_second=of_each_second(samples, 1),
        watts_of_each_second=of_each_second(samples, 2),
    )
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
