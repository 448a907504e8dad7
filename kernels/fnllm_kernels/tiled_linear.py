"""x @ w.T by tiles, each output summed along the inputs in one chain: its bits do not depend on the tile or the row.

A program holds a tile of rows and outputs and walks over all inputs, so the order of a sum is that of the inputs
whatever the shape of the tile, and no second kernel adds parts up. For a kernel that can add them up itself, programs
beside each other may each walk over a part of the inputs. On sm_90 and later whole tiles are fetched by the tensor
memory accelerator (TMA); elsewhere, and where rows do not begin at multiples of 16 bytes, by plain loads.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from fnllm_kernels.dependent_launch import launch_options
from fnllm_kernels.layouts import in_order
from fnllm_kernels.persistent_linear import keeps_busy, launch_persistent

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


class Limits(NamedTuple):
    """What the choice of a tile depends on: multiprocessors, and the most bytes of shared memory of a program."""

    multiprocessors: int
    shared: int


H200 = Limits(132, 232448)
SMALL_WEIGHT = 1 << 23  # numbers: a product whose time is less that of its bytes than that between two kernels


def limits_of(device: torch.device) -> Limits:
    """The device's limits; a CPU, which runs Triton's interpreter, passes for an H200."""
    if device.type != "cuda":
        return H200
    properties = torch.cuda.get_device_properties(device)
    return Limits(properties.multi_processor_count, properties.shared_memory_per_block_optin)


def tile_of(rows: int, outputs: int, *, gated: bool = False, itemsize: int = 2, limits: Limits = H200) -> Tile:
    """The tile for a product; with `gated` the weight has twice as many rows as there are `outputs`.

    The rules were read off sweeps on an H200 (the last: benchmarks/results/linear_tiles.json).

    >>> [tuple(tile_of(rows, outputs)) for rows, outputs in ((8, 1024), (64, 4096), (8192, 24576))]
    [(16, 64, 256, 4, 4), (64, 32, 128, 4, 6), (256, 128, 64, 8, 4)]
    """
    if itemsize == 4:  # no tensor cores, whose products of float32 are not exact
        return Tile(16 if rows <= 16 else 64, 64, 32, 4, 2)
    tall, wide = tile_size(rows, outputs, gated, limits.multiprocessors)
    programs = -(-rows // tall) * -(-outputs // wide)
    deep, stages = tile_depth(tall, wide * (1 + gated), programs, itemsize, limits)
    return Tile(tall, wide, deep, 8 if tall * wide >= 128 * 128 else 4, stages)


def tile_size(rows: int, outputs: int, gated: bool, multiprocessors: int) -> tuple[int, int]:
    """(rows, outputs) of a tile: about one program a multiprocessor."""
    # Few rows are the shorter side of what the tensor cores multiply: 16 or 32 of them by 64 outputs. The narrower the
    # weight, the more such tiles beside each other pay, though each fetches the weight again.
    by_16, by_32 = (64, 128) if outputs <= 2048 else (16, 63) if outputs <= 8192 else (16, 32)
    if rows <= by_16:
        return 16, 64
    if rows <= by_32:
        return 32, 64
    least = -(-outputs * -(-rows // 64) // multiprocessors)
    wide = max(16, 1 << (least - 1).bit_length())
    if wide <= 128 or rows <= 64:
        return 64, min(wide, 64 if gated and rows <= 64 else 128)
    many = rows > 256 and rows * outputs > 256 * 128 * multiprocessors
    return 256 if many and not gated else 128, 128


def tile_depth(tall: int, wide: int, programs: int, itemsize: int, limits: Limits) -> tuple[int, int]:
    """(inputs of a tile, tiles on the way): as many bytes as a program's share of a multiprocessor's memory holds."""
    sums = tall * wide  # held in registers, which have room for 32768 at most, with what else a program needs
    room = 3 if sums < 128 * 128 else 2 if sums < 128 * 256 else 1
    together = -(-programs // limits.multiprocessors)
    if together > room:
        together = room if room == 3 else 1  # those that wait gain nothing by small shares
    memory = limits.shared // together - 2048  # of which barriers take some
    most = {256: 4, 128: 6, 64: 8}
    for deep in most:
        stages = memory // (deep * itemsize * (tall + wide))
        if deep == 64 or (stages >= 3 and deep * tall <= 8192):
            break
    return deep, max(2, min(stages, most[deep]))


def parts_tile(rows: int, outputs: int, parts: int, limits: Limits = H200) -> Tile | None:
    """The tile for a 16-bit product in parts of its inputs: the lowest with which all programs run at once, or None.

    Each lower tile fetches the weight once more, each higher one leaves more multiprocessors without work. 64 rows of
    more than 2560 outputs took as long in two parts as whole.

    >>> [tuple(parts_tile(rows, 2048, 2))[:2] for rows in (32, 64, 128)], parts_tile(129, 2048, 2)
    ([(16, 64), (32, 64), (64, 64)], None)
    """
    for tall in (16, 32, 64) if outputs <= 2560 else (16, 32):
        programs = parts * -(-rows // tall) * -(-outputs // 64)
        if programs <= limits.multiprocessors:
            deep, stages = tile_depth(tall, 64, programs, 2, limits)
            return Tile(tall, 64, deep, 4, stages)
    return None


def dependence(rows: int, numbers: int) -> tuple[bool, bool]:
    """(whether to launch dependently, whether to let the next kernel in early) for a weight of so many numbers; pure.

    The next kernel's programs, once let in, wait beside this one's and are in its way while it reads: let in early at
    64 rows of 24576 x 4096, 52 us become 59. Let in near the end, the products of a layer of the 8B shape gain by a
    dependent launch: 113.9 us a layer in place of 119.7 at 2 rows, 139.1 in place of 142.3 at 64, 157.6 in place of
    158.2 at 96, but 168.8 in place of 166.3 at 128. Small weights are soon read: letting the next kernel in early costs
    time up to 16 rows alone, 34.2 us a layer of the 0.6B shape in place of 30.6 at 8.

    >>> [dependence(rows, 1 << 22) for rows in (16, 17)], [dependence(rows, 1 << 24) for rows in (16, 96, 97)]
    ([(True, False), (True, True)], [(True, False), (True, False), (False, False)])
    """
    if numbers <= SMALL_WEIGHT:
        return True, rows > 16
    return rows <= 96, False


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

    tile: another than `tile_of` chooses (None: many rows may be `persistent_linear.py`'s); tma, pdl: fetch tiles by
    TMA, launch dependently (None: where it pays); early: whether the next kernel may start while this one works, and
    not only near its end (None: as `dependence` says).
    """
    return _launch(x, w, None, gated, tile, tma, pdl, early)


def launch_tiled_parts(
    x: Float[Tensor, "T I"],
    w: Float[Tensor, "O I"],
    parts: int,
    *,
    tile: Tile | None = None,
    tma: bool | None = None,
    pdl: bool | None = None,
    early: bool | None = None,
) -> Float32[Tensor, "P T O"]:
    """The products of so many parts of the inputs, one behind the other, whose sum is x @ w.T.

    A part is a number of whole tiles of inputs, the same for all; the last parts have what is left, which may be
    nothing. The other arguments are those of `launch_tiled`; tile: another than `parts_tile` chooses (None: that of
    the whole product, if there is none).
    """
    if tile is None and x.element_size() == 2:
        tile = parts_tile(x.shape[0], w.shape[0], parts, limits_of(x.device))
    return _launch(x, w, parts, False, tile, tma, pdl, early)


def _launch(
    x: Tensor,
    w: Tensor,
    parts: int | None,
    gated: bool,
    tile: Tile | None,
    tma: bool | None,
    pdl: bool | None,
    early: bool | None,
) -> Tensor:
    """`launch_tiled` or, with a number of parts, `launch_tiled_parts`."""
    x, w = in_order(x), in_order(w)
    (tokens, inputs), outputs = x.shape, w.shape[0] // 2 if gated else w.shape[0]
    shape, dtype = ((tokens, outputs), x.dtype) if parts is None else ((parts, tokens, outputs), torch.float32)
    if 0 in shape:
        return x.new_empty(shape, dtype=dtype)
    tma = fetches_tiles(x, w) if tma is None else tma
    limits = limits_of(x.device)
    stays = tma and tile is None and parts is None and x.element_size() == 2
    if stays and keeps_busy(tokens, outputs, gated, *limits):
        return launch_persistent(x, w, gated=gated, programs=limits.multiprocessors)
    dependent, let_in = dependence(tokens, w.numel())
    if pdl is None and not dependent:
        pdl = False
    early = let_in if early is None else early
    if tile is None:
        tile = tile_of(tokens, outputs, gated=gated, itemsize=x.element_size(), limits=limits)
    out, sources = x.new_empty(shape, dtype=dtype), (x, w)
    if tma:
        from triton.tools.tensor_descriptor import TensorDescriptor

        sources = tuple(
            TensorDescriptor.from_tensor(source, [size, tile.inputs])
            for source, size in ((x, tile.rows), (w, tile.outputs))
        )
    tiles = triton.cdiv(tokens, tile.rows) * triton.cdiv(outputs, tile.outputs)
    tiled_linear_kernel[(tiles, parts or 1)](
        *sources, out, tokens, outputs, inputs, PARTS=parts or 1, GATED=gated, TMA=tma, EARLY=early,
        ROWS=tile.rows, OUTPUTS=tile.outputs, INPUTS=tile.inputs, num_warps=tile.warps, num_stages=tile.stages,
        **launch_options(x.device, pdl),
    )  # fmt: skip
    return out


if triton is not None:
    GROUP = tl.constexpr(8)  # tiles of rows whose programs run side by side, so that they find a weight in the L2 cache

    @triton.jit(do_not_specialize=["tokens"])
    def tiled_linear_kernel(
        x, w, out, tokens, outputs, inputs,
        PARTS: tl.constexpr, GATED: tl.constexpr, TMA: tl.constexpr, EARLY: tl.constexpr,
        ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        """out [PARTS, tokens, outputs]; x and w are matrices or, with TMA, descriptors of their tiles."""
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
        begin, end = 0, inputs
        if PARTS > 1:
            part, size = tl.program_id(1), tl.cdiv(tl.cdiv(inputs, INPUTS), PARTS) * INPUTS
            begin = part * size
            end = tl.minimum(begin + size, inputs)
            out += part.to(tl.int64) * tokens * outputs
        for i in range(begin, end, INPUTS):
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
