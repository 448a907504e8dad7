"""One rank of the gloo test: python gloo_exchanges.py RANK SIZE STORE_FILE."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist

from fnllm.tensor_parallel import process_group_tp


def exchanges(x, keys, tp):
    return tp.all_reduce(x), tp.all_reduce_max(keys), tp.all_gather(x, -1), tp.all_gather(x, 0), tp.all_gather(x.mT, 1)


def main(rank: int, size: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    tp = process_group_tp()
    assert (tp.rank, tp.size) == (rank, size) and hash(tp) == hash(process_group_tp())
    for fn in (exchanges, torch.compile(exchanges, fullgraph=True, dynamic=True)):
        for rows in (2, 3):
            xs = [torch.arange(rows * 5.0).reshape(rows, 5) + 100 * r for r in range(size)]
            keys = [torch.tensor([r * 2**40, -r]) for r in range(size)]
            x = xs[rank].clone()
            total, highest, last, first, turned = fn(x, keys[rank], tp)
            assert type(total) is torch.Tensor
            assert torch.equal(total, sum(xs)) and torch.equal(x, xs[rank])
            assert highest.tolist() == [(size - 1) * 2**40, 0]
            assert torch.equal(last, torch.cat(xs, -1)) and torch.equal(first, torch.cat(xs, 0))
            assert torch.equal(turned, torch.cat([y.mT for y in xs], 1))
    print("ok")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
