"""Tensor parallelism on the GPUs of one machine: `python benchmarks/tensor_parallel.py --ranks 2 --out results.json`.

Parts, each in processes of its own under torchrun with a time limit, their results kept as they come:
- equal: greedy tokens of the test checkpoints in float32 through the captured step, against their goldens, on one rank
  and on all; how far logits move between one rank and all, in float32 and bfloat16, and how long one greedy sequence in
  bfloat16 stays the same. --smollm2 FOLDER adds a real model.
- open: captures, edits, swapped layers, forks and replays on all ranks against one; batch-invariant bits on each.
- reduce: one all-reduce in a graph, by NCCL and by one kernel over peer memory, the project's and PyTorch's.
- serve: the workloads on a large shape, on one rank and on all, with either all-reduce; the efficiency; the share of
  all-reduces in a decode step.
- load: seconds and bytes of each rank for one checkpoint on the disk.
- fault: one rank is killed, or hangs, in the middle of captured steps: how long until all have ended.

With --ranks 1 the collectives run in a group of one; --cpu tries everything with gloo on a tiny shape.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from children import HERE, ROOT, environment, facts

PARTS = ("equal", "open", "reduce", "load", "fault", "serve")
# Multicast puts a host's switch at risk when a process is killed, and some hosts forbid it.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
FAULT_TIMEOUT_S = 15


def torchrun(
    part: str, ranks: int, args: argparse.Namespace, folder: Path, env: dict | None = None, **more: Any
) -> dict:
    """Run a part; its status, seconds and, if it failed, the end of what it said."""
    settings = dict(
        ranks=ranks, rows=str(folder / "rows.jsonl"), folder=str(folder), cpu=args.cpu, size=args.size,
        device="cpu" if args.cpu else None, compile=args.compile or ("none" if args.cpu else "reduce-overhead"),
        load_size=args.load_size, work=args.work, oracle=args.oracle, smollm2=args.smollm2, one_rank_group=False,
    )  # fmt: skip
    settings.update(more)
    given = environment(**NO_MULTICAST, **(env or {}))
    given.setdefault("OMP_NUM_THREADS", "1" if args.cpu else "4")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(HERE / "tensor_parallel_ranks.py"), part, json.dumps(settings)]
    began = time.perf_counter()
    process = subprocess.Popen(command, env=given, stderr=subprocess.PIPE, text=True)
    try:
        _, err = process.communicate(timeout=args.limit)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks
        _, err = process.communicate()
        err += f"\nended after {args.limit} s"
    result = dict(part=part, ranks=ranks, status=process.returncode, seconds=time.perf_counter() - began)
    return result if process.returncode == 0 else {**result, "stderr": err[-3000:]}


def compare_logits(folder: Path, ranks: int) -> list[dict]:
    import torch

    one, many = (torch.load(folder / f"logits{n}.pt") for n in (1, ranks))
    rows = []
    for name, dtype in one:
        if dtype == "alone":
            rows.append(compare_alone(name, one[name, dtype], many[name, dtype]))
            continue
        difference = (one[name, dtype] - many[name, dtype]).abs()
        same = (one[name, dtype].argmax(-1) == many[name, dtype].argmax(-1)).float().mean()
        row = dict(part="logits", checkpoint=name, dtype=dtype, argmax_equal=float(same))
        rows.append(dict(row, largest=float(difference.max()), mean=float(difference.mean())))
    return rows


def compare_alone(name: str, one: tuple, many: tuple) -> dict:
    """How far two greedy runs in bfloat16 agree: tokens until they part, and how far their logprobs are apart there."""
    same = [a == b for a, b in zip(one[0], many[0], strict=True)]
    count = same.index(False) if False in same else len(same)
    apart = max((abs(a - b) for a, b in zip(one[1][:count], many[1][:count], strict=True)), default=None)
    return dict(part="alone", checkpoint=name, dtype="bfloat16", tokens=len(same), equal_tokens=count, largest=apart)


def fault(args: argparse.Namespace, folder: Path, kind: str) -> dict:
    """Seconds from the fault until every rank has ended."""
    struck = folder / "struck"
    struck.unlink(missing_ok=True)
    result = torchrun("fault", args.ranks, args, folder, {"FNLLM_TIMEOUT_S": str(FAULT_TIMEOUT_S)}, kind=kind)
    after = time.time() - float(struck.read_text()) if struck.exists() else None
    return dict(
        result,
        part="fault",
        kind=kind,
        seconds_after=after,
        timeout_s=FAULT_TIMEOUT_S,
        stderr=result.get("stderr", "")[:1500],
    )


def run(args: argparse.Namespace, folder: Path) -> Iterator[dict]:
    """All parts: a row for how each process group ended, and rows that compare groups. What the ranks measured is in
    `rows.jsonl` of the folder."""
    parts, counts = args.parts.split(","), sorted({1, args.ranks})

    def ended(part: str, ranks: int, *more: Any, **settings: Any) -> dict:
        return dict(torchrun(part, ranks, args, folder, *more, **settings), ended=True)

    if "equal" in parts:
        for ranks in counts:
            yield ended("equal", ranks)
        if all((folder / f"logits{n}.pt").exists() for n in counts):
            yield from compare_logits(folder, args.ranks)
    if "open" in parts:
        for ranks in counts:
            yield ended("open", ranks)
    if "reduce" in parts:
        yield ended("reduce", args.ranks)
    if "load" in parts:
        yield ended("save", 1)
        for ranks in counts:
            yield ended("load", ranks)
    if "fault" in parts:
        for kind in ("kill", "hang") if args.ranks > 1 else ("kill",):
            yield fault(args, folder, kind)
    if "serve" in parts:
        for ranks in counts:
            yield ended("serve", ranks, {"FNLLM_ALL_REDUCE": "group"})
        if args.ranks == 1:
            yield ended("serve", 1, one_rank_group=True)
        elif not args.cpu:
            yield ended("serve", args.ranks, {"FNLLM_ALL_REDUCE": "one_shot"})


def table(rows: list[dict], ranks: int) -> str:
    """Markdown: each workload's rate on one rank and on all, the ratio, and that of the ideal."""
    rates: dict = {}
    for row in rows:
        if row.get("part") == "serve" and "tok_s" in row:
            rates.setdefault((row["workload"], row.get("batch", "")), {})[row["ranks"], row["all_reduce"]] = row[
                "tok_s"
            ]
    lines = [f"| workload | 1 rank | {ranks} ranks | ratio | efficiency | {ranks} ranks, one_shot |", "|---" * 6 + "|"]
    for (work, batch), found in rates.items():
        one, many, other = (found.get(key) for key in ((1, "group"), (ranks, "group"), (ranks, "one_shot")))
        cells = [f"{x:,.0f} tok/s" if x else "" for x in (one, many)]
        ratio = many / one if one and many else None
        cells += [f"{ratio:.2f}", f"{ratio / ranks:.0%}"] if ratio else ["", ""]
        lines.append(f"| {work} {batch} | {' | '.join([*cells, f'{other:,.0f} tok/s' if other else ''])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="GPUs to use")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "tensor_parallel.json")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--size", help="shape to serve: 0.6b, 8b or tiny; default 8b, on a CPU tiny")
    parser.add_argument("--load-size", help="shape to load; default 0.6b, on a CPU tiny")
    parser.add_argument("--work", default="W2,W3,W1")
    parser.add_argument("--compile", help="the engine's compile mode")
    parser.add_argument("--oracle", default=str(ROOT / "tests" / "oracle"))
    parser.add_argument("--smollm2", help="folder made by examples/make_smollm2.py")
    parser.add_argument("--limit", type=float, default=240, help="seconds that a part may take")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    args.size = args.size or ("tiny" if args.cpu else "8b")
    args.load_size = args.load_size or ("tiny" if args.cpu else "0.6b")
    header = dict(**facts(), ranks=args.ranks)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as name:
        found, file = [], Path(name) / "rows.jsonl"
        for row in run(args, Path(name)):
            found.append(row)
            measured = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
            rows = [*measured, *found]
            args.out.write_text(json.dumps(dict(header, rows=rows), indent=1) + "\n")  # kept as they come
    print(table(rows, args.ranks))
    for row in rows:
        if row.get("ended") and row["status"]:
            print(f"{row['part']} on {row['ranks']} ranks failed: {row['stderr'][-800:]}", file=sys.stderr)


if __name__ == "__main__":
    main()
