"""The paged KV cache: a pool of fixed-size blocks for each layer, and how many of them fit in memory (effect).

It is written only by ops that declare it in `mutates_args` (`fnllm::store_kv`, those that norm, rotate and store, and
`fnllm::copy_blocks`), and by `zero_broken_blocks`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fnllm_weights import LocalSizes, ModelConfig


class KVCache(NamedTuple):
    """One pool of blocks per layer for keys and one for values; their addresses never change."""

    k: tuple[Float[Tensor, "P S K D"], ...]
    v: tuple[Float[Tensor, "P S K D"], ...]

    @property
    def block_size(self) -> int:
        return self.k[0].shape[1]


def allocate(
    config: ModelConfig, sizes: LocalSizes, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """Allocate the pool for this rank's KV heads, filled with zeros."""
    shape = (num_blocks, block_size, sizes.kv_heads, config.head_dim)
    pools = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2 * config.num_hidden_layers)]
    return KVCache(tuple(pools[0::2]), tuple(pools[1::2]))


def zero_broken_blocks(
    cache: KVCache, blocks: Int[Tensor, " n"], all_reduce_max: Callable[[Tensor], Tensor]
) -> list[int]:
    """Write zeros over those of `blocks` that hold NaN or infinity on any rank, and return them.

    Attention gives keys past a sequence's end the weight zero, and that would not undo such a value in the hands of the
    block's next owner.
    """
    pools, found = (*cache.k, *cache.v), []
    for at in blocks.split(256):
        finite = torch.stack([pool[at].isfinite().flatten(1).all(1) for pool in pools]).all(0)
        broken = at[all_reduce_max((~finite).long()).bool()]
        for pool in pools:
            pool[broken] = 0
        found += broken.tolist()
    return found


def block_bytes(config: ModelConfig, sizes: LocalSizes, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all layers, keys and values."""
    return 2 * config.num_hidden_layers * block_size * sizes.kv_heads * config.head_dim * dtype.itemsize


def blocks_that_fit(*, free: int, total: int, reserve: int, utilization: float, per_block: int, needed: int) -> int:
    """How many blocks to allocate, from measured memory figures in bytes.

    `free` and `total` describe the device now, `reserve` is what the steps need besides the pool, `utilization` the
    share of the device that the process may use, `needed` the blocks that the largest possible load can fill.
    Raises ValueError with the figures when not even one block fits.
    """
    available = min(free, int(total * utilization) - (total - free)) - reserve
    blocks = min(needed, available // per_block)
    if blocks < 1:
        raise ValueError(
            f"no room for a KV cache: {free / 1e9:.2f} of {total / 1e9:.2f} GB are free, utilization={utilization} and "
            f"a reserve of {reserve / 1e9:.2f} GB leave {available / 1e9:.2f} GB, and one block takes "
            f"{per_block / 1e9:.4f} GB; free memory, raise utilization, or give num_blocks"
        )
    return blocks


def host_memory() -> int:
    """Free bytes of the host's memory; 4 GB where the system does not say."""
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 4 << 30
