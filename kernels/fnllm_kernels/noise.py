"""Counter-based Gumbel noise: a pure function of (seed, position, token id).

argmax(logits + temperature * noise) is a draw from softmax(logits / temperature) (the Gumbel-max trick). As no
generator has a state, a request draws the same tokens in any batch, order, number of ranks, eager or compiled.

The integers are exact everywhere: they are held in int64, every product is of a 32-bit value and a constant below
2**31, and masks bring results back to 32 bits, so nothing overflows and no negative number is shifted.
`order_keys.pack` and the Triton functions in `sample_logits.py` complete the draw.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, library

LOW_32 = 0xFFFFFFFF
# The 32-bit mixer "16 21f0aaad 15 735a2d97 15" of Wellons' hash-prospector (public domain): avalanche bias 0.108.
MIX_1 = 0x21F0AAAD
MIX_2 = 0x735A2D97
SEED_1 = 0x9E3779B9
SEED_2 = 0x5851F42D
# The largest float32 below 2**32: a hash rounded to 2**32 would make the uniform value 1 and its logarithm infinite.
LARGEST = 4294967040


def mix(x: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """A bijection of [0, 2**32) in which every input bit moves every output bit."""
    x = x ^ (x >> 16)
    x = (x * MIX_1) & LOW_32
    x = x ^ (x >> 15)
    x = (x * MIX_2) & LOW_32
    return x ^ (x >> 15)


def row_keys(seed: Int[Tensor, " B"], position: Int[Tensor, " B"]) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"]]:
    """Two 32-bit keys (in int64) for a row that draws the token at `position`; `seed` may be any int64."""
    keys = mixed_keys(seed, position)
    return keys[0], keys[1]


# An op of its own because Inductor expands each `x ^ (x >> n)` into two copies of x: nine in a row take minutes.
@library.custom_op("fnllm::mixed_keys", mutates_args=())
def mixed_keys(seed: Tensor, position: Tensor) -> Tensor:
    """`row_keys` as one tensor [2, B]."""
    seed, position = seed.long(), position.long()
    low, high, place = seed & LOW_32, (seed >> 32) & LOW_32, position & LOW_32
    return torch.stack([mix(mix(mix(low ^ SEED_1) ^ high) ^ place), mix(mix(mix(place ^ SEED_2) ^ low) ^ high)])


@mixed_keys.register_fake
def _(seed: Tensor, position: Tensor) -> Tensor:
    return seed.new_empty((2, seed.shape[0]), dtype=torch.int64)


def token_hash(key_1: Int[Tensor, " B"], key_2: Int[Tensor, " B"], token_ids: Int[Tensor, " V"]) -> Int[Tensor, "B V"]:
    """32 mixed bits (in int64) per row and token: `mix` with the second key added half-way.

    The second key keeps two rows from drawing permuted copies of one noise: 64 bits would have to agree for that.
    """
    x = token_ids.long()[None, :] ^ key_1[:, None]
    x = x ^ (x >> 16)
    x = (x * MIX_1) & LOW_32
    x = x ^ (x >> 15)
    x = (((x + key_2[:, None]) & LOW_32) * MIX_2) & LOW_32
    return x ^ (x >> 15)


def gumbel_from_keys(
    key_1: Int[Tensor, " B"], key_2: Int[Tensor, " B"], token_ids: Int[Tensor, " V"]
) -> Float[Tensor, "B V"]:
    """Float32 noise of the rows' keys, in [-2.9, 22.9].

    -log(-log1p(-v)) for v uniform in (0, 1): the largest noise, which decides the draw, comes from the smallest v,
    where floats are densest; -log(-log(v)) would take it from steps of 2**-24 near 1.
    """
    v = (token_hash(key_1, key_2, token_ids).float().clamp(max=LARGEST) + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-v))


def gumbel_noise(
    seed: Int[Tensor, " B"], position: Int[Tensor, " B"], token_ids: Int[Tensor, " V"]
) -> Float[Tensor, "B V"]:
    """Float32 standard Gumbel noise, a function of (seed, position, token id) alone."""
    return gumbel_from_keys(*row_keys(seed, position), token_ids)
