"""`load`: a checkpoint's folder or hub id to this rank's `Params` (effect: reads files, joins the other ranks)."""

from pathlib import Path

import torch

import fnllm_weights
from fnllm.distributed import join, launched, local_device, together
from fnllm_weights import Params

DEMO = Path(__file__).parent / "demo"


def load(
    path: str | Path | None = None,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    revision: str | None = None,
) -> Params:
    """Load a local folder or a hub id; None is the small model that comes with the package.

    - `dtype`: None is the checkpoint's dtype on a GPU and float32 on a CPU.
    - `device`: None is a GPU if there is one. Under torchrun it is this rank's GPU.
    - `revision`: a branch, tag or commit on the hub.

    Under torchrun each rank loads its shard; if one rank cannot load, all fail. Raises ValueError that names the file,
    tensor or config field, before anything is allocated.
    """
    shard, where = launched(), local_device(device)
    if shard.size > 1:
        join(where)

    def read() -> Params:
        folder = DEMO if path is None else path
        return fnllm_weights.load(
            folder, dtype=dtype, device=where, revision=revision, rank=shard.rank, size=shard.size
        )

    return read() if shard.size == 1 else together(read)
