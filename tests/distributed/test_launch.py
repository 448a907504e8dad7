"""`fnllm generate --tp N`: the command on several ranks of this machine, through torch's launcher."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fnllm

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
ODD = str(ROOT / "tests" / "oracle" / "qwen3-odd")
PATHS = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "weights")]
TEXT = "In the beginning of the héroic"


def start(*argv: str, extra_path: str = "") -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([extra_path, *PATHS]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "fnllm.cli", "generate", "--tp", "2", "--max-tokens", "8", "--temperature", "0", *argv],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict[str, tuple[int, str, str]]:
    """Status, stdout and stderr of three runs, side by side."""
    broken = tmp_path_factory.mktemp("broken")
    (broken / "sitecustomize.py").write_text(
        "import os\nif os.getenv('RANK') == '1':\n    os.write(2, b'rank 1 broke\\n')\n    os._exit(1)\n"
    )
    running = {
        "well": start(),  # the prompt comes from standard input
        "refused": start("--model", ODD, "text, which this model has no tokenizer for"),
        "broken": start("x", extra_path=str(broken)),
    }
    results = {}
    for name, process in running.items():
        out, err = process.communicate(TEXT if name == "well" else None, timeout=400)
        results[name] = (process.returncode, out, err)
    return results


def test_the_text_is_that_of_one_rank_and_appears_once(ended):
    sampling = fnllm.Sampling(temperature=0, max_tokens=8)
    (one,) = fnllm.generate(fnllm.load(), [TEXT], sampling, num_blocks=32)
    assert ended["well"] == (0, one.text + "\n", "")


def test_the_same_error_on_every_rank_is_shown_once(ended):
    status, out, err = ended["refused"]
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("fnllm: prompts[0]: these params have no tokenizer")


def test_fault_84_one_rank_fails_and_none_waits(ended):
    assert ended["broken"] == (1, "", "rank 1 broke\n")
