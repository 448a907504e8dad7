"""The bench command on the embedded model."""

import pytest

from fnllm import bench


def test_prints_a_line_for_each_batch_size(capsys):
    assert bench.main(["--batch", "1,2", "--prompt-tokens", "8", "--new-tokens", "3", "--repeats", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Qwen3ForCausalLM, torch.float32, on cpu")
    assert [line.split()[0] for line in lines[2:]] == ["1", "2"]


def test_refuses_too_few_tokens(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--new-tokens", "1"])
    assert "2 or more" in capsys.readouterr().err
