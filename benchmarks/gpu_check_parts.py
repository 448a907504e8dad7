"""Parts of benchmarks/gpu_checks.py that need a process of their own: gpu_check_parts.py PART SETTINGS_JSON.

- equal: greedy tokens of checkpoints in every compile mode, in float32 and bfloat16, against eager ones.
- batches: one sequence in a batch of every size against itself alone; with batch-invariant numerics bit for bit, and
  so against `score`.
- poison: NaN in every unused slot of the cache, in padding's activations and in its sampler settings changes no bit.

Tokens that differ must each be the most likely one, within tolerance, by a float32 pass on the CPU.
"""

import json
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from provenance import random_params
from soak_reference import TOLERANCE, Turn, judge, reference_of

import fnllm
from fnllm_kernels.attention import default_backend

USUAL_SPREAD = 1.2  # standard deviation of the logits for which the tolerances were measured
GREEDY = fnllm.Sampling(temperature=0, max_tokens=16, ignore_eos=True, seed=0)
POISON = {"fa3": 1e4, "fa2": 1e4}  # these read pages whole, and a weight of zero does not undo a NaN


def emit(s: SimpleNamespace, **row: Any) -> None:
    """Add a result."""
    line = json.dumps(row)
    print(line, flush=True)
    with open(s.rows, "a") as file:
        file.write(line + "\n")


def greedy_faults(
    reference: fnllm.Params, prompts: Sequence, found: Sequence, dtype: torch.dtype
) -> tuple[list, float]:
    """Tokens that are not the most likely ones within tolerance, and that tolerance of a logit."""
    asked = [fnllm.score(reference, [prompts[-1]], capture="logits")[0].captured["logits"]]
    tolerance = TOLERANCE[dtype] * max(1, asked[0].std().item() / USUAL_SPREAD)
    turns = [Turn((*prompt, *one), len(prompt), len(prompt), len(one), 1 << 30, GREEDY, 0)
             for prompt, one in zip(prompts, found, strict=True)]  # fmt: skip
    kept = ("kind", "position", "token", "expected", "behind")
    return [{name: fault[name] for name in kept} for fault in judge(reference, turns, tolerance).faults], tolerance


def tokens_of(params: fnllm.Params, prompts: Sequence, sampling: fnllm.Sampling = GREEDY, **options: Any) -> list:
    return [one.token_ids for one in fnllm.generate(params, prompts, sampling, progress=False, **options)]


def equal(s: SimpleNamespace) -> None:
    """Every compile mode against eager, for this process's share of the checkpoints."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    folders = [folder.parent for folder in sorted(Path(s.oracle).glob("*/model*.safetensors"))]
    folders = [*dict.fromkeys(folders), *([Path(s.checkpoint)] if s.checkpoint else [])]
    for folder in folders[s.job :: s.jobs]:
        for dtype in ("float32", "bfloat16"):
            params = fnllm.load(folder, dtype=dtype, device=s.device)
            prompts = prompts_of(folder, params)
            options = dict(num_blocks=96, max_num_seqs=8, max_model_len=128)
            eager = tokens_of(params, prompts, compile="none", **options)
            reference = reference_of(params)
            for mode in s.modes.split(","):
                found = eager if mode == "none" else tokens_of(params, prompts, compile=mode, **options)
                faults, tolerance = greedy_faults(reference, prompts, found, params.tree["norm"].dtype)
                # Where a router chooses, a rounding may be a jump: in bfloat16 such a model need only equal eager.
                routed = params.config.num_experts > 0 and dtype == "bfloat16"
                emit(
                    s, part="equal", checkpoint=folder.name, dtype=dtype, mode=mode, sequences=len(prompts),
                    equal_to_eager=sum(a == b for a, b in zip(found, eager, strict=True)), tolerance=tolerance,
                    faults=faults[:20], routed=routed, ok=not faults or (routed and found == eager),
                )  # fmt: skip


def prompts_of(folder: Path, params: fnllm.Params) -> list[list[int]]:
    """The prompts that an oracle's goldens are of; for another checkpoint random ones."""
    golden = folder / "golden.json"
    if golden.exists():
        return [one["prompt"] for one in json.loads(golden.read_text())["prompts"].values() if one["greedy"]]
    rng = random.Random(0)
    return [[rng.randrange(params.config.vocab_size) for _ in range(length)] for length in (1, 5, 17, 70)]


def batches(s: SimpleNamespace) -> None:
    """One sequence among 0 to `largest` - 1 others, of which each batch has new ones."""
    params = random_params(s.size, dtype=s.dtype, device=s.device, lively=True)
    reference, rng = reference_of(params), random.Random(0)
    sampling = fnllm.Sampling(temperature=0, max_tokens=9, ignore_eos=True, logprobs=0)

    def prompt() -> list[int]:
        return [rng.randrange(params.config.vocab_size) for _ in range(rng.randrange(1, 40))]

    probe = [rng.randrange(params.config.vocab_size) for _ in range(23)]
    for numerics in ("default", "batch_invariant"):
        options = dict(max_num_seqs=s.largest, max_model_len=64, prefix_cache=False, numerics=numerics,
                       num_blocks=s.largest * 4, compile=s.compile)  # fmt: skip
        (alone,) = fnllm.generate(params, [probe], sampling, progress=False, **options)
        unequal, worst, faults = [], 0.0, []
        for batch in range(1, s.largest + 1):
            place = rng.randrange(batch)
            prompts = [probe if row == place else prompt() for row in range(batch)]
            one = fnllm.generate(params, prompts, sampling, progress=False, **options)[place]
            pairs = list(zip(one.logprobs, alone.logprobs, strict=True))
            worst = max([worst, *(abs(a.logprob - b.logprob) for a, b in pairs if a.id == b.id)])
            if one.token_ids != alone.token_ids or (numerics == "batch_invariant" and one.logprobs != alone.logprobs):
                unequal.append(batch)
                found = greedy_faults(reference, [probe], [one.token_ids], params.tree["norm"].dtype)[0]
                faults += [dict(fault, batch=batch) for fault in found]
        (scored,) = fnllm.score(params, [[*probe, *alone.token_ids]], numerics=numerics)
        equals_score = scored[len(probe) - 1 :].tolist() == [entry.logprob for entry in alone.logprobs]
        ok = not faults and (numerics == "default" or (equals_score and not unequal))
        emit(s, part="batches", numerics=numerics, sizes=s.largest, unequal=unequal, equals_score=equals_score,
             largest_logprob_difference=worst, faults=faults[:20], ok=ok)  # fmt: skip


def poison(s: SimpleNamespace) -> None:
    """The same requests before and after everything that must not be read is poisoned."""
    params = random_params(s.size, dtype=s.dtype, device=s.device, lively=True)
    params.tree["embed"][0] = 0  # the id that padding has; no request has it, none may draw it
    dtype, on_gpu = params.tree["norm"].dtype, s.device == "cuda"
    best = default_backend(torch.device(s.device), dtype, params.config.head_dim, 128)
    rng = random.Random(1)
    prompts = [[rng.randrange(20, params.config.vocab_size) for _ in range(length)] for length in (5, 40, 130, 3, 71)]
    sampling = [
        fnllm.Sampling(temperature=temperature, top_p=0.9, seed=7, max_tokens=12, ignore_eos=True, logprobs=2,
                       logit_bias={0: -math.inf})
        for temperature in (0, 0.8, 1.2, 0, 0.5)
    ]  # fmt: skip
    choices = [("default", "triton"), ("default", best), ("batch_invariant", None)]
    for numerics, attention in dict.fromkeys(choices if on_gpu else [("default", None), ("batch_invariant", None)]):
        options = dict(numerics=numerics, attention=attention, num_blocks=40, max_num_seqs=8, max_model_len=256,
                       prefix_cache=False, compile=s.compile)  # fmt: skip

        def run(options: dict = options) -> list:
            done = fnllm.generate(params, prompts, sampling, progress=False, **options)
            return [(one.token_ids, one.logprobs) for one in done]

        clean = [run(), run()]
        value = POISON.get(attention or "", math.nan)
        machine = fnllm.engine(params, **options).machine
        fill(machine, value)
        params.tree["embed"][0] = math.nan
        poisoned = run()
        params.tree["embed"][0] = 0
        emit(s, part="poison", numerics=numerics, attention=attention, value=str(value), repeats=clean[0] == clean[1],
             unchanged=poisoned == clean[1], ok=clean[0] == clean[1] == poisoned)  # fmt: skip


def fill(machine: Any, value: float) -> None:
    """Poison all blocks, and the scratch row that padding reads."""
    cache, rows = machine.resident.cache, machine.resident.rows
    for tensor in (*cache.k, *cache.v):
        tensor.fill_(value)
    rows.last_token[-1] = 0  # the embedding that is poisoned
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        getattr(rows.sampler, name)[-1] = math.nan


if __name__ == "__main__":
    part, settings = sys.argv[1], SimpleNamespace(**json.loads(sys.argv[2]))
    if settings.device == "cpu":
        torch.set_num_threads(1)
    with torch.no_grad():
        dict(equal=equal, batches=batches, poison=poison)[part](settings)
