"""Drawing a token without writing scores: Gumbel noise and argmax in one pass over the logits.

`fnllm::sample_logits` draws argmax(logits + temperature * noise) with the noise of `noise.py`; a row of temperature 0
skips the noise. It gives packed keys (`order_keys.pack` of the best score and its id), so that ranks exchange one
integer a row. Tiles of the vocabulary meet in an atomic maximum, which is exact in any order. A row with NaN or +inf
gives NAN_KEY, one that may draw nothing NOTHING_KEY: both are told from a tile's best score and cost no pass of their
own.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fnllm_kernels import noise, order_keys
from fnllm_kernels.layouts import vectors

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import libdevice
except ImportError:
    triton = None

LEAST_KEY = -(2**63)


def sample_logits_reference(
    logits: Float[Tensor, "B V"],
    temperature: Float[Tensor, " B"],
    seed: Int[Tensor, " B"],
    position: Int[Tensor, " B"],
    vocab_start: int,
    valid: int,
) -> Int[Tensor, " B"]:
    """Packed keys of the rows' draws, or NAN_KEY or NOTHING_KEY. Column j is id `vocab_start` + j; from `valid` on they
    are not looked at."""
    columns = torch.arange(logits.shape[1], device=logits.device)
    ids = vocab_start + columns
    logits = torch.where(columns < valid, logits.float(), -torch.inf)
    score = torch.where(logits == logits, logits, torch.inf)
    score = score + temperature[:, None] * noise.gumbel_noise(seed, position, ids)
    return order_keys.or_failed(order_keys.pack(score, ids[None, :]).amax(-1), (score == torch.inf).any(-1))


@torch.library.custom_op("fnllm::sample_logits", mutates_args=())
def sample_logits(
    logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor, vocab_start: int, valid: int
) -> Tensor:
    """`sample_logits_reference`: on a CPU in plain torch, on a GPU in Triton."""
    if logits.is_cuda:
        return launch_sample_logits(logits, temperature, seed, position, vocab_start, valid)
    return sample_logits_reference(logits, temperature, seed, position, vocab_start, valid)


@sample_logits.register_fake
def _(logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor, vocab_start: int, valid: int) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


def launch_sample_logits(
    logits: Float[Tensor, "B V"],
    temperature: Float[Tensor, " B"],
    seed: Int[Tensor, " B"],
    position: Int[Tensor, " B"],
    vocab_start: int,
    valid: int,
) -> Int[Tensor, " B"]:
    """The Triton form of `sample_logits_reference`."""
    (rows, vocab), (temperature, seed, position) = logits.shape, vectors(temperature, seed, position)
    best = torch.full((rows,), LEAST_KEY, dtype=torch.int64, device=logits.device)
    tile = 1024 if rows <= 8 else 2048  # few rows need small tiles to occupy the device
    _sample_logits_kernel[(triton.cdiv(vocab, tile), rows)](
        logits, temperature, seed, position, best, logits.stride(0), logits.stride(1), vocab_start, valid,
        FAST=logits.is_cuda, TILE=tile, num_warps=4,
    )  # fmt: skip
    return best


if triton is not None:
    MIX_1 = tl.constexpr(noise.MIX_1)
    MIX_2 = tl.constexpr(noise.MIX_2)
    SEED_1 = tl.constexpr(noise.SEED_1)
    SEED_2 = tl.constexpr(noise.SEED_2)
    LARGEST = tl.constexpr(noise.LARGEST)
    LN_2 = tl.constexpr(0.6931471805599453)
    NAN_KEY = tl.constexpr(order_keys.NAN_KEY)
    NOTHING_KEY = tl.constexpr(order_keys.NOTHING_KEY)

    @triton.jit
    def _mix(x):
        x = x ^ (x >> 16)
        x = x * MIX_1
        x = x ^ (x >> 15)
        x = x * MIX_2
        return x ^ (x >> 15)

    @triton.jit
    def _row_keys(seed, position):
        low = seed.to(tl.uint32)
        high = (seed >> 32).to(tl.uint32)
        place = position.to(tl.uint32)
        first = tl.full((), SEED_1, tl.uint32)
        second = tl.full((), SEED_2, tl.uint32)
        return _mix(_mix(_mix(low ^ first) ^ high) ^ place), _mix(_mix(_mix(place ^ second) ^ low) ^ high)

    @triton.jit
    def _log_exponential(ids, key_1, key_2, FAST: tl.constexpr):
        """Base-2 logarithm of -log1p(-v): `noise.gumbel_from_keys` is -log(2) times it. They agree to about 4e-6.

        The arithmetic of each id is most of the draw, hence the forms with the fewest instructions; `FAST` takes the
        hardware's logarithms, which the interpreter does not have.
        """
        x = ids.to(tl.uint32) ^ key_1
        x = x ^ (x >> 16)
        x = x * MIX_1
        x = x ^ (x >> 15)
        x = x * MIX_2 + key_2 * MIX_2
        x = x ^ (x >> 15)
        v = tl.minimum(x.to(tl.float32), LARGEST) * 2.3283064365386963e-10 + 1.1641532182693481e-10
        # 1 - v loses the digits of a small v, so there the series v + v**2/2 + v**3/3 + v**4/4 stands in.
        series = v * (1 + v * (0.5 + v * (0.33333334 + v * 0.25)))
        if FAST:
            return libdevice.fast_log2f(tl.where(v < 0.015625, series, -LN_2 * libdevice.fast_log2f(1 - v)))
        else:
            return tl.log2(tl.where(v < 0.015625, series, -LN_2 * tl.log2(1 - v)))

    @triton.jit
    def _largest(a, b):
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)

    @triton.jit
    def _key(score, ids):
        """`order_keys.pack`, and the two keys of scores that no token may have."""
        bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
        order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
        key = order * 4294967296 + (4294967295 - ids.to(tl.int64))
        key = tl.where(score == float("-inf"), NOTHING_KEY, key)
        return tl.where(score == float("inf"), NAN_KEY, key)

    @triton.jit
    def _sample_logits_kernel(
        logits, temperature, seed, position, best, row_stride, column_stride, vocab_start, valid,
        FAST: tl.constexpr, TILE: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(1).to(tl.int64)
        columns = tl.program_id(0) * TILE + tl.arange(0, TILE)
        place = logits + row * row_stride + columns.to(tl.int64) * column_stride
        score = tl.load(place, mask=columns < valid, other=float("-inf")).to(tl.float32)
        t = tl.load(temperature + row)
        if t > 0:
            key_1, key_2 = _row_keys(tl.load(seed + row), tl.load(position + row))
            score -= (t * LN_2) * _log_exponential(vocab_start + columns, key_1, key_2, FAST)
        highest = tl.reduce(score, 0, _largest)
        index = tl.min(tl.where(score == highest, columns, 2147483647), 0)  # the first of equal ones
        highest = tl.where(highest == highest, highest, float("inf"))
        tl.atomic_max(best + row, _key(highest, vocab_start + index))
