"""Jobs under torchrun, several at once on this machine: one that goes well, and some in which a rank does not."""

import os
import random
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import NamedTuple

import pytest

import fnllm

pytestmark = pytest.mark.distributed

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TIMEOUT_S = 20  # for the ranks; enough for the slowest to start on a busy machine
KINDS = ("none", "raise", "hang", "kill")


class Job(NamedTuple):
    status: int
    out: str
    err: str
    orphans: list[int]


def start(kind: str, step: int, mark: str) -> subprocess.Popen:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "weights"))),
        "OMP_NUM_THREADS": "1",
        "FNLLM_TIMEOUT_S": str(TIMEOUT_S),
        "FNLLM_TEST_MARK": mark,
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(HERE / "both_examples.py")] if kind == "none" else [str(HERE / "faulty.py"), kind, str(step)]
    return subprocess.Popen(
        [*command, *script],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def marked(mark: str) -> list[int]:
    """Processes that were started with this mark in their environment and still run."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in environ.read_bytes():
                found.append(int(environ.parent.name))
        except OSError:  # gone meanwhile
            pass
    return found


def shared_memory() -> set[str]:
    return {
        file.name for file in Path("/dev/shm").glob("*") if file.name.startswith(("torch_", "nccl-", "gloo", "fnllm"))
    }


@pytest.fixture(scope="module")
def jobs() -> dict[str, Job]:
    """Every kind of job, run side by side, each with its fault in a step of its own."""
    before = shared_memory()
    steps = {kind: random.randint(1, 10) for kind in KINDS}
    print(f"faults in steps {steps}")
    marks = {kind: uuid.uuid4().hex for kind in KINDS}
    running = {kind: start(kind, steps[kind], marks[kind]) for kind in KINDS}
    ended = {}
    for kind, process in running.items():
        try:
            out, err = process.communicate(timeout=TIMEOUT_S + 400)
        finally:
            process.kill()
        time.sleep(0.2)
        ended[kind] = Job(process.returncode, out, err, marked(marks[kind]))
        print(kind, ended[kind])
    assert shared_memory() <= before
    return ended


def test_two_jobs_at_once_do_not_meet(jobs):
    """The first example says how each text ended; one rank alone prints, and both have the same texts, or would end."""
    job = jobs["none"]
    prompts = ["In the beginning", "And it came to pass"]
    one = fnllm.generate(fnllm.load(), prompts, fnllm.Sampling(temperature=0, max_tokens=16), num_blocks=32)
    assert (job.status, job.err) == (0, "")
    assert job.out.count("[length]") == 2
    assert job.out.endswith("".join(f"\n{prompt}|{out.text}" for prompt, out in zip(prompts, one, strict=True)) + "\n")


@pytest.mark.parametrize("kind", KINDS[1:])
def test_fault_84_all_ranks_end(jobs, kind):
    assert jobs[kind].status != 0
    assert jobs[kind].out == ""


def test_fault_84_the_first_error_is_shown_first_and_once(jobs):
    err = jobs["raise"].err
    assert err.count("broken on purpose") == 2  # the line of code, and the error
    assert "fnllm: rank 1 failed:\nTraceback" in err
    assert "rank 0 failed" not in err  # it only followed


def test_fault_84_a_rank_that_hangs_is_not_waited_for_longer_than_the_limit(jobs):
    err = jobs["hang"].err
    assert "fnllm: rank 0 failed (another rank did not come; FNLLM_TIMEOUT_S sets the limit):" in err


def test_fault_84_a_killed_rank_is_named(jobs):
    err = jobs["kill"].err
    assert "SIGKILL" in err and "local_rank: 1" in err
    assert "rank 0 failed" not in err


@pytest.mark.parametrize("kind", KINDS)
def test_fault_85_nothing_is_left_behind(jobs, kind):
    assert jobs[kind].orphans == []
