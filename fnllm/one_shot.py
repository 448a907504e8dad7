"""A one-kernel all-reduce that writes to the other ranks' memory over NVLink (effect: allocates that memory).

Decode steps sum kilobytes to a few megabytes many times; there the time goes into starting a collective and waiting for
all to have arrived, and not into moving bytes. The kernel is `push_sum`; the memory is PyTorch's symmetric memory,
without NVLink multicast.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from fnllm.tensor_parallel import ProcessGroup, refuse_gradients
from fnllm_kernels.push_sum import Mailbox, mailbox_words, make_mailbox, push_sum, takes

MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class OneShot(ProcessGroup):
    """A process group whose sums of at most `largest` bytes go through peer memory, all else as with `ProcessGroup`."""

    largest: int

    def all_reduce(self, x: Tensor) -> Tensor:
        refuse_gradients(x)
        return torch.ops.fnllm.one_shot_all_reduce(x.contiguous(), self.group_name, self.size, self.largest)


def one_shot_tp(tp: ProcessGroup, largest: int | None = None) -> OneShot:
    """The same ranks, with sums of at most `largest` bytes through peer memory, `best_largest` of them if None."""
    return OneShot(tp.rank, tp.size, tp.group_name, best_largest(tp.size) if largest is None else largest)


def best_largest(ranks: int) -> int:
    """Up to how many bytes one shot is the faster.

    Two ranks must exchange everything in any case; the kernel was faster than NCCL at all sizes that both were given,
    up to 16 MiB (and takes 192 us for 64 MiB).
    Among more a ring sends less: by its bytes it should win from about 6 MiB that a rank sends (not measured).
    """
    return 64 * MEBIBYTE if ranks == 2 else 6 * MEBIBYTE // max(1, ranks - 1)


@functools.cache
def mailbox(group_name: str, ranks: int, largest: int, device: torch.device) -> Mailbox:
    """This rank's boxes and where the others' are; made by all ranks at the same call, outside a capture.

    Raises RuntimeError where the ranks cannot reach each other's memory.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    memory = symmetric_memory.empty(mailbox_words(ranks, largest), dtype=torch.int64, device=device)
    memory.zero_()
    torch.cuda.synchronize(device)
    try:
        handle = symmetric_memory.rendezvous(memory, group_name)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {torch.distributed.get_rank()} cannot reach the other ranks' memory for sums through it ({error}); "
            "set FNLLM_ALL_REDUCE=group to use NCCL"
        ) from error
    handle.barrier()  # nobody writes to a box that is still being cleared
    torch.cuda.synchronize(device)
    offset = memory.data_ptr() - handle.buffer_ptrs[handle.rank]  # alike on all ranks
    return make_mailbox(handle.rank, [base + offset for base in handle.buffer_ptrs], memory, largest)


@torch.library.custom_op("fnllm::one_shot_all_reduce", mutates_args=())
def one_shot_all_reduce(x: Tensor, group_name: str, ranks: int, largest: int) -> Tensor:
    """The sum of `x` over the ranks, equal in all bits on all of them."""
    if not x.is_cuda or not takes(x, largest):
        functional = torch.ops._c10d_functional
        return functional.wait_tensor(functional.all_reduce(x, "sum", group_name))
    return push_sum(x, mailbox(group_name, ranks, largest, x.device))


@one_shot_all_reduce.register_fake
def _(x: Tensor, group_name: str, ranks: int, largest: int) -> Tensor:
    return torch.empty_like(x)
