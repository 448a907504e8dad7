"""All checks that need a GPU, by one command: `python benchmarks/gpu_checks.py --out gpu_checks.json`.

Parts, each in processes of its own with a time limit; the results are written after every part:
- pytest: the tests marked gpu.
- memcheck, racecheck: every custom op once under compute-sanitizer (sanitized_kernels.py).
- equal, batches, poison: see gpu_check_parts.py. --checkpoint FOLDER adds a real model to `equal` and `invariance`.
- invariance: bits alone, in batches, in chunks, preempted, on prefix hits and scored (gpu_check_invariance.py).
- open: captures, edits, swaps and states against plain passes on the CPU (gpu_check_open.py).
- examples: every script of examples/ that needs no network (gpu_check_examples.py).
- soak: random requests for --minutes (soak.py).
- numerics: the price of batch invariance (numerics_price.py).
- startup: seconds until the first token, and that nothing is built later (startup.py).

--only a,b runs some parts; those that are in --out already and not run again stay there. --cpu tries everything on tiny
shapes without a GPU. Ends with 1 if a part failed.
"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from children import HERE, ROOT, environment, facts

PARTS = ("pytest", "memcheck", "racecheck", "equal", "batches", "poison", "invariance", "open", "examples", "soak",
         "numerics", "startup")  # fmt: skip
SHARED = ("equal", "invariance", "open", "examples")  # their cases are divided among --jobs processes
SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
SANITIZED = 9  # status of a run in which the sanitizer found something
TAIL = 2500  # characters kept of what a failed process said


def commands(part: str, args: argparse.Namespace, folder: Path) -> list[list[str]]:
    """What a part runs at the same time; its results go to `folder`."""
    python, device, out = sys.executable, "cpu" if args.cpu else "cuda", str(folder / f"{part}.json")
    if part == "pytest":
        chosen = ["-k", "kv_store"] if args.cpu else ["-m", "gpu"]
        if importlib.util.find_spec("xdist"):
            chosen += ["-n", str(args.jobs)]
        return [[python, "-m", "pytest", *chosen, "-q", "-rfE", "--tb=short", "-p", "no:cacheprovider",
                 "--continue-on-collection-errors", "tests"]]  # fmt: skip
    if part in ("memcheck", "racecheck"):
        run = [python, str(HERE / "sanitized_kernels.py"), "--device", device]
        return [run if args.cpu else [SANITIZER, "--tool", part, "--error-exitcode", str(SANITIZED), *run]]
    if part in ("batches", "poison", *SHARED):
        jobs = args.jobs if part in SHARED else 1
        settings = dict(
            rows=str(folder / f"{part}.jsonl"), device=device, oracle=str(ROOT / "tests" / "oracle"),
            checkpoint=args.checkpoint, modes=args.modes, jobs=jobs, largest=3 if args.cpu else 256,
            size="tiny" if args.cpu else "0.6b-cut" if part == "batches" else "small",
            dtype="float32" if args.cpu else "bfloat16", compile="none" if args.cpu else "graphs",
        )  # fmt: skip
        run = [python, str(HERE / "gpu_check_parts.py"), part]
        if part in ("invariance", "open", "examples"):
            run = [python, str(HERE / f"gpu_check_{part}.py")]
        return [[*run, json.dumps(dict(settings, job=job, limit=args.limit / 2))] for job in range(jobs)]
    if part == "soak":
        return [[python, str(HERE / "soak.py"), "--minutes", str(args.minutes), "--seed", str(args.seed),
                 "--device", device, "--out", out]]  # fmt: skip
    if part == "numerics":
        return [[python, str(HERE / "numerics_price.py"), "--out", out]]
    size, modes, rows = ("tiny", "none", "4") if args.cpu else (args.size, args.modes, "64")
    return [[python, str(HERE / "startup.py"), "--size", size, "--device", device, "--modes", modes, "--seqs", rows,
             "--limit", str(args.limit / 2), "--out", out]]  # fmt: skip


def run(part: str, args: argparse.Namespace, folder: Path) -> dict:
    """Run a part: whether it is well, its seconds, what it measured, and if it failed the end of what it said."""
    if part.endswith("check") and not args.cpu and not Path(SANITIZER).exists():
        return dict(ok=None, summary="compute-sanitizer is not installed here")
    env, began, together = environment(), time.perf_counter(), commands(part, args, folder)
    env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // len(together))))
    logs, processes = [], []
    for number, command in enumerate(together):
        logs.append(folder / f"{part}{number}.log")
        with open(logs[-1], "w") as log:
            processes.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT,
                                              start_new_session=True))  # fmt: skip
    statuses = []
    for process in processes:
        try:
            statuses.append(process.wait(timeout=max(1, began + args.limit - time.perf_counter())))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # and what it started
            process.wait()
            statuses.append(f"ended after {args.limit:.0f} s")
    said = [log.read_text(errors="replace") for log in logs]
    found = results(part, folder, said)
    ok = all(status == 0 for status in statuses) and all(row.get("ok", True) for row in found.get("rows", []))
    if part == "racecheck" and statuses == [SANITIZED]:
        ok = found["own_hazards"] == 0
    result = dict(ok=ok, seconds=round(time.perf_counter() - began, 1), statuses=statuses, **found)
    return result if ok else dict(result, said=[text[-TAIL:] for text in said])


def results(part: str, folder: Path, said: list[str]) -> dict:
    """What a part left in its files, or said, with a line that sums it up."""
    if (folder / f"{part}.jsonl").exists():
        rows = [json.loads(line) for line in (folder / f"{part}.jsonl").read_text().splitlines()]
        return dict(summary=f"{sum(row['ok'] for row in rows)} of {len(rows)} ok", rows=rows)
    if (folder / f"{part}.json").exists():
        found = json.loads((folder / f"{part}.json").read_text())
        return dict(summary=summary_of(part, found), result=found)
    lines = [line for line in said[0].splitlines() if line.strip()]
    if part.endswith("check"):
        sanitized = [line for line in lines if "SUMMARY" in line]
        # FlashAttention's tile scheduler hands work on through shared memory in a way that racecheck reports.
        foreign = "flash::", "nvjet_"  # FlashAttention's and cuBLAS's kernels
        own = sum("Race reported" in line and not any(name in line for name in foreign) for line in lines)
        summary = sanitized[-1].strip("= ") if sanitized else " ".join(lines[-1:])
        if part == "racecheck":
            summary += f"; {own} outside FlashAttention and cuBLAS"
        return dict(summary=summary, own_hazards=own, cases=[line[:200] for line in lines[:200]])
    return dict(summary=" ".join(lines[-1:]).strip("= "))


def summary_of(part: str, found: dict) -> str:
    """One line of a result."""
    if part == "soak":
        return (
            f"{found['moves']} moves, {found['counts'].get('requests', 0)} requests, {found['tokens_checked']} tokens "
            f"checked, {found['faults']} faults, {len(found['problems'])} problems"
        )
    if part == "numerics":
        return ", ".join(f"{row['work']} {row['ratio']:.2f}x" for row in found["rows"])
    return ", ".join(
        f"{row['mode']} {row['caches']} {row.get('first_token_s', 0) + row.get('prepare_s', 0):.1f} s"
        for row in found["rows"]
    )


def table(parts: dict[str, dict]) -> str:
    """Markdown: one line a part."""
    words = {True: "ok", False: "FAILED", None: "not run"}
    lines = ["| part | | s | |", "|---|---|---:|---|"]
    lines += [f"| {name} | {words[one['ok']]} | {one.get('seconds', '')} | {one.get('summary', '')} |"
              for name, one in parts.items()]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "gpu_checks.json")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, comma-separated")
    parser.add_argument("--limit", type=float, default=600, help="seconds that a part may take")
    parser.add_argument("--minutes", type=float, default=8, help="minutes of the soak, less than the limit")
    parser.add_argument("--seed", type=int, default=0, help="of the soak")
    parser.add_argument("--modes", default="none,graphs,inductor,reduce-overhead", help="compile modes to check")
    parser.add_argument("--jobs", type=int, default=8, help=f"processes for each of {', '.join(SHARED)}")
    parser.add_argument("--size", default="8b", help="shape of the checkpoint that `startup` loads")
    parser.add_argument("--checkpoint", help="folder of a real checkpoint for `equal` and `invariance`")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    if unknown := set(args.only.split(",")) - set(PARTS):
        parser.error(f"--only has {', '.join(sorted(unknown))}; parts are {', '.join(PARTS)}")
    kept = json.loads(args.out.read_text()).get("parts", {}) if args.out.exists() else {}
    run_now: dict[str, dict] = {}
    origin = facts()
    with tempfile.TemporaryDirectory() as folder:
        for part in args.only.split(","):
            run_now[part] = dict(run(part, args, Path(folder)), commit=origin["commit"])
            print(f"{part}: {run_now[part].get('summary', '')}", flush=True)
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(dict(**origin, parts={**kept, **run_now}), indent=1) + "\n")
    print(table(run_now))
    sys.exit(any(one["ok"] is False for one in run_now.values()))


if __name__ == "__main__":
    main()
