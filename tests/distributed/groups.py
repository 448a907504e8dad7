"""Groups of ranks over gloo, started once for all the checks that they make: see ranks.py and checks_*.py."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run_group(size: int, files: tuple[str, ...], folder: Path) -> list[dict]:
    """What each rank wrote of each check."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FNLLM_TIMEOUT_S": "300"}
    command = [sys.executable, str(HERE / "ranks.py"), str(size), str(folder), str(folder.parent), *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    print(done.stdout)
    written = [folder / f"rank{rank}.json" for rank in range(size)]
    if not all(file.exists() for file in written):
        raise RuntimeError(f"the ranks did not start: {done.stderr}")
    return [json.loads(file.read_text()) for file in written]


def cases(groups: dict[int, tuple[str, ...]], *marks: pytest.MarkDecorator) -> Iterator:
    """(size, check) of every check in the files of each group."""
    for size, files in groups.items():
        for file in files:
            for name in re.findall(r"^def (check_\w+)", (HERE / file).read_text(), re.M):
                yield pytest.param(
                    size, name, id=f"{size}-{name.removeprefix('check_')}", marks=[pytest.mark.distributed, *marks]
                )


def assert_passed(results: list[dict], check: str) -> None:
    """Every rank has come to the check and found it to hold."""
    for rank, found in enumerate(results):
        assert check in found, f"rank {rank} did not come to it"
        assert found[check]["ok"], f"rank {rank}: {found[check]['error']}"
