"""Where the running count or mass of a row's falling logits reaches a target, without sorting on the GPU.

Top-k asks for it with counts, top-p with masses. A search goes digit by digit (four bits each) over the floats in the
order of `order_keys.sortable`; every pass reads the logits once and measures what lies above 15 probes. Counts and
masses are integers, so their sums do not depend on the order in which tiles and ranks are added.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, library

from fnllm_kernels.layouts import vectors
from fnllm_kernels.order_keys import from_sortable

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

# One unit of mass is 2**-40 of the likeliest token's: 2**22 tokens of full mass still fit in 63 bits.
MASS_ONE = 2**40  # an int: torch.compile makes a graph input of a global float
DIGIT = 4
PROBES = 2**DIGIT - 1
MINUS_INFINITY = -0x7F800001  # order_keys.sortable of it


def masses(
    logits: Float[Tensor, "B W"], top: Float[Tensor, " B"], temperature: Float[Tensor, " B"]
) -> Float[Tensor, "B W"]:
    """exp((logits - top) / temperature) in whole units of 2**-40, as float32, which holds each exactly."""
    # Where both are infinite the difference is 0 and not NaN.
    below = torch.where(logits == top[:, None], 0.0, logits - top[:, None])
    return torch.floor(torch.exp(below / temperature[:, None]) * MASS_ONE)


def search_range(dtype: torch.dtype) -> tuple[int, int]:
    """(bits, unit) of a search: bfloat16 values differ only in the upper 16 bits of their keys, in units of 2**16."""
    return (16, 2**16) if dtype == torch.bfloat16 else (32, 1)


def key_to_float(key: Int[Tensor, "*shape"], unit: int) -> Float[Tensor, "*shape"]:
    """The float whose sortable key, divided by `unit`, is `key`; NaN, which no logit is above, past infinity."""
    # The 16 zero bits at the end of a bfloat16 are ones in the key of a negative one.
    filled = key * unit + torch.where(key < 0, unit - 1, 0)
    return from_sortable(filled.clamp(max=2**31 - 1).int())


def measure_above_reference(
    logits: Float[Tensor, "B V"],
    top: Float[Tensor, " B"],
    temperature: Float[Tensor, " B"],
    probes: Float[Tensor, "B Q"],
    by_mass: bool,
    valid: int,
) -> Int[Tensor, "B Q"]:
    """Per row and probe: how many of the first `valid` logits are above the probe, or their summed `masses`."""
    logits = logits[:, :valid].float()
    if not by_mass:
        return torch.stack([(logits > probe[:, None]).sum(-1) for probe in probes.unbind(1)], 1)
    mass = masses(logits, top, temperature).long()
    return torch.stack([torch.where(logits > probe[:, None], mass, 0).sum(-1) for probe in probes.unbind(1)], 1)


@library.custom_op("fnllm::measure_above", mutates_args=())
def measure_above(
    logits: Tensor, top: Tensor, temperature: Tensor, probes: Tensor, by_mass: bool, valid: int
) -> Tensor:
    """`measure_above_reference`: on a CPU in plain torch, on a GPU in Triton."""
    if logits.is_cuda:
        return launch_measure_above(logits, top, temperature, probes, by_mass, valid)
    return measure_above_reference(logits, top, temperature, probes, by_mass, valid)


@measure_above.register_fake
def _(logits: Tensor, top: Tensor, temperature: Tensor, probes: Tensor, by_mass: bool, valid: int) -> Tensor:
    return probes.new_empty(probes.shape, dtype=torch.int64)


def reach_reference(
    logits: Float[Tensor, "B V"],
    top: Float[Tensor, " B"],
    temperature: Float[Tensor, " B"],
    target: Int[Tensor, " B"],
    by_mass: bool,
    valid: int,
) -> tuple[Float[Tensor, " B"], Int[Tensor, " B"]]:
    """The logit at which the running measure of the first `valid` logits, falling, reaches `target` (>= 1), or -inf.

    Also what the logits above it measure: the lowest float above which they measure less than `target`, and how much.
    """
    values = numbers(logits, valid).sort(-1, descending=True).values
    return reach_falling(values, top, temperature, target, by_mass)


def numbers(logits: Float[Tensor, "B V"], valid: int) -> Float[Tensor, "B W"]:
    """The first `valid` logits in float32, with -inf in place of NaN, which would come before every number."""
    values = logits[:, :valid].float()
    return torch.where(values.isnan(), -torch.inf, values)


def reach_falling(
    values: Float[Tensor, "B W"],
    top: Float[Tensor, " B"],
    temperature: Float[Tensor, " B"],
    target: Int[Tensor, " B"],
    by_mass: bool,
) -> tuple[Float[Tensor, " B"], Int[Tensor, " B"]]:
    """`reach_reference` of numbers that fall already."""
    measure = masses(values, top, temperature).long() if by_mass else torch.ones_like(values, dtype=torch.int64)
    before = (measure.cumsum(-1) < target[:, None]).sum(-1)
    value = values.gather(1, before.clamp(max=values.shape[1] - 1)[:, None]).squeeze(1)
    value = torch.where(before < values.shape[1], value, -torch.inf)
    return value, torch.where(values > value[:, None], measure, 0).sum(-1)


def reach_among_few(
    values: Float[Tensor, "B W"],
    top: Float[Tensor, " B"],
    temperature: Float[Tensor, " B"],
    target: Int[Tensor, " B"],
    by_mass: bool,
) -> tuple[Float[Tensor, " B"], Int[Tensor, " B"]]:
    """`reach_reference` of numbers, sorting only as many of the largest as turn out to be needed; reads values back."""
    finite = values > -torch.inf
    total = (torch.where(finite, masses(values, top, temperature), 0).long() if by_mass else finite).sum(-1)
    endless = total < target
    for width in (1, 256, 4096):
        if width < values.shape[1]:
            near = torch.topk(values, width, dim=-1).values
            value, above = reach_falling(near, top, temperature, target, by_mass)
            if ((value > -torch.inf) | endless).all():
                return torch.where(endless, -torch.inf, value), torch.where(endless, total, above)
    return reach_falling(values.sort(-1, descending=True).values, top, temperature, target, by_mass)


@library.custom_op("fnllm::reach", mutates_args=())
def reach(
    logits: Tensor, top: Tensor, temperature: Tensor, target: Tensor, by_mass: bool, valid: int
) -> tuple[Tensor, Tensor]:
    """`reach_reference`: on a CPU in plain torch, on a GPU in Triton."""
    if logits.is_cuda:
        return launch_reach(logits, top, temperature, target, by_mass, valid)
    return reach_among_few(numbers(logits, valid), top, temperature, target, by_mass)


@reach.register_fake
def _(logits: Tensor, top: Tensor, temperature: Tensor, target: Tensor, by_mass: bool, valid: int):
    return torch.empty_like(top), torch.empty_like(target)


def launch_measure_above(
    logits: Tensor, top: Tensor, temperature: Tensor, probes: Tensor, by_mass: bool, valid: int
) -> Tensor:
    """The Triton form: tiles of the vocabulary add their parts atomically, exact because they are integers."""
    (rows, count), (top, temperature) = probes.shape, vectors(top, temperature)
    out = torch.zeros(rows, count, dtype=torch.int64, device=logits.device)
    tile = _tile(rows)
    _measure_kernel[(triton.cdiv(max(valid, 1), tile), rows)](
        logits, top, temperature, probes.contiguous(), out, logits.stride(0), logits.stride(1), valid,
        COUNT=count, BY_MASS=by_mass, TILE=tile, MASS_ONE=MASS_ONE,
    )  # fmt: skip
    return out


def launch_reach(
    logits: Tensor, top: Tensor, temperature: Tensor, target: Tensor, by_mass: bool, valid: int
) -> tuple[Tensor, Tensor]:
    """The Triton form: a launch for each digit, which finds its probes from the measures before it, and one to end."""
    (bits, unit), (top, temperature, target) = search_range(logits.dtype), vectors(top, temperature, target)
    rows, passes, tile = logits.shape[0], bits // DIGIT, _tile(logits.shape[0])
    measures = torch.zeros(passes, rows, PROBES + 1, dtype=torch.int64, device=logits.device)
    value, above = torch.empty_like(top), torch.empty_like(target)
    shared = {"BITS": bits, "UNIT": unit, "LOWEST": MINUS_INFINITY // unit, "DIGIT": DIGIT}
    for done in range(passes):
        _reach_kernel[(triton.cdiv(valid, tile), rows)](
            logits, top, temperature, target, measures, logits.stride(0), logits.stride(1), valid, rows, done,
            BY_MASS=by_mass, TILE=tile, MASS_ONE=MASS_ONE, **shared,
        )  # fmt: skip
    _end_kernel[(rows,)](target, measures, value, above, rows, passes, **shared)
    return value, above


def _tile(rows: int) -> int:
    """Vocabulary per program: few rows need small tiles to occupy the device."""
    return 2048 if rows <= 16 else 4096


if triton is not None:

    @triton.jit
    def _load_tile(logits, row, row_stride, column_stride, valid, TILE: tl.constexpr):
        ids = tl.program_id(0) * TILE + tl.arange(0, TILE)
        place = logits + row * row_stride + ids.to(tl.int64) * column_stride
        return tl.load(place, mask=ids < valid, other=float("-inf")).to(tl.float32), ids < valid

    @triton.jit
    def _measures(x, inside, top, temperature, row, BY_MASS: tl.constexpr, MASS_ONE: tl.constexpr):
        if BY_MASS:
            highest = tl.load(top + row)
            below = tl.where(x == highest, 0.0, x - highest)
            measure = tl.floor(tl.exp(below / tl.load(temperature + row)) * MASS_ONE)
            return tl.where(inside, measure, 0.0).to(tl.int64)
        else:
            return inside.to(tl.int32)

    @triton.jit
    def _measure_kernel(
        logits, top, temperature, probes, out, row_stride, column_stride, valid,
        COUNT: tl.constexpr, BY_MASS: tl.constexpr, TILE: tl.constexpr, MASS_ONE: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(1).to(tl.int64)
        x, inside = _load_tile(logits, row, row_stride, column_stride, valid, TILE)
        measure = _measures(x, inside, top, temperature, row, BY_MASS, MASS_ONE)
        for i in range(COUNT):
            part = tl.sum(tl.where(x > tl.load(probes + row * COUNT + i), measure, 0), 0)
            tl.atomic_add(out + row * COUNT + i, part.to(tl.int64))

    @triton.jit
    def _replay(target, measures, row, rows, done, BITS: tl.constexpr, LOWEST: tl.constexpr, DIGIT: tl.constexpr):
        """The key that the first `done` passes lead to, and the largest measure below the target among their probes."""
        passes = tl.arange(0, BITS // DIGIT)[:, None]
        slots = tl.arange(0, 1 << DIGIT)[None, :]
        place = measures + (passes * rows + row) * (1 << DIGIT) + slots
        # Measures of this pass are being added to meanwhile: they must not be read. Zero is below every target and
        # above no other measure; so is the last slot, which is no probe.
        measure = tl.load(place, mask=(passes < done) & (slots >= 0), other=0)
        reached = measure >= tl.load(target + row)
        digits = tl.sum(reached.to(tl.int64), 1)
        key = LOWEST + tl.sum(digits << (BITS - DIGIT * (1 + tl.arange(0, BITS // DIGIT))).to(tl.int64), 0)
        return key, tl.max(tl.max(tl.where(reached, -1, measure), 1), 0)

    @triton.jit
    def _key_to_float(key, UNIT: tl.constexpr):
        filled = tl.minimum(key * UNIT + tl.where(key < 0, UNIT - 1, 0), 2147483647).to(tl.int32)
        return (filled ^ ((filled >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)

    @triton.jit
    def _reach_kernel(
        logits, top, temperature, target, measures, row_stride, column_stride, valid, rows, done,
        BY_MASS: tl.constexpr, TILE: tl.constexpr, MASS_ONE: tl.constexpr,
        BITS: tl.constexpr, UNIT: tl.constexpr, LOWEST: tl.constexpr, DIGIT: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(1).to(tl.int64)
        key, _ = _replay(target, measures, row, rows, done, BITS, LOWEST, DIGIT)
        x, inside = _load_tile(logits, row, row_stride, column_stride, valid, TILE)
        measure = _measures(x, inside, top, temperature, row, BY_MASS, MASS_ONE)
        shift = BITS - DIGIT * (done + 1)
        out = measures + (done * rows + row) * (1 << DIGIT)
        step = tl.full((), 1, tl.int64) << shift
        for i in tl.static_range((1 << DIGIT) - 1):
            probe = _key_to_float(key + step * (i + 1) - 1, UNIT)
            tl.atomic_add(out + i, tl.sum(tl.where(x > probe, measure, 0), 0).to(tl.int64))

    @triton.jit
    def _end_kernel(
        target, measures, value, above, rows, done,
        BITS: tl.constexpr, UNIT: tl.constexpr, LOWEST: tl.constexpr, DIGIT: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        key, most = _replay(target, measures, row, rows, done, BITS, LOWEST, DIGIT)
        tl.store(value + row, _key_to_float(key, UNIT))
        tl.store(above + row, most)
