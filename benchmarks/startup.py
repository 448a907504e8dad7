"""How long until the first token, and whether anything is built after that: `python benchmarks/startup.py`.

A checkpoint of random weights is made once (on /dev/shm, so that reading it is a copy from memory). For each compile
mode two processes load and run it, the first with empty compiler caches, the second with what the first left there:
seconds of the import, the load, the first token and `prepare` (without graphs: a first run of the mixed requests), and
then how many functions were made, traced again and captured while requests of mixed lengths and temperatures ran, which
must be none.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from checkpoints import room_for_checkpoint

BEGAN = time.perf_counter()  # of this process, as nearly as a script can tell
HERE = Path(__file__).parent
MODES = ("none", "graphs", "inductor", "reduce-overhead")


def start(args: argparse.Namespace) -> dict:
    """In a process of its own: load, generate, prepare, generate."""
    import torch

    import fnllm
    from fnllm_weights import load_with_report

    if args.device == "cuda":
        torch.cuda.init()
    times = dict(import_s=time.perf_counter() - BEGAN)
    began = time.perf_counter()
    params, report = load_with_report(args.checkpoint, device=args.device)
    if args.device == "cuda":
        torch.cuda.synchronize()
    times["load_s"] = time.perf_counter() - began
    times["load_gb_s"] = report.nbytes / times["load_s"] / 1e9
    reports: list[str] = []
    options = dict(compile=args.mode, max_model_len=4096, max_num_seqs=args.seqs)
    if args.device == "cpu":
        options.update(num_blocks=64, max_model_len=256)
    began = time.perf_counter()
    engine = fnllm.engine(params, report=reports.append, **options)
    times["engine_s"] = time.perf_counter() - began

    def generate(lengths: list[int], new: list[int]) -> None:
        prompts = [[7 + (13 * place + row) % 80 for place in range(length)] for row, length in enumerate(lengths)]
        samplings = [fnllm.Sampling(temperature=0.5 + row % 3 / 4, seed=row, max_tokens=count, ignore_eos=True)
                     for row, count in enumerate(new)]  # fmt: skip
        fnllm.generate(params, prompts, samplings, progress=False, **options)

    for name in ("first_token_s", "next_first_token_s"):
        began = time.perf_counter()
        generate([100], [1])
        times[name] = time.perf_counter() - began
    longest = 40 if args.device == "cpu" else 3000

    def generate_mixed() -> None:
        for count in (3, args.seqs, args.seqs):
            generate([1 + (37 * n * n) % longest for n in range(count)], [2 + n % 23 for n in range(count)])

    began = time.perf_counter()
    if args.mode in ("graphs", "reduce-overhead"):
        engine.prepare(fnllm.Sampling(temperature=0.7))
    else:
        generate_mixed()  # without graphs there is nothing to prepare; steps are built when they are first needed
    times["prepare_s"] = time.perf_counter() - began
    before = built(engine, reports)
    generate_mixed()
    after = built(engine, reports)
    return dict(
        **{name: round(value, 3) for name, value in times.items()},
        weight_bytes=report.nbytes,
        built_before=before,
        built_during_mixed_requests={name: after[name] - before[name] for name in after},
    )


def built(engine, reports: list[str]) -> dict:
    """How many functions were compiled, graphs of operations traced for them, and CUDA graphs captured so far."""
    from fnllm.compiled import graphs_traced

    return dict(
        functions=sum(len(runner.compiled) for runner in engine.machine.runners.values()),
        traced=graphs_traced(),
        captured=sum(line.startswith("captured ") for line in reports),
    )


def child(args: argparse.Namespace, mode: str, caches: str, which: str) -> dict:
    """A row: what one process measured, or how it failed."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
    command = [sys.executable, str(HERE / "startup.py"), "--mode", mode, "--checkpoint", str(args.checkpoint)]
    command += ["--device", args.device, "--seqs", str(args.seqs)]
    row = dict(mode=mode, caches=which)
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=args.limit)
    except subprocess.TimeoutExpired:
        return dict(row, error=f"ended after {args.limit} s")
    if done.returncode:
        return dict(row, error=done.stderr[-2000:])
    return dict(row, **json.loads(done.stdout.splitlines()[-1]))


def table(rows: list[dict]) -> str:
    """Markdown: seconds, and what was built too late."""
    names = ("import_s", "load_s", "load_gb_s", "engine_s", "first_token_s", "prepare_s")
    lines = [f"| mode | caches | {' | '.join(names)} | built late |", "|---|---|" + "---:|" * len(names) + "---|"]
    for row in rows:
        cells = [f"{row[name]:.2f}" if name in row else "" for name in names]
        late = row.get("built_during_mixed_requests", {})
        late = row.get("error", "") or ", ".join(f"{count} {name}" for name, count in late.items() if count) or "none"
        lines.append(f"| {row['mode']} | {row['caches']} | {' | '.join(cells)} | {late.strip()[-60:]} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="8b", help="shape of the checkpoint that is made")
    parser.add_argument("--checkpoint", type=Path, help="folder; default: one on /dev/shm, made if it is not there")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--seqs", type=int, default=64, help="sequences that run at a time")
    parser.add_argument("--limit", type=float, default=600, help="seconds that a process may take")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--mode", choices=MODES, help="measure this one in this process")
    args = parser.parse_args()
    args.checkpoint = args.checkpoint or room_for_checkpoint() / f"fnllm-startup-{args.size}"
    if args.mode:
        print(json.dumps(start(args)))
        return
    from checkpoints import make_checkpoint
    from provenance import provenance

    make_checkpoint(args.checkpoint, args.size, args.device)
    rows: list[dict] = []
    for mode in args.modes.split(","):
        with tempfile.TemporaryDirectory() as caches:
            for which in ("cold", "warm"):
                rows.append(child(args, mode, caches, which))
                print(json.dumps(rows[-1]), flush=True)
                if args.out:
                    facts = dict(**provenance(), size=args.size, rows=rows)
                    args.out.write_text(json.dumps(facts, indent=1) + "\n")
    print(table(rows))
    late = any(any(row.get("built_during_mixed_requests", {1: 1}).values()) for row in rows)
    sys.exit(late or any("error" in row for row in rows))


if __name__ == "__main__":
    main()
