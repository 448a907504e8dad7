"""Random weights, for training, benchmarks and tests (effect: allocates on the device)."""

import hashlib

import torch

from .config import ModelConfig
from .params import ParamTree, as_dtype, build_tree
from .shard import WHOLE, Shard, index_of, leaves

STD = 0.02


def init(
    config: ModelConfig,
    *,
    seed: int = 0,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    shard: Shard = WHOLE,
) -> ParamTree:
    """A tree of normally distributed weights and biases (std 0.02) and norm weights of 1, drawn on the device.

    Each checkpoint tensor has its own noise stream, of which a rank keeps its part, so the shards of any number of
    ranks make up the same model. `dtype` None: the config's, or else float32.
    """
    device, dtype = torch.device(device), as_dtype(dtype or config.dtype or "float32")
    tensors = {}
    for leaf in leaves(config, shard):
        out = torch.empty(leaf.shape, dtype=dtype, device=device)
        for box in leaf.padding:
            out[index_of(box)] = 0
        for piece in leaf.pieces:
            if piece.tensor.endswith("norm.weight"):
                out.fill_(1)
                continue
            noise = torch.empty(piece.shape, dtype=dtype, device=device)
            noise.normal_(0, STD, generator=torch.Generator(device).manual_seed(_stream(seed, piece.tensor)))
            out[index_of(piece.dest)] = noise[index_of(piece.source)]
        tensors[leaf.path] = out
    return build_tree(config, tensors)


def _stream(seed: int, tensor: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{tensor}".encode()).digest()[:8], "little") >> 1
