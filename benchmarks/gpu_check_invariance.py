"""Batch invariance through the public API, bit for bit: gpu_check_invariance.py SETTINGS_JSON, for gpu_checks.py.

For each checkpoint, dtype and compile mode one row: the prompts' tokens and log-probabilities alone, in every one of
the `ways` of tests/gpu_cases.py, among many others, over a warm prefix cache, and by `score`, against each prompt alone
without graphs. A row says what was compared, how often a request was preempted, how many blocks were reused, what was
captured, and every inequality.
"""

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from gpu_check_parts import emit

import fnllm

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests"))

from gpu_cases import DRAWN, SURROUNDINGS, bits, counted, prompts_of, ways  # noqa: E402  found by the line above

CHECKPOINTS = ("qwen3-tiny", "qwen2-window", "qwen3-moe-norm", "qwen3-moe-mixed", "qwen3-odd", "llama-tiny")
LONGEST = 75  # tokens of a prompt: more than a tile of keys
OTHERS = 14  # more requests in the batch of many: with the prompts 19, which no bucket of a GPU's steps fits
Bits = list[tuple]


def invariance(s: SimpleNamespace) -> None:
    """All modes of this process's share of checkpoints and dtypes."""
    folders = [Path(s.oracle) / name for name in CHECKPOINTS] + ([Path(s.checkpoint)] if s.checkpoint else [])
    units = [(folder, dtype) for folder in folders for dtype in ("bfloat16", "float32")]
    for folder, dtype in units[s.job :: s.jobs]:
        params = fnllm.load(folder, dtype=dtype, device=s.device)
        prompts = prompts_of(params.config.vocab_size, LONGEST)
        plain = dict(SURROUNDINGS, num_blocks=128, max_model_len=128)
        expected = alone(params, prompts, dict(plain, compile="none", prefix_cache=False))
        for mode in s.modes.split(","):
            began = time.perf_counter()
            try:
                fnllm.EngineOptions(**plain, compile=mode)
                if s.device == "cpu" and mode == "graphs":
                    raise ValueError("there are no CUDA graphs on a CPU")
            except ValueError as error:
                found = dict(refused=str(error), ok=True)
            else:
                found = of_mode(params, prompts, expected, dict(plain, compile=mode))
            emit(s, part="invariance", checkpoint=folder.name, dtype=dtype, mode=mode, **found,
                 seconds=round(time.perf_counter() - began, 1))  # fmt: skip


def alone(params: fnllm.Params, prompts: list, options: dict) -> Bits:
    """The bits of each prompt by itself."""
    return [bits(fnllm.generate(params, [prompt], DRAWN, progress=False, **options))[0] for prompt in prompts]


def of_mode(params: fnllm.Params, prompts: list, expected: Bits, plain: dict) -> dict[str, Any]:
    """What all cases of one compile mode gave."""
    cases, unequal, preempted, reused = [], [], Counter(), Counter()
    lines: list[str] = []
    for case, options, run in together(params, prompts, plain):
        fnllm.engine(params, report=lines.append, **options)  # the machine that the calls of equal options share
        before = counted(params, options)
        found = run(options)
        after = counted(params, options)
        cases.append(case)
        unequal += differences(case, found, expected)
        preempted[case] = after.preemptions - before.preemptions
        reused[case] = (after.cached_tokens - before.cached_tokens) // options["block_size"]
    for limit in (16384, 40, 1):  # all in one pass, packs of some, each alone
        case = f"score in packs of {limit}"
        cases.append(case)
        unequal += of_score(case, params, prompts, expected, limit)
    built = {line.split(" in ")[0] for line in lines if line.startswith(("captured decode", "captured prefill"))}
    ok = not unequal and preempted["preemption"] > 0 and reused["prefix hits"] > 0
    return dict(
        cases=cases, unequal=unequal, preemptions=+preempted, blocks_reused=+reused, captured=sorted(built), ok=ok,
    )  # fmt: skip


def together(params: fnllm.Params, prompts: list, plain: dict) -> Iterator[tuple]:
    """(name, options, function of the options that gives the prompts' bits) of each way to run them."""

    def all_at_once(options: dict) -> Bits:
        return bits(fnllm.generate(params, prompts, DRAWN, progress=False, **options))

    def among_many(options: dict) -> Bits:
        draw = random.Random(2)
        size = params.config.vocab_size
        others = [[draw.randrange(3, size) for _ in range(draw.randrange(1, 60))] for _ in range(OTHERS)]
        mixed = [*others[: OTHERS // 2], *prompts, *others[OTHERS // 2 :]]
        found = fnllm.generate(params, mixed, DRAWN, progress=False, **options)
        return bits(found[OTHERS // 2 :][: len(prompts)])

    def again(options: dict) -> Bits:
        all_at_once(options)
        return bits(fnllm.generate(params, prompts[::-1], DRAWN, progress=False, **options)[::-1])

    cold = dict(plain, prefix_cache=False)
    yield "alone", cold, lambda options: alone(params, prompts, options)
    for name, options in ways(LONGEST).items():
        yield name, {**cold, **options}, all_at_once
    yield "19 requests", dict(cold, num_blocks=512), among_many
    yield "19 requests in little room", dict(cold, num_blocks=26, max_chunk=7), among_many
    yield "prefix hits", plain, again


def differences(case: str, found: Bits, expected: Bits) -> list[dict]:
    """Where the bits of prompts differ: the first token that does, and both log-probabilities there."""
    rows = []
    for prompt, ((ids, logprobs), (right, known)) in enumerate(zip(found, expected, strict=True)):
        if (ids, logprobs) != (right, known):
            places = [at for at, (a, b) in enumerate(zip(logprobs, known, strict=False)) if a != b]
            at = places[0] if places else min(len(ids), len(right))
            rows.append(dict(case=case, prompt=prompt, token=at, found=logprobs[at : at + 1],
                             expected=known[at : at + 1]))  # fmt: skip
    return rows


def of_score(case: str, params: fnllm.Params, prompts: list, expected: Bits, limit: int) -> list[dict]:
    """Where `score` gives other log-probabilities than generation did."""
    sequences = [[*prompt, *ids] for prompt, (ids, _) in zip(prompts, expected, strict=True)]
    scored = fnllm.score(params, sequences, numerics="batch_invariant", max_batched_tokens=limit)
    rows = []
    for index, (prompt, values, (_, known)) in enumerate(zip(prompts, scored, expected, strict=True)):
        pairs = zip(values[len(prompt) - 1 :].tolist(), (one.logprob for one in known), strict=True)
        apart = [(at, a, b) for at, (a, b) in enumerate(pairs) if a != b]
        rows += [dict(case=case, prompt=index, token=at, found=a, expected=b) for at, a, b in apart[:1]]
    return rows


if __name__ == "__main__":
    settings = SimpleNamespace(**json.loads(sys.argv[1]))
    torch.set_num_threads(1 if settings.device == "cpu" else torch.get_num_threads())
    with torch.no_grad():
        invariance(settings)
