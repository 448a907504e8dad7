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


def run_groups(groups: dict[int, tuple[str, ...]], folder: Path) -> dict[int, list[dict]]:
    """What each rank of each group, by its size, wrote of each check."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FNLLM_TIMEOUT_S": "300"}
    asked = [f"{size}:{','.join(files)}" for size, files in groups.items()]
    command = [sys.executable, str(HERE / "ranks.py"), str(folder), *asked]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    print(done.stdout)
    written = {size: [folder / f"{size}-{rank}.json" for rank in range(size)] for size in groups}
    if not all(file.exists() for files in written.values() for file in files):
        raise RuntimeError(f"the ranks did not start: {done.stderr}")
    return {size: [json.loads(file.read_text()) for file in files] for size, files in written.items()}


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
