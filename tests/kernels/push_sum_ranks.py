"""Ranks of tests/kernels/test_push_sum.py: processes in Triton's interpreter whose boxes lie in shared memory."""

import random
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2] / name) for name in ("", "kernels")]

import decode_interpreter  # noqa: E402, F401  chooses the interpreter before triton is imported
import torch  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402

from fnllm_kernels import push_sum as kernels  # noqa: E402
from fnllm_kernels.push_sum import DTYPES, mailbox_words, make_mailbox, push_sum  # noqa: E402

# Small, so that both ways and programs without work come up: in 32-bit words.
kernels.FEW, kernels.WORDS, kernels.BLOCK = 4 * 96, 32, 64
LARGEST = 4 * 640
SIZES = (2, 70, 500, 192, 194, 600, 598)  # 96 words are few; even, so whole words in each dtype


def contribution(rank: int, turn: int, numbers: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    return torch.randn(numbers, generator=generator).to(dtype)


def expected(turn: int, ranks: int) -> torch.Tensor:
    numbers, dtype = SIZES[turn % len(SIZES)], DTYPES[turn % 3]
    return sum(contribution(rank, turn, numbers, dtype).float() for rank in range(ranks)).to(dtype)


def work(rank: int, boxes: list, results: mp.Queue) -> None:
    mailbox = make_mailbox(rank, [box.data_ptr() for box in boxes], boxes[rank], LARGEST)
    rng, wrong = random.Random(rank), []
    for turn in range(3 * len(SIZES)):
        time.sleep(rng.choice((0, 0, 0.01)))  # ranks come in any order
        found = push_sum(contribution(rank, turn, SIZES[turn % len(SIZES)], DTYPES[turn % 3]), mailbox)
        if not torch.equal(found, expected(turn, len(boxes))):
            wrong.append(turn)
    results.put((wrong, mailbox.few.counts.tolist() + mailbox.many.counts.tolist()))


def main(ranks: int) -> None:
    boxes = [torch.zeros(mailbox_words(ranks, LARGEST), dtype=torch.int64).share_memory_() for _ in range(ranks)]
    context = mp.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=work, args=(r, boxes, results), daemon=True) for r in range(ranks)]
    for process in processes:
        process.start()
    found = [results.get(timeout=100) for _ in range(ranks)]
    counts = found[0][1]
    assert all(one == ([], counts) for one in found), found
    # Each program counts its own exchanges: the first of a way takes part in all, the last in the longest only.
    assert counts[0] > counts[2] > 0 and counts[3] > counts[-1] > 0, counts
    assert counts[0] + counts[3] == 3 * len(SIZES), counts
    print("equal")


if __name__ == "__main__":
    main(int(sys.argv[1]))
