"""Drawing a token without writing scores: Gumbel noise and argmax in one pass over the logits, or inside the head.

Two ops give packed keys (`order_keys.pack` of the best score and its id), so that ranks exchange one integer a row:

- `fnllm::sample_logits` reads logits [B, V] once; any kernel may have made them.
- `fnllm::sample_head` multiplies the hidden states by the head and keeps each tile's logits in registers.

Both draw argmax(logits + temperature * noise) with the noise of `noise.py`; a row of temperature 0 skips the noise.
Tiles of the vocabulary meet in an atomic maximum, which is exact in any order. A row with NaN or +inf gives NAN_KEY,
one that may draw nothing NOTHING_KEY: both are told from a tile's best score and cost no pass of their own.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fnllm_kernels import noise, order_keys

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


def sample_head_reference(
    hidden: Float[Tensor, "B H"],
    weight: Float[Tensor, "V H"],
    temperature: Float[Tensor, " B"],
    seed: Int[Tensor, " B"],
    position: Int[Tensor, " B"],
    vocab_start: int,
    valid: int,
) -> Int[Tensor, " B"]:
    """`sample_logits_reference` of hidden @ weight.T, with products and logits in float32."""
    logits = torch.nn.functional.linear(hidden.float(), weight.float())
    return sample_logits_reference(logits, temperature, seed, position, vocab_start, valid)


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


@torch.library.custom_op("fnllm::sample_head", mutates_args=())
def sample_head(
    hidden: Tensor, weight: Tensor, temperature: Tensor, seed: Tensor, position: Tensor, vocab_start: int, valid: int
) -> Tensor:
    """`sample_head_reference`: on a CPU in plain torch, on a GPU in Triton."""
    if hidden.is_cuda:
        return launch_sample_head(hidden, weight, temperature, seed, position, vocab_start, valid)
    return sample_head_reference(hidden, weight, temperature, seed, position, vocab_start, valid)


@sample_head.register_fake
def _(
    hidden: Tensor, weight: Tensor, temperature: Tensor, seed: Tensor, position: Tensor, vocab_start: int, valid: int
) -> Tensor:
    return hidden.new_empty(hidden.shape[0], dtype=torch.int64)


def launch_sample_logits(
    logits: Float[Tensor, "B V"],
    temperature: Float[Tensor, " B"],
    seed: Int[Tensor, " B"],
    position: Int[Tensor, " B"],
    vocab_start: int,
    valid: int,
) -> Int[Tensor, " B"]:
    """The Triton form of `sample_logits_reference`."""
    rows, vocab = logits.shape
    best = torch.full((rows,), LEAST_KEY, dtype=torch.int64, device=logits.device)
    tile = 1024 if rows <= 8 else 2048  # few rows need small tiles to occupy the device
    _sample_logits_kernel[(triton.cdiv(vocab, tile), rows)](
        logits, temperature, seed, position, best, logits.stride(0), logits.stride(1), vocab_start, valid,
        FAST=logits.is_cuda, TILE=tile, num_warps=4,
    )  # fmt: skip
    return best


def launch_sample_head(
    hidden: Float[Tensor, "B H"],
    weight: Float[Tensor, "V H"],
    temperature: Float[Tensor, " B"],
    seed: Int[Tensor, " B"],
    position: Int[Tensor, " B"],
    vocab_start: int,
    valid: int,
    config: dict[str, int] | None = None,
) -> Int[Tensor, " B"]:
    """The Triton form of `sample_head_reference`; `config` replaces `head_config`."""
    rows, width = hidden.shape
    config = head_config(rows) if config is None else config
    best = torch.full((rows,), LEAST_KEY, dtype=torch.int64, device=hidden.device)
    # Blocks of rows vary fastest, so that those which read the same weights run together and find them in the L2 cache.
    grid = (triton.cdiv(rows, config["BLOCK_B"]), triton.cdiv(weight.shape[0], config["BLOCK_V"]))
    _sample_head_kernel[grid](
        hidden, weight, temperature, seed, position, best, hidden.stride(0), weight.stride(0),
        vocab_start, valid, weight.shape[0], rows, FAST=hidden.is_cuda, WIDTH=width, **config,
    )  # fmt: skip
    return best


def head_config(rows: int) -> dict[str, int]:
    """Tile sizes: for few rows deep tiles that stream the weights, for many square ones that feed the tensor cores."""
    if rows <= 16:
        return {"BLOCK_B": 16, "BLOCK_V": 64, "BLOCK_H": 256, "num_warps": 4, "num_stages": 4}
    if rows <= 64:
        block = 32 if rows <= 32 else 64
        return {"BLOCK_B": block, "BLOCK_V": 128, "BLOCK_H": 128, "num_warps": 4, "num_stages": 4}
    return {"BLOCK_B": 128, "BLOCK_V": 128, "BLOCK_H": 64, "num_warps": 8, "num_stages": 4}


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

    @triton.jit
    def _sample_head_kernel(
        hidden, weight, temperature, seed, position, best, hidden_stride, weight_stride,
        vocab_start, valid, vocab, rows, WIDTH: tl.constexpr,
        FAST: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
        columns = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
        h = tl.arange(0, BLOCK_H)
        # Rows and columns past the end read the last one, so that the loop over the width needs no mask of theirs.
        w_place = weight + tl.minimum(columns, vocab - 1).to(tl.int64)[:, None] * weight_stride + h[None, :]
        x_place = hidden + tl.minimum(row, rows - 1).to(tl.int64)[None, :] * hidden_stride + h[:, None]
        # Vocabulary first: the tensor cores' long side is for the weights, whatever the number of rows.
        score = tl.zeros((BLOCK_V, BLOCK_B), tl.float32)
        for start in range(0, WIDTH, BLOCK_H):
            if WIDTH % BLOCK_H == 0:
                w = tl.load(w_place + start)
                x = tl.load(x_place + start)
            else:
                w = tl.load(w_place + start, mask=(start + h)[None, :] < WIDTH, other=0.0)
                x = tl.load(x_place + start, mask=(start + h)[:, None] < WIDTH, other=0.0)
            score = tl.dot(w, x, score, input_precision="ieee")
        here = row < rows
        t = tl.load(temperature + row, mask=here, other=0.0)
        if tl.max(t, 0) > 0:
            key_1, key_2 = _row_keys(
                tl.load(seed + row, mask=here, other=0), tl.load(position + row, mask=here, other=0)
            )
            # A row of temperature 0 keeps its logits, infinite ones included.
            noise = _log_exponential((vocab_start + columns)[:, None], key_1[None, :], key_2[None, :], FAST)
            drawn = score - (t * LN_2)[None, :] * noise
            score = tl.where(t[None, :] > 0, drawn, score)
        score = tl.where(score == score, score, float("inf"))
        highest, index = tl.max(tl.where((columns < valid)[:, None], score, float("-inf")), 0, return_indices=True)
        key = _key(highest, vocab_start + tl.program_id(1) * BLOCK_V + index)
        tl.atomic_max(best + row, key, mask=here)
