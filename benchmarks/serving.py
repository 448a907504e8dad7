"""Throughput and latency on one GPU, the project and its peers side by side: `python benchmarks/serving.py`.

Every engine is a process of its own with 44 GiB of cache, and all take turns on one GPU: each workload is measured with
the one, then with the next, so that a slow host or a warm GPU meets all of them. vLLM and nano-vLLM take part if this
Python has them, or with one that does, since peers pin versions of torch: `--python vllm=other/bin/python`. The run
closes with a table of each rate, its ratio to the best other engine and its share of the machine's limit.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from checkpoints import room_for_checkpoint
from provenance import provenance
from workloads import SHAPES

HERE = Path(__file__).parent
PEERS = {"vllm": "vllm", "nano-vllm": "nanovllm"}  # what each is imported by
WORK = ("W1", "W2", "W3", "W4", "W5")
SIZED_BY_WHAT_IS_FREE = ("nano-vllm",)  # engines that start when the others have taken their memory
UNITS = ("tok_s", "ms")
POLL_S = 0.02


class Engine:
    """An engine's process; `run` gives it a workload and waits for its rows, `limit` seconds at most."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, limit: float):
        self.name, self.rows, self.log = name, folder / f"{name}.jsonl", folder / f"{name}.log"
        self.rows.touch()
        self.limit, self.began = limit, time.monotonic()
        self.ended = 0
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True, start_new_session=True
            )

    def wait(self) -> bool:
        """Until it has ended one thing more, or has died: whether it lives. One that does not answer is ended."""
        while True:
            ended = sum(bool(row.get("ended")) for row in self.found())
            if ended > self.ended:
                self.ended = ended
                return True
            if self.process.poll() is not None:
                return False
            if time.monotonic() - self.began > self.limit:
                os.kill(self.process.pid, signal.SIGUSR1)  # at which it says where it is
                time.sleep(1)
                with open(self.log, "a") as log:
                    log.write(f"\nit did not answer for {self.limit:.0f} s\n")
                self.stop()
                return False
            time.sleep(POLL_S)

    def ready(self) -> bool:
        """Until it has started, or has died: whether it lives."""
        return self.ended > 0 or self.wait()

    def run(self, which: str) -> bool:
        """Measure a workload: whether the process lives."""
        assert self.process.stdin is not None
        self.began = time.monotonic()
        try:
            self.process.stdin.write(which + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return False
        return self.wait()

    def found(self) -> list[dict]:
        """The rows so far."""
        return [json.loads(line) for line in self.rows.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def stop(self) -> None:
        """End the process and all that it started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


def side_by_side(
    commands: dict[str, Sequence[str]], work: Sequence[str], folder: Path, limit: float
) -> Iterator[list[dict]]:
    """All engines' rows so far, after each workload: they start at the same time, then take turns."""
    engines: list[Engine] = []
    try:
        for name in sorted(commands, key=SIZED_BY_WHAT_IS_FREE.__contains__):
            if name in SIZED_BY_WHAT_IS_FREE:
                for engine in engines:
                    engine.ready()
            engines.append(Engine(name, commands[name], folder, limit))
        for engine in engines:
            engine.ready()
        for which in work:
            for engine in engines:
                engine.run(which)
            yield [row for engine in engines for row in rows_of(engine)]
    finally:
        for engine in engines:
            engine.stop()


def rows_of(engine: Engine) -> list[dict]:
    """An engine's rows, and how it ended if it has."""
    rows = [{key: value for key, value in row.items() if key != "ended"} for row in engine.found()]
    if engine.process.poll() is not None:
        rows.append(dict(engine=engine.name, error=last_words(engine.log)))
    return rows


def last_words(log: Path) -> str:
    """The last line that a process said."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"its process ended: {lines[-1][:300]}" if lines else "its process ended without a word"


def table(rows: list[dict]) -> str:
    """Markdown: one line a workload, one column an engine, and fnllm's ratio to the best other and to the limit."""
    measured = [row for row in rows if any(unit in row for unit in UNITS)]
    engines = list(dict.fromkeys(row["engine"] for row in measured))
    lines = [
        "| shape | workload | " + " | ".join(engines) + " | ratio | of the limit |",
        "|---" * (4 + len(engines)) + "|",
    ]
    cases: dict[tuple, dict[str, dict]] = {}
    for row in measured:
        case = row["size"], row["workload"], row.get("case", row.get("batch", ""))
        cases.setdefault(case, {})[row["engine"]] = row
    for (size, work, case), found in cases.items():
        cells = [shown(found[engine]) if engine in found else "" for engine in engines]
        mine, others = found.get("fnllm"), [speed(row) for engine, row in found.items() if engine != "fnllm"]
        ratio = f"{speed(mine) / max(others):.2f}" if mine and others else ""
        limit = "" if mine is None else f"{speed(mine) / speed({key: mine.get(f'floor_{key}') for key in UNITS}):.0%}"
        lines.append(f"| {size} | {work} {case} | " + " | ".join(cells) + f" | {ratio} | {limit} |")
    return "\n".join(lines)


def speed(row: dict) -> float:
    """More is better: tokens a second, or what is done in a millisecond."""
    return row["tok_s"] if row.get("tok_s") else 1 / row["ms"]


def shown(row: dict) -> str:
    return f"{row['ms']:.1f} ms" if "ms" in row else f"{row['tok_s']:,.0f} tok/s"


def commands(args: argparse.Namespace, size: str, folder: Path) -> dict[str, list[str]]:
    """Each engine that takes part, and how it is started; a checkpoint is made where a peer needs one."""
    pythons = {"fnllm": sys.executable, **{peer: sys.executable for peer, module in PEERS.items() if find_spec(module)}}
    pythons.update(pair.split("=", 1) for pair in args.python)
    if args.engines:
        pythons = {name: python for name, python in pythons.items() if name in args.engines.split(",")}
    made = str(room_for_checkpoint() / f"fnllm-serving-{size}")
    checkpoint = args.checkpoint.format(size=size) if args.checkpoint else made
    if len(pythons) > ("fnllm" in pythons):
        subprocess.run([sys.executable, str(HERE / "checkpoints.py"), size, checkpoint], check=True)
    settings = dict(size=size, checkpoint=checkpoint, compile=args.compile, max_model_len=args.max_model_len)
    program = str(HERE / "serving_engines.py")
    return {
        name: [python, program, name, json.dumps(dict(settings, rows=str(folder / f"{name}.jsonl")))]
        for name, python in pythons.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "serving.json")
    parser.add_argument("--size", default="0.6b", help=f"one or more of {', '.join(SHAPES)}, comma-separated")
    parser.add_argument("--work", default=",".join(WORK), help="workloads in their order")
    parser.add_argument("--compile", default=None, help="fnllm's compile mode")
    parser.add_argument("--max-model-len", type=int, default=40960)
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PYTHON", help="a peer's interpreter")
    parser.add_argument(
        "--checkpoint", help="folder of the peers' checkpoint, {size} is replaced; default: one is made"
    )
    parser.add_argument("--limit", type=float, default=300, help="seconds of a start or a workload")
    parser.add_argument("--logs", type=Path, help="folder to keep what the engines said")
    parser.add_argument("--engines", help="those to measure, comma-separated; default: all that are there")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # and so the engines too
    facts, rows = provenance(), []
    for size in args.size.split(","):
        before = rows
        with tempfile.TemporaryDirectory() as folder:
            started = commands(args, size, Path(folder))
            try:
                for found in side_by_side(started, args.work.split(","), Path(folder), args.limit):
                    rows = before + [{"size": size, **row} for row in found]
                    args.out.write_text(json.dumps(dict(**facts, rows=rows), indent=1) + "\n")
            finally:
                if args.logs:
                    shutil.copytree(folder, args.logs / size, dirs_exist_ok=True)
    print(table(rows))


if __name__ == "__main__":
    main()
