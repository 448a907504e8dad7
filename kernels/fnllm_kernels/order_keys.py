"""Floats as integers of the same order, and (score, token id) packed into one integer.

A packed key orders by score first and prefers the lower id among equal scores, so `max` over keys is an argmax with a
defined tie rule in any order of reduction: over a row, over tiles of the vocabulary, over ranks.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

LOW_32 = 0xFFFFFFFF


def sortable(x: Float[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """int32 keys in the order of float32 `x`, which must not hold NaN; -0.0 and 0.0 get the same key."""
    bits = torch.where(x == 0, 0.0, x).view(torch.int32)
    # Negative floats grow in magnitude with their bits: turn their order round, keep the sign.
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def from_sortable(key: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The float32 of an int32 key: the inverse of `sortable`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).view(torch.float32)


def pack(score: Float[Tensor, "*shape"], ids: Int[Tensor, "*#shape"]) -> Int[Tensor, "*shape"]:
    """int64 keys ordered by score, then by falling id; ids in [0, 2**32)."""
    # xor, not a subtraction: Inductor folds sums of an arange into 32-bit index arithmetic
    return sortable(score).long() * 2**32 + (ids.long() ^ LOW_32)


def packed_ids(key: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """The token ids (int64) of packed keys."""
    return (key & LOW_32) ^ LOW_32


def packed_scores(key: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The float32 scores of packed keys."""
    return from_sortable((key >> 32).int())
