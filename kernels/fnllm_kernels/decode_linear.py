"""Triton kernels behind `small_linear` and `norm_linear`, and the choice of their tiles.

For one row, and two of a small weight, a warp holds whole rows of the weight and multiplies them with every row of x;
for up to 16 rows the program's warps split the length H among them and use the tensor cores.
"""

from typing import NamedTuple

import torch

from fnllm_kernels.decode_tiles import triton
from fnllm_kernels.dependent_launch import launch_options
from fnllm_kernels.layouts import in_pairs

if triton is not None:
    import triton.language as tl

    from fnllm_kernels.decode_tiles import (
        add_squares,
        inverse_rms,
        load_beside,
        load_row,
        load_weights,
        multiply_add,
        rounded,
        row_sums,
        store_sums,
        unpack_all,
        weigh_row,
        zero_totals,
    )


class Tiles(NamedTuple):
    """How a linear layer is cut: warps a program, rows of w a warp, pairs a chunk, chunks held in registers at once."""

    warps: int
    rows: int
    pairs: int
    chunks: int
    early: bool = True  # let the next kernel start before this one has its input


class DotTiles(NamedTuple):
    """How a linear layer on the tensor cores is cut: rows of w a program, splits of H, length of a split's block."""

    outputs: int
    splits: int
    block: int
    warps: int
    early: bool = True


def row_tiles(rows: int, outputs: int, width: int, gated: bool) -> Tiles:
    """Tiles for one or two rows, the fastest of a sweep on an H200 (benchmarks/results/decode_kernels.json).

    A warp that reads four rows of w at once has enough bytes on the way; where w has few rows, more warps with one or
    two rows each fill the machine instead. A wide gated product reads four rows of both halves in small pieces: then
    fewer warps read x and the norm, which at these widths are a good part of the traffic.
    """
    pairs = min(128, triton.next_power_of_2(width // 2))
    whole = triton.cdiv(width // 2, pairs)
    if gated and whole > 8:
        return Tiles(4, 4, pairs, 1)
    if outputs > 4096 or (outputs == 4096 and whole <= 4) or gated:
        per_warp, chunks = 2 if gated or rows > 1 else 4, 4
    elif whole % 8 == 0:
        per_warp, chunks = 2, 8
    else:
        per_warp, chunks = 1, 12
    return Tiles(4, per_warp, pairs, min(chunks, whole))


def dot_tiles(outputs: int, width: int) -> DotTiles:
    """Tiles for up to 16 rows on the tensor cores, from the same sweep: about two programs a multiprocessor."""
    block = min(256 if width < 4096 else 128, triton.next_power_of_2(triton.cdiv(width, 4)))
    return DotTiles(8 if outputs <= 1024 else 16, 4, block, 4)


def prefers_rows(rows: int, outputs: int, width: int) -> bool:
    """Whether the kernel of fused multiply-adds beats the one on the tensor cores: one row, or two of a small w."""
    return rows == 1 or (rows == 2 and outputs * width <= 4096 * 1024)


if triton is not None:

    @triton.jit
    def unit_weights(w_ptr, row, outputs, unit, WIDTH: tl.constexpr, PAIRS: tl.constexpr, CHUNKS: tl.constexpr,
                     R: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr):  # fmt: skip
        """The weight tiles of one unit of CHUNKS chunks: those of R rows, with GATED also those of R rows of up."""
        first = unit * (CHUNKS * PAIRS)
        tiles = load_weights(w_ptr, row, outputs - 1, first, WIDTH, PAIRS, CHUNKS, R, EVEN)
        if GATED:
            up = w_ptr + outputs.to(tl.int64) * WIDTH
            tiles = tiles + load_weights(up, row, outputs - 1, first, WIDTH, PAIRS, CHUNKS, R, EVEN)
        return tiles

    @triton.jit
    def few_rows_kernel(
        x_ptr, norm_ptr, w_ptr, bias_ptr, residual_ptr, y_ptr, eps, outputs,
        WIDTH: tl.constexpr, T: tl.constexpr, WARPS: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr,
        CHUNKS: tl.constexpr, UNITS: tl.constexpr, GATED: tl.constexpr, NORM: tl.constexpr,
        HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """y [T, outputs] for few T; x, norm and w as int32 pairs, WIDTH pairs a row; H in UNITS pieces of CHUNKS."""
        EVEN: tl.constexpr = WIDTH % (PAIRS * CHUNKS) == 0
        RR: tl.constexpr = 2 * R if GATED else R
        if PDL and EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        outputs = outputs + tl.zeros((), tl.int32)  # a number that is 1 would be a constant, without methods
        warp = tl.arange(0, WARPS)[:, None, None]
        row = (tl.program_id(0) * WARPS + warp) * R
        tiles = unit_weights(w_ptr, row, outputs, 0, WIDTH, PAIRS, CHUNKS, R, EVEN, GATED)
        bias = load_beside(bias_ptr, row, 0, outputs, R, PAIRS, HAS_BIAS)
        up_bias = load_beside(
            bias_ptr + outputs if HAS_BIAS else bias_ptr, row, 0, outputs, R, PAIRS, HAS_BIAS and GATED
        )
        if UNITS == 1:
            if NORM:
                norm = load_row(norm_ptr, warp, 0, WIDTH, PAIRS, CHUNKS, EVEN)
            if PDL:
                tl.extra.cuda.gdc_wait()
            if PDL and not EARLY:
                tl.extra.cuda.gdc_launch_dependents()
            for t in tl.static_range(T):
                evens, odds = unpack_all(load_row(x_ptr + t * WIDTH, warp, 0, WIDTH, PAIRS, CHUNKS, EVEN), CHUNKS)
                residual = load_beside(residual_ptr, row, t, outputs, R, PAIRS, HAS_RESIDUAL)
                scale = 1.0
                if NORM:
                    scale = inverse_rms(evens, odds, eps, WIDTH, CHUNKS)
                    evens, odds = weigh_row(evens, odds, norm, CHUNKS)
                totals = multiply_add(zero_totals(WARPS, PAIRS, RR), tiles, evens, odds, 0, CHUNKS, RR)
                sums = row_sums(totals, scale, 0, R, WARPS, PAIRS)
                ups = row_sums(totals, scale, RR - R, R, WARPS, PAIRS)
                store_sums(sums, ups, bias, up_bias, residual, row, t, y_ptr, outputs, R, PAIRS, GATED, HAS_RESIDUAL)
        else:
            if PDL:
                tl.extra.cuda.gdc_wait()
            if PDL and not EARLY:
                tl.extra.cuda.gdc_launch_dependents()
            totals = zero_totals(WARPS, PAIRS, T * RR)
            squares = zero_totals(WARPS, PAIRS, T)
            for unit in range(UNITS):
                # The next unit's weights are under way while this one's are used; past the end the last is read again.
                new_tiles = unit_weights(
                    w_ptr, row, outputs, tl.minimum(unit + 1, UNITS - 1), WIDTH, PAIRS, CHUNKS, R, EVEN, GATED
                )
                first = unit * (CHUNKS * PAIRS)
                if NORM:
                    norm = load_row(norm_ptr, warp, first, WIDTH, PAIRS, CHUNKS, EVEN)
                new_totals = ()
                new_squares = ()
                for t in tl.static_range(T):
                    x = load_row(x_ptr + t * WIDTH, warp, first, WIDTH, PAIRS, CHUNKS, EVEN)
                    evens, odds = unpack_all(x, CHUNKS)
                    if NORM:
                        new_squares = new_squares + (add_squares(squares[t], evens, odds, CHUNKS),)
                        evens, odds = weigh_row(evens, odds, norm, CHUNKS)
                    else:
                        new_squares = new_squares + (squares[t],)
                    new_totals = new_totals + multiply_add(totals, tiles, evens, odds, t * RR, CHUNKS, RR)
                totals = new_totals
                squares = new_squares
                tiles = new_tiles
            for t in tl.static_range(T):
                residual = load_beside(residual_ptr, row, t, outputs, R, PAIRS, HAS_RESIDUAL)
                scale = 1.0
                if NORM:
                    scale = tl.rsqrt(tl.sum(squares[t], axis=2, keep_dims=True) / (2 * WIDTH) + eps)
                sums = row_sums(totals, scale, t * RR, R, WARPS, PAIRS)
                ups = row_sums(totals, scale, t * RR + RR - R, R, WARPS, PAIRS)
                store_sums(sums, ups, bias, up_bias, residual, row, t, y_ptr, outputs, R, PAIRS, GATED, HAS_RESIDUAL)

    @triton.jit(do_not_specialize=["rows"])
    def dot_kernel(
        x_ptr, norm_ptr, w_ptr, bias_ptr, residual_ptr, y_ptr, eps, outputs, rows,
        H: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, OUT: tl.constexpr,
        GATED: tl.constexpr, NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
        PDL: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """y [rows, outputs] for rows <= T = 16: a batched product over SPLITS pieces of each block of H, added last."""
        STEP: tl.constexpr = SPLITS * BLOCK
        STEPS: tl.constexpr = (H + STEP - 1) // STEP
        EVEN: tl.constexpr = H % STEP == 0
        if PDL and EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        out = tl.program_id(0) * OUT + tl.arange(0, OUT)
        safe = tl.minimum(out, outputs - 1).to(tl.int64)[None, :, None]
        k = tl.arange(0, SPLITS)[:, None, None] * BLOCK + tl.arange(0, BLOCK)[None, None, :]
        t = tl.arange(0, T)[None, :, None]
        w = _dot_weights(w_ptr, safe, k, H, EVEN)
        if GATED:
            w_up = _dot_weights(w_ptr, safe + outputs, k, H, EVEN)
        if PDL:
            tl.extra.cuda.gdc_wait()
        if PDL and not EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        rstd = tl.zeros((1, T, 1), tl.float32)
        if NORM:
            squares = tl.zeros((SPLITS, T, BLOCK), tl.float32)
            for step in range(STEPS):
                x = _dot_rows(x_ptr, t, k + step * STEP, rows, H, EVEN).to(tl.float32)
                squares += x * x
            rstd = tl.rsqrt(tl.sum(tl.sum(squares, axis=2), axis=0)[None, :, None] / H + eps)
        total = tl.zeros((SPLITS, T, OUT), tl.float32)
        total_up = tl.zeros((SPLITS, T, OUT), tl.float32)
        for step in range(STEPS):
            ahead = k + tl.minimum(step + 1, STEPS - 1) * STEP
            new_w = w
            if STEPS > 1:
                new_w = _dot_weights(w_ptr, safe, ahead, H, EVEN)
            x = _dot_rows(x_ptr, t, k + step * STEP, rows, H, EVEN)
            if NORM:
                at = k + step * STEP
                norm = tl.load(norm_ptr + at, mask=at < H, other=0.0)
                x = (rounded(x.to(tl.float32) * rstd) * norm.to(tl.float32)).to(tl.bfloat16)
            total = tl.dot(x, tl.permute(w, (0, 2, 1)), total)
            w = new_w
            if GATED:
                new_up = w_up
                if STEPS > 1:
                    new_up = _dot_weights(w_ptr, safe + outputs, ahead, H, EVEN)
                total_up = tl.dot(x, tl.permute(w_up, (0, 2, 1)), total_up)
                w_up = new_up
        y = tl.sum(total, axis=0)
        up = tl.sum(total_up, axis=0) if GATED else y
        _store_dot(y, up, out, rows, y_ptr, bias_ptr, residual_ptr, outputs, T, GATED, HAS_BIAS, HAS_RESIDUAL)

    @triton.jit
    def _dot_weights(w_ptr, row, k, H: tl.constexpr, EVEN: tl.constexpr):
        if EVEN:
            return tl.load(w_ptr + row * H + k, eviction_policy="evict_first")
        return tl.load(w_ptr + row * H + k, mask=(k < H) & (row >= 0), other=0.0, eviction_policy="evict_first")

    @triton.jit
    def _dot_rows(x_ptr, t, k, rows, H: tl.constexpr, EVEN: tl.constexpr):
        if EVEN:
            return tl.load(x_ptr + t * H + k, mask=t < rows, other=0.0, cache_modifier=".cg")
        return tl.load(x_ptr + t * H + k, mask=(t < rows) & (k < H), other=0.0, cache_modifier=".cg")

    @triton.jit
    def _store_dot(y, up, out, rows, y_ptr, bias_ptr, residual_ptr, outputs, T: tl.constexpr, GATED: tl.constexpr,
                   HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr):  # fmt: skip
        t = tl.arange(0, T)[:, None]
        inside = (t < rows) & (out < outputs)[None, :]
        if HAS_BIAS:
            y += tl.load(bias_ptr + out, mask=out < outputs, other=0.0).to(tl.float32)[None, :]
        y = rounded(y)
        if GATED:
            if HAS_BIAS:
                up += tl.load(bias_ptr + outputs + out, mask=out < outputs, other=0.0).to(tl.float32)[None, :]
            y = rounded(rounded(y / (1.0 + tl.exp(-y))) * rounded(up))
        at = t * outputs + out[None, :]
        if HAS_RESIDUAL:
            y += tl.load(residual_ptr + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        tl.store(y_ptr + at, y.to(tl.bfloat16), mask=inside)


def launch_linear(x, w, *, bias=None, residual=None, norm=None, eps=0.0, gated=False, tiles=None, pdl=None):
    """Runs the kernel that fits; tiles: a Tiles or DotTiles to use instead of the default choice.

    pdl: launch dependently (None: where the device can).
    """
    rows, width = x.shape
    outputs = w.shape[0] // 2 if gated else w.shape[0]
    x, y = in_pairs(x), x.new_empty(rows, outputs)
    norm, bias = None if norm is None else in_pairs(norm), None if bias is None else bias.contiguous()
    if tiles is None:
        fused = prefers_rows(rows, outputs, width)
        tiles = row_tiles(rows, outputs, width, gated) if fused else dot_tiles(outputs, width)
    flags = dict(
        GATED=gated, NORM=norm is not None, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        EARLY=tiles.early, num_warps=tiles.warps, **launch_options(x.device, pdl),
    )  # fmt: skip
    residual = None if residual is None else residual.contiguous()
    if isinstance(tiles, Tiles):
        units = triton.cdiv(width // 2, tiles.pairs * tiles.chunks)
        few_rows_kernel[(triton.cdiv(outputs, tiles.warps * tiles.rows),)](
            x.view(torch.int32), None if norm is None else norm.view(torch.int32), w.view(torch.int32), bias, residual,
            y, eps, outputs, WIDTH=width // 2, T=rows, WARPS=tiles.warps, R=tiles.rows, PAIRS=tiles.pairs,
            CHUNKS=tiles.chunks, UNITS=units, **flags,
        )  # fmt: skip
    else:
        dot_kernel[(triton.cdiv(outputs, tiles.outputs),)](
            x, norm, w, bias, residual, y, eps, outputs, rows, H=width, T=16, BLOCK=tiles.block, SPLITS=tiles.splits,
            OUT=tiles.outputs, **flags,
        )  # fmt: skip
    return y
