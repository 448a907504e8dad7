"""Groups of ranks over gloo: equal to one rank, refusals on all ranks, the compiled step. See checks_*.py."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
GROUPS = {
    (2, False): ("checks_equal.py", "checks_open.py", "checks_refusals.py"),
    (3, False): ("checks_equal.py", "checks_traced.py"),
    (4, False): ("checks_equal.py", "checks_traced.py"),
    (2, True): ("checks_compiled.py",),
}


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


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """Results of a group of ranks, which runs when the first of its tests asks for it."""
    known: dict = {}

    def results(size: int, compiled: bool) -> list[dict]:
        if (size, compiled) not in known:
            folder = tmp_path_factory.mktemp(f"ranks{size}")
            known[size, compiled] = run_group(size, GROUPS[size, compiled], folder)
        return known[size, compiled]

    return results


def cases():
    for (size, compiled), files in GROUPS.items():
        for file in files:
            for name in re.findall(r"^def (check_\w+)", (HERE / file).read_text(), re.M):
                marks = [pytest.mark.distributed, *([pytest.mark.compiled, pytest.mark.slow] if compiled else [])]
                yield pytest.param(size, compiled, name, id=f"{size}-{name.removeprefix('check_')}", marks=marks)


@pytest.mark.parametrize(("size", "compiled", "check"), list(cases()))
def test_ranks(groups, size, compiled, check):
    for rank, results in enumerate(groups(size, compiled)):
        assert check in results, f"rank {rank} did not come to it"
        assert results[check]["ok"], f"rank {rank}: {results[check]['error']}"
