"""Sums through peer memory: one rank alone, and ranks as processes of Triton's interpreter.

Ranks on GPUs are checked by benchmarks/tensor_parallel.py; on one GPU, whose kernels need not run at the same time, two
ranks might wait for each other for ever.
"""

import sys
from pathlib import Path

import pytest
import torch
from interpreted import INTERPRETING, interpreted, interpreted_tests

from fnllm_kernels import push_sum

if INTERPRETING:
    sys.path.append(str(Path(__file__).parent))
    import decode_interpreter  # noqa: F401  rounds bfloat16 as a GPU does


def test_takes_whole_words_of_float_dtypes():
    takes = push_sum.takes
    assert takes(torch.zeros(2, 3, dtype=torch.bfloat16), 12) and takes(torch.zeros(3), 12)
    assert not takes(torch.zeros(3, dtype=torch.bfloat16), 12)  # one and a half words
    assert not takes(torch.zeros(4), 12) and not takes(torch.zeros(0), 12)
    assert not takes(torch.zeros(3, dtype=torch.int32), 12) and not takes(torch.zeros(2, dtype=torch.float64), 64)


def test_refuses_what_it_does_not_take():
    memory = torch.zeros(push_sum.mailbox_words(2, 100), dtype=torch.int64)
    mailbox = push_sum.make_mailbox(0, [memory.data_ptr()] * 2, memory, 100)
    with pytest.raises(ValueError, match="at most 8192 bytes"):  # a program's part
        push_sum.push_sum(torch.zeros(2049), mailbox)
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        push_sum.make_mailbox(0, [memory.data_ptr(), memory.data_ptr() + 8], memory, 100)


@pytest.mark.skipif(INTERPRETING, reason="starts this file again")
def test_one_rank_in_the_interpreter():
    interpreted_tests(__file__)


@pytest.mark.skipif(INTERPRETING, reason="processes of their own")
def test_ranks_that_share_memory_in_the_interpreter():
    assert interpreted(str(Path(__file__).with_name("push_sum_ranks.py")), "3") == "equal\n"


def sent_by(memory: torch.Tensor, mailbox: push_sum.Mailbox, sender: int, words: int, few: bool, count: int) -> list:
    """Where a rank of `memory` finds what `sender` sent in exchange `count`: views of words, and of flags if any."""
    place, capacity = (count & 1) * mailbox.ranks + sender, (mailbox.few if few else mailbox.many).counts.shape[0]
    if few:
        return [memory[place * capacity * push_sum.WORDS :][:words]]
    many, size = memory[push_sum.few_words(mailbox.ranks) :].view(torch.int32), capacity * push_sum.BLOCK
    flags = many[2 * mailbox.ranks * size + place * capacity :]
    return [many[place * size :][:words], flags[: -(-words // push_sum.BLOCK)]]


@pytest.mark.parametrize("device", ["cpu"] if INTERPRETING else [pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", push_sum.DTYPES, ids=str)
def test_one_rank_adds_what_lies_in_its_boxes_and_fills_the_others(device, dtype):
    """Rank 1 of 3, alone: what the others send lies there before, so that it never waits."""
    ranks, few_words, largest = 3, push_sum.FEW // 4, push_sum.FEW + 4 * 3 * push_sum.BLOCK
    memory = torch.zeros(ranks, push_sum.mailbox_words(ranks, largest), dtype=torch.int64, device=device)
    mailbox = push_sum.make_mailbox(1, [part.data_ptr() for part in memory], memory[1], largest)
    generator = torch.Generator().manual_seed(0)
    counts = {True: 0, False: 0}
    for words in (push_sum.WORDS + 3, few_words + push_sum.BLOCK + 5, 1, few_words + 1, 2 * push_sum.WORDS):
        numbers, few = words * 4 // dtype.itemsize, words <= few_words
        parts = [torch.randn(numbers, generator=generator).to(dtype).to(device) for _ in range(ranks)]
        counts[few] += 1
        # Programs count for themselves; here all have taken part in as many exchanges.
        (mailbox.few if few else mailbox.many).counts.fill_(counts[few] - 1)
        signed = [part.view(torch.int32).long() & 0xFFFFFFFF | counts[few] << 32 for part in parts]
        for rank in (0, 2):
            data, *flags = sent_by(memory[1], mailbox, rank, words, few, counts[few])
            data.copy_(signed[rank] if few else parts[rank].view(torch.int32))
            for flag in flags:
                flag.fill_(counts[few])
        between_words = torch.cat((parts[1][:1], parts[1]))[1:]
        found = push_sum.push_sum(between_words, mailbox)
        assert torch.equal(found, sum(part.float() for part in parts).to(dtype)), words
        for rank in (0, 2):
            data, *flags = sent_by(memory[rank], mailbox, 1, words, few, counts[few])
            assert torch.equal(data, signed[1] if few else parts[1].view(torch.int32))
            assert all((flag == counts[few]).all() for flag in flags)
