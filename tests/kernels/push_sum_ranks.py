"""Ranks of tests/kernels/test_push_sum.py: processes in Triton's interpreter whose boxes lie in shared memory."""

import random
import sys
import time

import decode_interpreter  # noqa: F401  chooses the interpreter before triton is imported
import torch
import torch.multiprocessing as mp

from fnllm_kernels.push_sum import BLOCK, DTYPES, Mailbox, box_words, programs, push_sum

LARGEST = 3 * BLOCK * 4
SIZES = (2, 2 * BLOCK + 6, 4, LARGEST // 4, 2 * BLOCK, 10, LARGEST // 4 - 2)  # even: whole words in each dtype


def contribution(rank: int, turn: int, numbers: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    return torch.randn(numbers, generator=generator).to(dtype)


def expected(turn: int, ranks: int) -> torch.Tensor:
    numbers, dtype = SIZES[turn % len(SIZES)], DTYPES[turn % 3]
    return sum(contribution(rank, turn, numbers, dtype).float() for rank in range(ranks)).to(dtype)


def work(rank: int, boxes: list, results: mp.Queue) -> None:
    addresses = torch.tensor([box.data_ptr() for box in boxes])
    mailbox = Mailbox(rank, addresses, torch.zeros(programs(LARGEST), dtype=torch.int32), boxes[rank])
    rng, wrong = random.Random(rank), []
    for turn in range(4 * len(SIZES)):
        time.sleep(rng.choice((0, 0, 0.01)))  # ranks come in any order
        found = push_sum(contribution(rank, turn, SIZES[turn % len(SIZES)], DTYPES[turn % 3]), mailbox)
        if not torch.equal(found, expected(turn, len(boxes))):
            wrong.append(turn)
    results.put((wrong, mailbox.counts.tolist()))


def main(ranks: int) -> None:
    boxes = [torch.zeros(box_words(LARGEST, ranks), dtype=torch.int64).share_memory_() for _ in range(ranks)]
    context = mp.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=work, args=(r, boxes, results), daemon=True) for r in range(ranks)]
    for process in processes:
        process.start()
    found = [results.get(timeout=100) for _ in range(ranks)]
    counts = found[0][1]
    assert all(one == ([], counts) for one in found), found
    # Each program counts its own exchanges: the first takes part in all of them, the last in the longest only.
    assert counts[0] == 4 * len(SIZES) > counts[-1] > 0, counts
    print("equal")


if __name__ == "__main__":
    main(int(sys.argv[1]))
