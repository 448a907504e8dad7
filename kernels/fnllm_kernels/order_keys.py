"""Floats as integers of the same order, and (score, token id) packed into one integer.

A packed key orders by score first and prefers the lower id among equal scores, so `max` over keys is an argmax with a
defined tie rule in any order of reduction: over a row, over tiles of the vocabulary, over ranks.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

LOW_32 = 0xFFFFFFFF

# In place of a token: above every score, and at the lowest score.
NAN_ID, NOTHING_ID = -1, -2  # some logit is NaN or +inf; every logit is -inf
NAN_KEY = 0x7FFFFFFF * 2**32 + (NAN_ID & LOW_32 ^ LOW_32)
NOTHING_KEY = -0x7F800001 * 2**32 + (NOTHING_ID & LOW_32 ^ LOW_32)
LEAST_DRAWN = -0x7F800000 * 2**32  # no key of a finite score is below


def sortable(x: Float[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """int32 keys in the order of `x` as float32, which must not hold NaN; -0.0 and 0.0 get the same key."""
    bits = torch.where(x == 0, 0.0, x).float().view(torch.int32)
    # Negative floats grow in magnitude with their bits: turn their order round, keep the sign.
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def from_sortable(key: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The float32 of an int32 key: the inverse of `sortable`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).view(torch.float32)


def pack(score: Float[Tensor, "*shape"], ids: Int[Tensor, "*#shape"]) -> Int[Tensor, "*shape"]:
    """int64 keys ordered by score, then by falling id; ids in [0, 2**32)."""
    # xor, not a subtraction: Inductor folds sums of an arange into 32-bit index arithmetic
    return sortable(score).long() * 2**32 + (ids.long() ^ LOW_32)


def or_failed(key: Int[Tensor, "*shape"], broken: Bool[Tensor, "*shape"] | None = None) -> Int[Tensor, "*shape"]:
    """Keys of draws, NOTHING_KEY where the best score is -inf and NAN_KEY where `broken`."""
    key = torch.where(key < LEAST_DRAWN, NOTHING_KEY, key)
    return key if broken is None else torch.where(broken, NAN_KEY, key)


def packed_ids(key: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """The token ids (int64) of packed keys; NAN_ID and NOTHING_ID of those two keys."""
    return (~key << 32) >> 32


def packed_scores(key: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The float32 scores of packed keys."""
    return from_sortable((key >> 32).int())
