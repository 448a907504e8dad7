"""What `numerics="batch_invariant"` costs: `python benchmarks/numerics_price.py --out numerics_price.json`.

Both kinds of numerics decode and prefill the same prompts in one process, alternating, so that the machine's moods
meet both. Default numerics run with --compile (graphs, which batch_invariant also uses: the price is then that of the
numerics alone).
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from provenance import SMALL_SHAPES, provenance, random_params
from workloads import SHAPES

import fnllm

NUMERICS = ("default", "batch_invariant")


def options_of(numerics: str, args: argparse.Namespace) -> dict:
    """Engine options; both have a cache of the same size and no prefix cache."""
    mode = args.compile if numerics == "default" or args.compile == "none" else "graphs"
    longest = max(args.prompt + args.new, args.prefill) + 1
    blocks = -(-max(args.batches) * (args.prompt + args.new + 1) // 128) + max(args.batches) + -(-longest // 128)
    return dict(
        numerics=numerics, compile=mode, max_model_len=longest, max_num_seqs=max(args.batches), num_blocks=blocks,
        block_size=128, prefix_cache=False,
    )  # fmt: skip


def seconds(generate: Callable[[int, int, int], None], *work: int) -> float:
    began = time.perf_counter()
    generate(*work)
    return time.perf_counter() - began


def alternate(run: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Each way once to warm up, then in turn."""
    for measure in run.values():
        measure()
    found: dict[str, list[float]] = {name: [] for name in run}
    for _ in range(repeats):
        for name, measure in run.items():
            found[name].append(measure())
    return found


def rows_of(params: fnllm.Params, args: argparse.Namespace) -> list[dict]:
    """One row a batch size, and one for the prefill: each kind's seconds and tokens per second, and the ratio."""

    def generator(numerics: str) -> Callable[[int, int, int], None]:
        options = options_of(numerics, args)

        def generate(batch: int, prompt: int, new: int) -> None:
            prompts = [[7 + (31 * row + 7 * place) % 80 for place in range(prompt)] for row in range(batch)]
            sampling = fnllm.Sampling(temperature=0.6, seed=1, max_tokens=new, ignore_eos=True)
            fnllm.generate(params, prompts, sampling, progress=False, **options)

        return generate

    generate = {numerics: generator(numerics) for numerics in NUMERICS}
    rows = []
    for batch in args.batches:

        def step(numerics: str, batch: int = batch) -> float:
            whole, first = (seconds(generate[numerics], batch, args.prompt, new) for new in (args.new, 1))
            return (whole - first) / (args.new - 1)

        found = alternate({numerics: lambda n=numerics: step(n) for numerics in NUMERICS}, args.repeats)
        rows.append(row_of(f"decode, batch {batch}", found, batch))
    length = args.prefill
    found = alternate(
        {numerics: lambda n=numerics: seconds(generate[n], 1, length, 1) for numerics in NUMERICS}, args.repeats
    )
    return [*rows, row_of(f"prefill of {length}", found, length)]


def row_of(work: str, found: dict[str, list[float]], tokens: int) -> dict:
    medians = {name: statistics.median(times) for name, times in found.items()}
    return dict(
        work=work,
        seconds=found,
        tok_s={name: tokens / median for name, median in medians.items()},
        ratio=medians["batch_invariant"] / medians["default"],
    )


def table(rows: list[dict]) -> str:
    """Markdown."""
    lines = ["| | default, tok/s | batch_invariant, tok/s | times as long |", "|---|---:|---:|---:|"]
    for row in rows:
        rates = " | ".join(f"{row['tok_s'][name]:,.0f}" for name in NUMERICS)
        lines.append(f"| {row['work']} | {rates} | {row['ratio']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=[*SHAPES, *SMALL_SHAPES], default="0.6b" if on_gpu else "tiny")
    parser.add_argument("--compile", default="graphs" if on_gpu else "none", help="the default numerics' compile mode")
    parser.add_argument("--batches", default="1,8,32,256" if on_gpu else "1,4")
    parser.add_argument("--prompt", type=int, default=128 if on_gpu else 8)
    parser.add_argument("--new", type=int, default=129 if on_gpu else 9, help="new tokens, more than one")
    parser.add_argument("--prefill", type=int, default=8192 if on_gpu else 64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    args.batches = [int(batch) for batch in args.batches.split(",")]
    device, dtype = ("cuda", "bfloat16") if on_gpu else ("cpu", "float32")
    rows = rows_of(random_params(args.size, dtype=dtype, device=device), args)
    if args.out:
        args.out.write_text(json.dumps(dict(**provenance(), settings=settings, rows=rows), indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
