"""Batch inference over a file of prompts on many workers, with Ray Data: one engine per worker.

    pip install 'fnllm[ray]'
    python examples/ray_batch.py prompts.jsonl results/ --model Qwen/Qwen3-0.6B --workers 8 --max-tokens 256

Each line of the input is {"id": ..., "prompt": text or token ids}. The rows are split into parts. The worker that made
a part's results writes them to a file that is named after the rows, completely or not at all. So the job may stop at
any point: a part that was lost with its worker is done by another one, and a second run does only what is missing. No
row is lost or written twice. With --tp N a worker is N processes, each with its own GPU if there are GPUs.
"""

import argparse
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

ATTEMPTS = 3  # of one part by a worker whose ranks die


class Rank:
    """One engine: a whole model, or one rank's share of it."""

    def __init__(self, model: str | None, sampling: dict[str, Any], options: dict[str, Any]):
        self.model, self.sampling, self.options = model, sampling, options

    def free_address(self) -> tuple[str, int]:
        """Where the ranks may meet, if this is the first of them."""
        from torch.distributed import TCPStore

        host = ray.util.get_node_ip_address()
        return host, TCPStore(host, 0, is_master=True, wait_for_workers=False).port

    def load(self, rank: int = 0, size: int = 1, address: tuple[str, int] = ("", 0)) -> None:
        """Load this rank's share; the ranks find each other as under torchrun."""
        import fnllm

        if size > 1:
            place = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": size}  # Ray shows each its own GPU only, as number 0
            place |= {"MASTER_ADDR": address[0], "MASTER_PORT": address[1]}
            os.environ.update({name: str(value) for name, value in place.items()})
        self.params = fnllm.load(self.model)

    def run(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """One result for each row; a prompt that is refused gives its error."""
        import fnllm

        outs = fnllm.generate(
            self.params,
            [row["prompt"] for row in rows],
            fnllm.Sampling(**self.sampling),
            errors="return",
            progress=False,
            **self.options,
        )
        return [result_of(row, out) for row, out in zip(rows, outs, strict=True)]


def result_of(row: dict[str, Any], out: Any) -> dict[str, Any]:
    if out.error is not None:
        return {"id": row["id"], "error": str(out.error)}
    return {"id": row["id"], "text": out.text, "token_ids": list(out.token_ids), "finish_reason": out.finish_reason}


class Group:
    """The ranks of one tensor-parallel worker, as actors of their own."""

    def __init__(self, size: int, *settings: Any):
        needs = {"num_gpus": 1} if ray.cluster_resources().get("GPU") else {"num_cpus": 1}
        self.ranks = [ray.remote(Rank).options(**needs).remote(*settings) for _ in range(size)]
        address = ray.get(self.ranks[0].free_address.remote())
        self.all([rank.load.remote(i, size, address) for i, rank in enumerate(self.ranks)])

    def all(self, calls: list[Any]) -> list[Any]:
        """The results of all ranks, or the error of the first that fails: the others may wait for it."""
        waiting = calls
        while waiting:
            (done, *_), waiting = ray.wait(waiting)
            ray.get(done)
        return ray.get(calls)

    def run(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return self.all([rank.run.remote(rows) for rank in self.ranks])[0]

    def end(self) -> None:
        for rank in self.ranks:
            ray.kill(rank)


class Worker:
    """What Ray Data keeps one of in each worker: makes and writes one part at a call."""

    def __init__(self, out: str, tp: int, *settings: Any):
        self.out, self.tp, self.settings = Path(out), tp, settings
        self.engine = self.start()

    def start(self) -> Rank | Group:
        if self.tp > 1:
            return Group(self.tp, *self.settings)
        engine = Rank(*self.settings)
        engine.load()
        return engine

    def __call__(self, part: dict[str, Any]) -> dict[str, Any]:
        (name,), (rows,) = part["name"], part["rows"]
        write_whole(self.out / str(name), self.results(json.loads(rows)))
        return {"name": [name]}

    def results(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A worker that dies is started again by Ray; the ranks of a group are not, and here a new group is made."""
        if isinstance(self.engine, Rank):
            return self.engine.run(rows)
        for attempt in range(ATTEMPTS):
            try:
                return self.engine.run(rows)
            except ray.exceptions.RayError:
                self.engine.end()
                if attempt == ATTEMPTS - 1:
                    raise
                self.engine = self.start()
        raise AssertionError("not reached")


def write_whole(file: Path, results: list[dict[str, Any]]) -> None:
    """Write results so that the file is there with all of them or not at all."""
    unfinished = file.with_suffix(f".{os.getpid()}.unfinished")
    unfinished.write_text("".join(json.dumps(result) + "\n" for result in results), encoding="utf-8")
    os.replace(unfinished, file)


def read_rows(files: Sequence[Path]) -> Iterator[dict[str, Any]]:
    for file in files:
        with open(file, encoding="utf-8") as lines:
            yield from map(json.loads, lines)


def results(out: Path) -> Iterator[dict[str, Any]]:
    """All results that are there."""
    return read_rows(sorted(out.glob("part-*.jsonl")))


def parts(rows: Sequence[dict[str, Any]], done: set[Any], size: int) -> list[dict[str, str]]:
    """The rows that are not done in parts of `size`, each named after its ids; ValueError when two rows share an id."""
    ids = [row["id"] for row in rows]
    if len(set(ids)) != len(ids):
        twice = next(id for id in ids if ids.count(id) > 1)
        raise ValueError(f"two rows have the id {twice!r}; give every row an id of its own")
    left = [row for row in rows if row["id"] not in done]
    cut = [left[at : at + size] for at in range(0, len(left), size)]
    names = [hashlib.sha256(json.dumps([row["id"] for row in part]).encode()).hexdigest()[:24] for part in cut]
    return [{"name": f"part-{name}.jsonl", "rows": json.dumps(part)} for name, part in zip(names, cut, strict=True)]


def run(
    source: Path, out: Path, *, workers: int, tp: int, part_rows: int, settings: tuple, worker: type = Worker
) -> int:
    """Do what is missing in `out`; the number of parts that were made."""
    out.mkdir(parents=True, exist_ok=True)
    for left in out.glob("*.unfinished"):  # by workers that died while they wrote
        left.unlink()
    todo = parts(list(read_rows([source])), {row["id"] for row in results(out)}, part_rows)
    if not todo:
        return 0
    needs: dict[str, float] = {"num_cpus": 0} if tp > 1 else {"num_cpus": 1}
    if tp == 1 and ray.cluster_resources().get("GPU"):
        needs = {"num_gpus": 1}
    made = ray.data.from_items(todo, override_num_blocks=len(todo)).map_batches(
        worker,
        fn_constructor_args=(str(out.resolve()), tp, *settings),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(workers, len(todo))),
        **needs,
    )
    return sum(1 for _ in made.iter_rows())


def main() -> None:
    cli = argparse.ArgumentParser(description="Batch inference over a file of prompts with Ray Data.")
    cli.add_argument("source", type=Path, help='lines of {"id": ..., "prompt": ...}')
    cli.add_argument("out", type=Path, help="folder for the results")
    cli.add_argument("--model", help="checkpoint folder or hub id; default: the demo model")
    cli.add_argument("--workers", type=int, default=1)
    cli.add_argument("--tp", type=int, default=1, help="ranks of one worker")
    cli.add_argument("--part-rows", type=int, default=256, help="rows that are lost at most when a worker dies")
    cli.add_argument("--max-tokens", type=int, default=128)
    cli.add_argument("--temperature", type=float, default=0.0)
    args = cli.parse_args()
    ray.init(log_to_driver=False)
    sampling = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    made = run(
        args.source,
        args.out,
        workers=args.workers,
        tp=args.tp,
        part_rows=args.part_rows,
        settings=(args.model, sampling, {}),
    )
    print(f"{made} parts made; {sum(1 for _ in results(args.out))} rows in {args.out}")


if __name__ == "__main__":
    main()
