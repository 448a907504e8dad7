"""One process for each GPU of this machine, started and watched over by torch's own launcher (effect).

`run` is the parent; each rank is `python -m fnllm.launch ARGUMENTS...`, which is the `fnllm` command in that place.
"""

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ERROR_FILE, INPUT_FILE = "FNLLM_ERROR_FILE", "FNLLM_INPUT_FILE"  # environment of the ranks


def run(argv: Sequence[str], size: int, text: str | None = None) -> int:
    """Run `fnllm ARGV` on `size` ranks and wait; 0 if all went well, else the status of the rank that failed first.

    Every rank reads `text` as its standard input. Rank 0 has the terminal. When a rank fails the others are ended, and
    what it said, its error or else its stderr, is written to stderr here.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # A rank's own error is what is shown, without the launcher's account of it.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="fnllm-") as name:
        folder = Path(name)
        (folder / "input").write_text(text or "", encoding="utf-8", newline="")
        quiet = {rank: Std.ALL if rank else Std.NONE for rank in range(size)}
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=size,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # a port that is free: two runs on a machine do not meet
            max_restarts=0,
            monitor_interval=0.05,
            logs_specs=DefaultLogsSpecs(log_dir=name, redirects=quiet),
        )
        told = {ERROR_FILE: str(folder / "error"), INPUT_FILE: str(folder / "input")}
        with _environment({**told, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", _threads(size))}):
            try:
                elastic_launch(config, sys.executable)("-m", "fnllm.launch", *argv)
            except ChildFailedError as error:
                rank, failure = error.get_first_failure()
                sys.stderr.write(_said(folder, rank))
                return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
            except (KeyboardInterrupt, SignalException) as error:
                return 128 + getattr(error, "sigval", signal.SIGINT)
    return 0


def is_launched() -> bool:
    """Whether this process is one of the ranks already."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def report(message: str) -> None:
    """Say what ended this process: on stderr, or as a rank to the parent, which shows that of one rank only."""
    if ERROR_FILE in os.environ:
        Path(os.environ[ERROR_FILE] + os.environ["RANK"]).write_text(f"{message}\n", encoding="utf-8")
    else:
        print(message, file=sys.stderr)


def _said(folder: Path, rank: int) -> str:
    """What a failed rank left behind."""
    found = [folder / f"error{rank}", *sorted(folder.glob(f"**/{rank}/stderr.log"))]
    said = [file.read_text(encoding="utf-8", errors="replace") for file in found if file.exists()]
    return next((text for text in said if text), f"fnllm: rank {rank} ended without a word\n" if rank else "")


def _threads(size: int) -> str:
    return str(max(1, (os.cpu_count() or 1) // size))


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Variables that the processes started inside shall find."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _rank(argv: Sequence[str]) -> None:
    """Be one rank: read the parent's input, run the command, and after an error end without waiting for the others."""
    from fnllm.cli import main

    sys.stdin = open(os.environ[INPUT_FILE], encoding="utf-8")  # noqa: SIM115  for as long as the process lives
    status = main(argv)
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        os._exit(status)


if __name__ == "__main__":
    _rank(sys.argv[1:])
