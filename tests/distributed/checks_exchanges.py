"""Checks of the collectives themselves on ranks: sums, maxima and gathers."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from fnllm.distributed import join
from fnllm.tensor_parallel import process_group_tp


def on_one_rank() -> None:
    return None


def exchanges(x, keys, tp):
    return tp.all_reduce(x), tp.all_reduce_max(keys), tp.all_gather(x, -1), tp.all_gather(x, 0), tp.all_gather(x.mT, 1)


def expect_exact(fn: Callable) -> None:
    """`fn` is `exchanges`, in whatever way it runs: its values to the bit, and its argument as it was."""
    join(torch.device("cpu"))
    tp, size = process_group_tp(), dist.get_world_size()
    assert (tp.rank, tp.size) == (dist.get_rank(), size) and hash(tp) == hash(process_group_tp())
    for rows in (2, 3):
        xs = [torch.arange(rows * 5.0).reshape(rows, 5) + 100 * r for r in range(size)]
        keys = [torch.tensor([r * 2**40, -r]) for r in range(size)]
        x = xs[tp.rank].clone()
        total, highest, last, first, turned = fn(x, keys[tp.rank], tp)
        assert type(total) is torch.Tensor
        assert torch.equal(total, sum(xs)) and torch.equal(x, xs[tp.rank])
        assert highest.tolist() == [(size - 1) * 2**40, 0]
        assert torch.equal(last, torch.cat(xs, -1)) and torch.equal(first, torch.cat(xs, 0))
        assert torch.equal(turned, torch.cat([y.mT for y in xs], 1))


def check_sums_maxima_and_gathers(expected: None) -> None:
    expect_exact(exchanges)
