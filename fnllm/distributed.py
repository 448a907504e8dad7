"""Joining the other ranks (effect): what torchrun's environment says, made into a `TensorParallel` value."""

import os
from datetime import timedelta

import torch
from fnllm_weights import Shard

from fnllm.tensor_parallel import SINGLE, TensorParallel, process_group_tp

TIMEOUT = timedelta(seconds=float(os.environ.get("FNLLM_TIMEOUT_S", "600")))


def launched() -> Shard:
    """This process's place among the ranks that torchrun started; one of one outside torchrun."""
    return Shard(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


def join(device: torch.device) -> None:
    """Initialise torch.distributed for the ranks that torchrun started, unless the script did."""
    import torch.distributed as dist

    if dist.is_initialized():
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=TIMEOUT, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=TIMEOUT)


def local_device(device: str | torch.device | None) -> torch.device:
    """The device of this rank: as asked for, else its own GPU, else the CPU."""
    if device is not None:
        return torch.device(device)
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def world(shard: Shard) -> TensorParallel:
    """The `TensorParallel` of parameters that hold one shard."""
    return SINGLE if shard.size == 1 else process_group_tp()
