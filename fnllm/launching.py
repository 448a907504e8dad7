"""One process for each rank on this machine (effect), as torchrun would start them, but quiet about their errors."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ERROR_FILE = "FNLLM_ERROR_FILE"  # environment: where a rank leaves the error that ended it
POLL_SECONDS = 0.05
GRACE_SECONDS = 5.0  # for the ranks that wait for one that has failed


def is_launched() -> bool:
    """Whether this process is one of the ranks already."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def report(message: str) -> None:
    """Say on stderr what ended this process; a rank leaves it for the parent, which shows one rank's error only."""
    path = os.environ.get(ERROR_FILE)
    if path:
        Path(path).write_text(f"{message}\n", encoding="utf-8")
    else:
        print(message, file=sys.stderr)


def launch(size: int, command: Sequence[str], text: str | None = None) -> int:
    """Run `command` once per rank and wait; the exit status is 0 only if every rank's was.

    Every rank reads `text` from its standard input. Rank 0 has the terminal; of the others nothing shows but the error
    of the first rank that fails, whichever it is. The rest are ended then: none waits for it for ever.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder) / "stdin"
        given.write_text(text or "", encoding="utf-8", newline="")
        ranks: list[subprocess.Popen] = []
        port = _free_port()
        try:
            ranks += (_start(rank, size, command, Path(folder), port) for rank in range(size))
            failed = _first_failure(ranks)
        finally:
            _end(ranks)
        if failed is None:
            return 0
        said, log = Path(folder) / f"error{failed}", Path(folder) / f"stderr{failed}"
        source = said if said.exists() else log
        sys.stderr.write(source.read_text(encoding="utf-8", errors="replace") if source.exists() else "")
        return abs(ranks[failed].returncode)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start(rank: int, size: int, command: Sequence[str], folder: Path, port: int) -> subprocess.Popen:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, ERROR_FILE: folder / f"error{rank}"}
    environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
    # Each rank would otherwise start a thread for every core.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // size)))
    with open(folder / "stdin", "rb") as given, open(folder / f"stderr{rank}", "wb") as log:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": log} if rank else {}
        return subprocess.Popen(list(command), env=environment, stdin=given, **quiet)


def _first_failure(ranks: Sequence[subprocess.Popen]) -> int | None:
    """The rank that failed first, None once all have ended well."""
    while True:
        codes = [rank.poll() for rank in ranks]
        for rank, code in enumerate(codes):
            if code:
                return rank
        if all(code == 0 for code in codes):
            return None
        time.sleep(POLL_SECONDS)


def _end(ranks: Sequence[subprocess.Popen]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()
