"""Throughput and latency on one GPU, side by side: `python benchmarks/serving.py --out results.json`.

Every engine runs in a process of its own, in turn, on the same workloads; nano-vLLM takes part if `nanovllm` can be
imported (and a checkpoint folder is given for it). A table with each rate, its ratio to the best other engine and its
share of the machine's limit closes the run.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from workloads import SHAPES, config_dict, measure

ENGINES = ("fnllm", "nano-vllm")
WORK = ("W1", "W2", "W3", "W4", "W5")


def fnllm_generate(size: str, options: dict):
    """(generate, seconds to ready) of this project on random weights."""
    import fnllm
    import fnllm_weights

    began = time.perf_counter()
    config = fnllm_weights.ModelConfig.from_dict(config_dict(size))
    tree = fnllm_weights.init(config, dtype="bfloat16", device="cuda")
    params = fnllm_weights.Params(config, None, tree, fnllm_weights.Shard(), {})

    def generate(prompts: list, lens: list) -> None:
        sampling = [fnllm.Sampling(temperature=0.6, max_tokens=n, ignore_eos=True) for n in lens]
        fnllm.generate(params, prompts, sampling, **options)

    fnllm.engine(params, **options).prepare(fnllm.Sampling(temperature=0.6))
    generate([[1, 2, 3]], [8])
    return generate, time.perf_counter() - began


def nano_generate(size: str, folder: str):
    """(generate, seconds to ready) of nano-vLLM on a checkpoint folder of this shape."""
    from nanovllm import LLM, SamplingParams

    began = time.perf_counter()
    llm = LLM(folder, enforce_eager=False, max_model_len=4096)

    def generate(prompts: list, lens: list) -> None:
        sampling = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n) for n in lens]
        llm.generate(prompts, sampling, use_tqdm=False)

    return generate, time.perf_counter() - began


def run_one(args: argparse.Namespace) -> None:
    """Measure one engine in this process, a JSON line for each row."""
    rows = open(args.out, "a")

    def emit(**row) -> None:
        line = json.dumps(dict(engine=args.engine, size=args.size, **row))
        print(line, flush=True)
        rows.write(line + "\n")
        rows.flush()

    if args.engine == "fnllm":
        generate, ready = fnllm_generate(args.size, dict(compile=args.compile, max_model_len=args.max_model_len))
    else:
        generate, ready = nano_generate(args.size, args.checkpoint)
    emit(workload="start", seconds=ready)
    for which in args.work.split(","):
        began = time.perf_counter()
        generate([[5] * 100] * 256, [2] * 256)  # graphs and kernels of the largest batch are not part of the figures
        try:
            for row in measure(generate, args.size, which):
                emit(workload=which, **row)
        except Exception as error:  # the next workload may still run
            emit(workload=which, error=f"{type(error).__name__}: {error}"[:300])
        emit(workload=which, total_seconds=time.perf_counter() - began)


def table(rows: list[dict]) -> str:
    """Markdown: one line a workload, one column an engine, and fnllm's ratio to the best other and to the limit."""
    engines = [e for e in ENGINES if any(r["engine"] == e for r in rows)]
    lines = [
        "| shape | workload | " + " | ".join(engines) + " | ratio | of the limit |",
        "|---" * (4 + len(engines)) + "|",
    ]
    keys = list(
        dict.fromkeys(
            (r["size"], r["workload"], r.get("case", r.get("batch", "")))
            for r in rows
            if "floor_tok_s" in r or "floor_ms" in r
        )
    )
    for size, work, case in keys:
        cells, found = [], {}
        for row in rows:
            if (row["size"], row["workload"], row.get("case", row.get("batch", ""))) == (size, work, case) and (
                "tok_s" in row or "ms" in row
            ):
                found[row["engine"]] = row
        for engine in engines:
            row = found.get(engine)
            cells.append("" if row is None else f"{row['ms']:.1f} ms" if "ms" in row else f"{row['tok_s']:,.0f} tok/s")
        mine, others = found.get("fnllm"), [r for e, r in found.items() if e != "fnllm"]
        ratio = share = ""
        if mine is not None:
            share = (
                f"{mine['floor_ms'] / mine['ms']:.0%}" if "ms" in mine else f"{mine['tok_s'] / mine['floor_tok_s']:.0%}"
            )
            if others:
                best = (
                    min(r["ms"] for r in others) / mine["ms"]
                    if "ms" in mine
                    else mine["tok_s"] / max(r["tok_s"] for r in others)
                )
                ratio = f"{best:.2f}"
        lines.append(f"| {size} | {work} {case} | " + " | ".join(cells) + f" | {ratio} | {share} |")
    return "\n".join(lines)


def versions() -> dict:
    import torch
    import triton

    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    return dict(
        torch=torch.__version__, triton=triton.__version__, gpu=torch.cuda.get_device_name(), commit=commit,
        date=time.strftime("%Y-%m-%d"),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="benchmarks/results/serving.json")
    parser.add_argument("--size", default="0.6b", help=f"one or more of {', '.join(SHAPES)}, comma-separated")
    parser.add_argument("--work", default=",".join(WORK))
    parser.add_argument("--compile", default=None, help="fnllm's compile mode")
    parser.add_argument("--max-model-len", type=int, default=40960)
    parser.add_argument("--checkpoint", help="folder of a checkpoint for engines that need one; {size} is replaced")
    parser.add_argument("--engine", choices=ENGINES, help="measure this one alone, in this process")
    args = parser.parse_args()
    if args.engine:
        run_one(args)
        return
    engines = [e for e in ENGINES if e == "fnllm" or (args.checkpoint and find_spec("nanovllm"))]
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "rows.jsonl"
        for size in args.size.split(","):
            for engine in engines:
                command = [
                    sys.executable,
                    __file__,
                    "--engine",
                    engine,
                    "--size",
                    size,
                    "--out",
                    str(lines),
                    "--work",
                    args.work,
                ]
                command += ["--max-model-len", str(args.max_model_len)]
                command += ["--compile", args.compile] if args.compile else []
                command += ["--checkpoint", args.checkpoint.format(size=size)] if args.checkpoint else []
                subprocess.run(command, check=False)
        rows = [json.loads(line) for line in lines.read_text().splitlines()]
    Path(args.out).write_text(json.dumps(dict(**versions(), rows=rows), indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
