"""The bench command on the embedded model."""

import os
import subprocess
import sys

import pytest

from fnllm import bench


def test_prints_a_line_for_each_batch_size(capsys):
    assert bench.main(["--batch", "1,2", "--prompt-tokens", "8", "--new-tokens", "3", "--repeats", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Qwen3ForCausalLM, torch.float32, on cpu")
    assert [line.split()[0] for line in lines[2:]] == ["1", "2"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--new-tokens", "1"], "2 or more"),
        (["--batch", "abc"], "argument --batch: must be a number of 1 or more, found 'abc'"),
        (["--batch", "1,0"], "argument --batch: must be a number of 1 or more, found '0'"),
        (["--batch", ""], "argument --batch: must be"),
        (["--repeats", "0"], "argument --repeats: must be a number of 1 or more, found '0'"),
        (["--prompt-tokens", "0"], "argument --prompt-tokens: must be"),
        (["--batches", "2"], "there is no --batches; did you mean --batch?"),
    ],
)
def test_wrong_arguments_are_named_in_one_line(argv, words, capsys):
    with pytest.raises(SystemExit) as end:
        bench.main(argv)
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == "" and words in err and err.count("\n") == 1


@pytest.mark.gpu
def test_a_process_that_begins_by_preparing_its_steps_ends():
    """In the default mode, where the first thing to be compiled is then a decode step and not a prompt."""
    arguments = ["--batch", "1,3", "--prompt-tokens", "8", "--new-tokens", "3", "--repeats", "1"]
    program = f"from fnllm import bench; bench.main({arguments})"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [line.split()[0] for line in done.stdout.splitlines()[2:]] == ["1", "3"]
