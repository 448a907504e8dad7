"""Sums through peer memory: ranks as processes of Triton's interpreter, and as streams of one GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fnllm_kernels import push_sum

HERE = Path(__file__).parent


def test_takes_whole_words_of_float_dtypes():
    takes = push_sum.takes
    assert takes(torch.zeros(2, 3, dtype=torch.bfloat16), 12) and takes(torch.zeros(3), 12)
    assert not takes(torch.zeros(3, dtype=torch.bfloat16), 12)  # one and a half words
    assert not takes(torch.zeros(4), 12) and not takes(torch.zeros(0), 12)
    assert not takes(torch.zeros(3, dtype=torch.int32), 12) and not takes(torch.zeros(2, dtype=torch.float64), 64)


def test_refuses_what_it_does_not_take():
    memory = torch.zeros(push_sum.mailbox_words(2, 100), dtype=torch.int64)
    mailbox = push_sum.make_mailbox(0, [memory.data_ptr()] * 2, memory, 100)
    with pytest.raises(ValueError, match="at most 16384 bytes"):  # a program's part
        push_sum.push_sum(torch.zeros(4097), mailbox)


@pytest.mark.parametrize("ranks", [3])
def test_ranks_that_share_memory_in_the_interpreter(ranks):
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, HERE / "push_sum_ranks.py", str(ranks)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0 and run.stdout == "equal\n", run.stdout + run.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", push_sum.DTYPES)
def test_two_ranks_on_two_streams_of_one_gpu(dtype):
    device, ranks, largest = torch.device("cuda"), 2, 1 << 20
    boxes = torch.zeros(ranks, push_sum.mailbox_words(ranks, largest), dtype=torch.int64, device=device)
    addresses = [box.data_ptr() for box in boxes]
    mailboxes = [push_sum.make_mailbox(rank, addresses, boxes[rank], largest) for rank in range(ranks)]
    streams = [torch.cuda.Stream() for _ in range(ranks)]
    for turn, numbers in enumerate((2, 4096, 65536, 200_002, 1030, 250_000, 8192, 2) * 5):
        parts = [torch.randn(numbers, device=device).to(dtype) for _ in range(ranks)]
        torch.cuda.synchronize()
        found = []
        for rank in range(ranks):
            with torch.cuda.stream(streams[rank]):
                found.append(push_sum.push_sum(parts[rank], mailboxes[rank]))
        torch.cuda.synchronize()
        expected = (parts[0].float() + parts[1].float()).to(dtype)
        assert all(torch.equal(one, expected) for one in found), turn
