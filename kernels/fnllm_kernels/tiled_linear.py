"""x @ w.T by tiles, each output summed along the inputs in one chain: its bits do not depend on the tile or the row.

A program holds a tile of rows and outputs and walks over all inputs, so the order of a sum is that of the inputs
whatever the shape of the tile, and no second kernel adds parts up. On sm_90 and later whole tiles are fetched by the
tensor memory accelerator (TMA); elsewhere, and where rows do not begin at multiples of 16 bytes, by plain loads.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fnllm_kernels.dependent_launch import launch_options

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


class Tile(NamedTuple):
    """How a program works: rows, outputs and inputs of its tiles, warps, tiles on the way."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


class Machine(NamedTuple):
    """What the choice of a tile depends on: multiprocessors, and the most bytes of shared memory of a program."""

    multiprocessors: int
    shared: int


H200 = Machine(132, 232448)


def machine_of(device: torch.device) -> Machine:
    """The device's figures; a CPU, which runs Triton's interpreter, passes for an H200."""
    if device.type != "cuda":
        return H200
    properties = torch.cuda.get_device_properties(device)
    return Machine(properties.multi_processor_count, properties.shared_memory_per_block_optin)


def tile_of(rows: int, outputs: int, *, gated: bool = False, itemsize: int = 2, machine: Machine = H200) -> Tile:
    """The tile for a product: about one program a multiprocessor, and as many bytes on the way as its memory holds.

    The rule was read off a sweep of 344 tiles over 120 products on an H200 (benchmarks/results/linear_tiles.json).
    With `gated` the weight has twice as many rows as there are `outputs`.

    >>> [tuple(tile_of(rows, outputs)) for rows, outputs in ((8, 1024), (64, 4096), (8192, 24576))]
    [(16, 64, 256, 4, 4), (64, 32, 128, 4, 6), (256, 128, 64, 8, 4)]
    """
    if itemsize == 4:  # no tensor cores, whose products of float32 are not exact
        return Tile(16 if rows <= 16 else 64, 64, 32, 4, 2)
    # Few rows are the shorter side of what the tensor cores multiply: 16 or 32 of them by 64 outputs. The narrower the
    # weight, the more such tiles beside each other pay, though each fetches the weight again.
    by_16, by_32 = (64, 128) if outputs <= 2048 else (16, 63) if outputs <= 8192 else (16, 32)
    tall = 16 if rows <= by_16 else 32 if rows <= by_32 else 64
    most = 64 if tall < 64 or (gated and rows <= 64) else 128
    wide = max(16, power_of_two(-(-outputs * -(-rows // tall) // machine.multiprocessors))) if tall == 64 else 64
    if rows > 64 and wide > most:
        tall = 256 if rows > 256 and rows * outputs > 256 * 128 * machine.multiprocessors and not gated else 128
    wide = min(wide, most)
    # Programs that share a multiprocessor: all if so many fit beside each other, else a few small ones or one large.
    sums, together = tall * wide * (1 + gated), -(-(-(-rows // tall) * -(-outputs // wide)) // machine.multiprocessors)
    most = 3 if sums < 128 * 128 else 2 if sums < 128 * 256 else 1
    memory = machine.shared // (together if together <= most else most if sums < 128 * 128 else 1) - 2048  # barriers
    tile_bytes = itemsize * (tall + wide * (1 + gated))
    deep = next(k for k in (256, 128, 64) if k == 64 or (memory // (k * tile_bytes) >= 3 and k * tall <= 8192))
    stages = min(memory // (deep * tile_bytes), {256: 4, 128: 6, 64: 8}[deep])
    return Tile(tall, wide, deep, 8 if tall * wide >= 128 * 128 else 4, max(2, stages))


def power_of_two(number: int) -> int:
    """The least power of two that is no less."""
    return 1 << (number - 1).bit_length()


def fetches_tiles(*tensors: Tensor) -> bool:
    """Whether TMA can fetch tiles of these matrices: two-byte numbers whose rows begin at multiples of 16 bytes."""
    return all(
        t.is_cuda
        and t.element_size() == 2
        and t.is_contiguous()
        and t.shape[1] % 8 == 0
        and t.data_ptr() % 16 == 0
        and torch.cuda.get_device_capability(t.device)[0] >= 9
        for t in tensors
    )


def launch_tiled(
    x: Float[Tensor, "T I"],
    w: Float[Tensor, "O I"],
    *,
    gated: bool = False,
    tile: Tile | None = None,
    tma: bool | None = None,
    pdl: bool | None = None,
    early: bool | None = None,
) -> Float[Tensor, "T Y"]:
    """x @ w.T, with `gated` silu(gate) * up of w's two halves, rounded where separate kernels would round.

    tile: another than `tile_of` chooses; tma, pdl: fetch tiles by TMA, launch dependently (None: where possible).
    """
    x, w = x.contiguous(), w.contiguous()
    (tokens, inputs), outputs = x.shape, w.shape[0] // 2 if gated else w.shape[0]
    out = x.new_empty(tokens, outputs)
    if not out.numel():
        return out
    if tile is None:
        tile = tile_of(tokens, outputs, gated=gated, itemsize=x.element_size(), machine=machine_of(x.device))
    sources = x, w
    if fetches_tiles(x, w) if tma is None else tma:
        from triton.tools.tensor_descriptor import TensorDescriptor

        sources = tuple(
            TensorDescriptor.from_tensor(source, [size, tile.inputs])
            for source, size in ((x, tile.rows), (w, tile.outputs))
        )
    tiled_linear_kernel[(triton.cdiv(tokens, tile.rows) * triton.cdiv(outputs, tile.outputs),)](
        *sources, out, tokens, outputs, inputs, GATED=gated, TMA=sources[0] is not x, EARLY=bool(early), ROWS=tile.rows,
        OUTPUTS=tile.outputs, INPUTS=tile.inputs, num_warps=tile.warps, num_stages=tile.stages,
        **launch_options(x.device, pdl),
    )  # fmt: skip
    return out


if triton is not None:
    GROUP = tl.constexpr(8)  # tiles of rows whose programs run side by side, so that they find a weight in the L2 cache

    @triton.jit(do_not_specialize=["tokens"])
    def tiled_linear_kernel(
        x, w, out, tokens, outputs, inputs,
        GATED: tl.constexpr, TMA: tl.constexpr, EARLY: tl.constexpr,
        ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        """out [tokens, outputs]; x and w are matrices or, with TMA, descriptors of their tiles."""
        # The tensor cores' larger side has 64 places: it takes the outputs where there are fewer rows.
        TURNED: tl.constexpr = ROWS < 64 and OUTPUTS >= 64
        if PDL:
            if EARLY:
                tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        program, all_rows = tl.program_id(0), tl.cdiv(tokens, ROWS)
        in_group = GROUP * tl.cdiv(outputs, OUTPUTS)
        first = program // in_group * GROUP
        group = tl.minimum(all_rows - first, GROUP)
        # A last tile lies over the one before rather than past the end: TMA is slow where it fills in zeros.
        row = tl.maximum(tl.minimum((first + program % in_group % group) * ROWS, tokens - ROWS), 0)
        column = tl.maximum(tl.minimum(program % in_group // group * OUTPUTS, outputs - OUTPUTS), 0)
        if TURNED:
            total = tl.zeros((OUTPUTS, ROWS), tl.float32)
        else:
            total = tl.zeros((ROWS, OUTPUTS), tl.float32)
        up = total
        for i in range(0, inputs, INPUTS):
            a = load_tile(x, row, i, tokens, inputs, ROWS, INPUTS, TMA)
            b = load_tile(w, column, i, outputs, inputs, OUTPUTS, INPUTS, TMA)
            total = multiply_add(total, a, b, TURNED)
            if GATED:
                b = load_tile(w, outputs + column, i, 2 * outputs, inputs, OUTPUTS, INPUTS, TMA)
                up = multiply_add(up, a, b, TURNED)
        if PDL and not EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        dtype = out.dtype.element_ty
        if GATED:
            gate = total.to(dtype).to(tl.float32)
            total = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
        if TURNED:
            total = tl.trans(total)
        rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, OUTPUTS)
        inside = (rows < tokens)[:, None] & (columns < outputs)[None, :]
        tl.store(out + rows.to(tl.int64)[:, None] * outputs + columns[None, :], total.to(dtype), mask=inside)

    @triton.jit
    def load_tile(
        source, row, column, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr
    ):  # fmt: skip
        """A tile of a matrix [rows, columns], zeros past its end."""
        if TMA:
            tile = source.load([row, column])
        else:
            r, c = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
            at = source + r.to(tl.int64)[:, None] * columns + c[None, :]
            tile = tl.load(at, mask=(r < rows)[:, None] & (c < columns)[None, :], other=0.0)
        return tile

    @triton.jit
    def multiply_add(total, a, b, TURNED: tl.constexpr):
        """total + a @ b.T, with TURNED its transpose; float32 operands are multiplied exactly."""
        if TURNED:
            total = tl.dot(b, tl.trans(a), total, input_precision="ieee")
        else:
            total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
        return total
