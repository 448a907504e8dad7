"""An all-reduce of small tensors in one kernel, in which each rank reads the others' memory over NVLink.

Decode steps sum a few kilobytes many times; there the time goes into starting a collective and not into moving bytes.
It is PyTorch's own kernel on its symmetric memory, without NVLink multicast.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from fnllm.tensor_parallel import ProcessGroup, refuse_gradients

LARGEST = 256 * 1024  # bytes; above, each rank reading everything costs more than a ring
ALIGNED = 16  # bytes that the kernel moves at a time


@dataclass(frozen=True)
class OneShot(ProcessGroup):
    """A process group whose small sums go through peer memory; everything else is as with `ProcessGroup`."""

    largest: int = LARGEST

    def all_reduce(self, x: Tensor) -> Tensor:
        refuse_gradients(x)
        return torch.ops.fnllm.one_shot_all_reduce(x.contiguous(), self.group_name, self.largest)


def one_shot_tp(tp: ProcessGroup, largest: int = LARGEST) -> OneShot:
    """The same ranks, with sums of at most `largest` bytes through peer memory."""
    return OneShot(tp.rank, tp.size, tp.group_name, largest)


@functools.cache
def shared_buffer(group_name: str, dtype: torch.dtype, device: torch.device, nbytes: int) -> Tensor:
    """This rank's part of a buffer that all ranks of the group can read; made by all ranks at the same call."""
    import torch.distributed._symmetric_memory as symmetric_memory

    buffer = symmetric_memory.empty(nbytes // dtype.itemsize, dtype=dtype, device=device)
    symmetric_memory.rendezvous(buffer, group_name)
    return buffer


@torch.library.custom_op("fnllm::one_shot_all_reduce", mutates_args=())
def one_shot_all_reduce(x: Tensor, group_name: str, largest: int) -> Tensor:
    """The sum of `x` over the ranks, equal in all bits on all of them: each adds in rank order."""
    nbytes = x.numel() * x.element_size()
    if not x.is_cuda or nbytes > largest or nbytes % ALIGNED or nbytes == 0 or not x.dtype.is_floating_point:
        functional = torch.ops._c10d_functional
        return functional.wait_tensor(functional.all_reduce(x, "sum", group_name))
    # The kernel copies `x` there for the others to read and ends when all have, so the next sum may write there again.
    shared = shared_buffer(group_name, x.dtype, x.device, largest)
    mine = shared[: x.numel()]
    return torch.ops.symm_mem.one_shot_all_reduce_copy(mine, x.view(-1), "sum", group_name).view(x.shape)


@one_shot_all_reduce.register_fake
def _(x: Tensor, group_name: str, largest: int) -> Tensor:
    return torch.empty_like(x)
