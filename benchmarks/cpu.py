"""Greedy decoding on the CPU in float32, fnllm (eager) beside transformers (sdpa), in one process and in turns.

    python benchmarks/cpu.py smollm2/ --out benchmarks/results/cpu.json

Prompts are random token ids. A rate counts the tokens after the first of each sequence, over the time since all first
tokens were there; the median of the turns is reported, and whether both made the same tokens.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers
from provenance import provenance

import fnllm


class Run(NamedTuple):
    """One batch, generated once."""

    tokens: list[list[int]]  # the new ones
    seconds: float  # from the first new token of the last sequence to the end


Generate = Callable[[list[list[int]], int], Run]


def fnllm_generate(params: fnllm.Params) -> Generate:
    """Generation with fnllm, without compiling and without a prefix cache."""

    def generate(prompts: list[list[int]], new: int) -> Run:
        greedy = fnllm.Sampling(temperature=0, max_tokens=new, ignore_eos=True)
        options = {"compile": "none", "prefix_cache": False, "max_model_len": 1024, "max_num_seqs": 8}
        found = fnllm.generate(params, prompts, greedy, progress=False, **options)
        seconds = max(c.timings.total for c in found) - max(c.timings.first_token for c in found)
        return Run([list(c.token_ids) for c in found], seconds)

    return generate


def transformers_generate(model: transformers.PreTrainedModel) -> Generate:
    """Generation with transformers' own loop and its default cache."""

    def generate(prompts: list[list[int]], new: int) -> Run:
        first: list[float] = []

        def watch(ids: torch.Tensor, scores: torch.Tensor, **_) -> torch.Tensor:
            first.append(time.perf_counter())  # called after each step
            return torch.zeros(ids.shape[0], dtype=torch.bool)

        ids = torch.tensor(prompts)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=new,
            max_new_tokens=new,
            stopping_criteria=transformers.StoppingCriteriaList([watch]),
        )
        return Run(out[:, ids.shape[1] :].tolist(), time.perf_counter() - first[0])

    return generate


def compare(ways: dict[str, Generate], batch: int, args: argparse.Namespace, vocabulary: int) -> dict:
    """Both ways on one batch, in turns after a warm-up: tokens a second of each turn and their medians."""
    prompts = np.random.default_rng(0).integers(100, vocabulary, (batch, args.prompt)).tolist()
    for generate in ways.values():
        generate(prompts, 4)
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    for _ in range(args.turns):
        for name, generate in ways.items():
            runs[name].append(generate(prompts, args.new))
    rates = {name: [batch * (args.new - 1) / run.seconds for run in found] for name, found in runs.items()}
    ours, theirs = (np.array(found[0].tokens) for found in runs.values())
    median = {name: round(statistics.median(found), 2) for name, found in rates.items()}
    return {
        "batch": batch,
        "tokens_per_second": median,
        "ratio": round(median["fnllm"] / median["transformers"], 3),
        "turns": {name: [round(rate, 2) for rate in found] for name, found in rates.items()},
        "same_tokens": round(float((ours == theirs).mean()), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="checkpoint folder, such as one from examples/make_smollm2.py")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=32, help="tokens in a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    params = fnllm.load(args.model, device="cpu", dtype=torch.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    ways = {"fnllm": fnllm_generate(params), "transformers": transformers_generate(model)}
    load_before = os.getloadavg()[0]
    rows = []
    for batch in args.batches:
        rows.append(compare(ways, batch, args, params.config.vocab_size))
        print(json.dumps(rows[-1]), flush=True)
    record = {
        **provenance(),
        "what": f"greedy decoding, float32, prompts of {args.prompt} tokens, {args.new} new ones",
        "model": args.model.resolve().name,
        "transformers": transformers.__version__,
        "threads": args.threads,
        "load_average": {"before": round(load_before, 2), "after": round(os.getloadavg()[0], 2)},
        "rows": rows,
    }
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
