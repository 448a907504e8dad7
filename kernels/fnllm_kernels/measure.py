"""How much of a row's distribution lies above given logits: one pass over the logits for several thresholds.

`fnllm::measure_above` is the inner pass of the top-k and top-p search: it counts the logits above each probe, or adds up
their masses, as integers, so that the sum does not depend on the order in which tiles and ranks are added.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

# One unit of mass is 2**-40 of the likeliest token's: 2**22 tokens of full mass still fit in 63 bits.
MASS_ONE = 2.0**40


def masses(
    logits: Float[Tensor, "B W"], top: Float[Tensor, " B"], temperature: Float[Tensor, " B"]
) -> Float[Tensor, "B W"]:
    """exp((logits - top) / temperature) in whole units of 2**-40, as float32, which holds each exactly."""
    # Where both are infinite the difference is 0 and not NaN.
    below = torch.where(logits == top[:, None], 0.0, logits - top[:, None])
    return torch.floor(torch.exp(below / temperature[:, None]) * MASS_ONE)


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


@torch.library.custom_op("fnllm::measure_above", mutates_args=())
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


def launch_measure_above(
    logits: Float[Tensor, "B V"],
    top: Float[Tensor, " B"],
    temperature: Float[Tensor, " B"],
    probes: Float[Tensor, "B Q"],
    by_mass: bool,
    valid: int,
) -> Int[Tensor, "B Q"]:
    """The Triton form: tiles of the vocabulary add their parts atomically, exact because they are integers."""
    rows, count = probes.shape
    out = torch.zeros(rows, count, dtype=torch.int64, device=logits.device)
    # Few rows need small tiles to occupy the device.
    tile = 2048 if rows <= 16 else 4096
    _measure_kernel[(triton.cdiv(max(valid, 1), tile), rows)](
        logits, top, temperature, probes.contiguous(), out, logits.stride(0), logits.stride(1), valid,
        COUNT=count, BY_MASS=by_mass, TILE=tile, MASS_ONE=MASS_ONE,
    )  # fmt: skip
    return out


if triton is not None:

    @triton.jit
    def _measure_kernel(
        logits, top, temperature, probes, out, row_stride, column_stride, valid,
        COUNT: tl.constexpr, BY_MASS: tl.constexpr, TILE: tl.constexpr, MASS_ONE: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(1).to(tl.int64)
        ids = tl.program_id(0) * TILE + tl.arange(0, TILE)
        place = logits + row * row_stride + ids * column_stride
        x = tl.load(place, mask=ids < valid, other=float("-inf")).to(tl.float32)
        if BY_MASS:
            highest = tl.load(top + row)
            below = tl.where(x == highest, 0.0, x - highest)
            mass = tl.floor(tl.exp(below / tl.load(temperature + row)) * MASS_ONE).to(tl.int64)
        for i in range(COUNT):
            above = (x > tl.load(probes + row * COUNT + i)) & (ids < valid)
            if BY_MASS:
                part = tl.sum(tl.where(above, mass, 0), 0)
            else:
                part = tl.sum(above.to(tl.int32), 0).to(tl.int64)
            tl.atomic_add(out + row * COUNT + i, part)
