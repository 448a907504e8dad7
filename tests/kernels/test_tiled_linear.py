"""Products by tiles: by Triton's interpreter on the CPU with either way of fetching, and bit for bit on a GPU."""

import sys
from pathlib import Path

import pytest
import torch
from gpu_cases import captured
from interpreted import INTERPRETING, interpreted_tests
from kernel_cases import check_product, product_case, relative_error

from fnllm_kernels.silu_mul import silu_mul

pytest.importorskip("triton")
if INTERPRETING:
    sys.path.append(str(Path(__file__).parent))
    import decode_interpreter  # noqa: F401  multiplies and rounds bfloat16 as a GPU does

from fnllm_kernels import tiled_linear
from fnllm_kernels.linear_add_norm import PRODUCTS, linear_add_rms_norm
from fnllm_kernels.persistent_linear import keeps_busy, launch_persistent
from fnllm_kernels.tiled_linear import (
    H200,
    SMALL_WEIGHT,
    Limits,
    Tile,
    dependence,
    launch_tiled,
    launch_tiled_parts,
    limits_of,
    parts_tile,
    tile_of,
)

SHAPES = [(3, 104, 40), (70, 48, 72), (1, 704, 16), (65, 200, 136), (33, 64, 96)]


def check_parts(found, x, w, deep, relative=1e-6):
    """Each part is the product of its whole tiles of so many inputs, in float32, and zeros where it has none."""
    count = found.shape[0]
    assert found.dtype == torch.float32 and found.shape == (count, x.shape[0], w.shape[0])
    tiles = -(-x.shape[1] // deep)
    size = deep * -(-tiles // count)
    for part, index in zip(found, range(count), strict=True):
        inputs = slice(index * size, (index + 1) * size)
        a, b = x[:, inputs], w[:, inputs]
        if a.shape[1]:
            assert relative_error(part, (a.double() @ b.double().T).cpu()) < relative, index
        else:
            assert (part == 0).all(), index
    assert relative_error(found.sum(0), (x.double() @ w.double().T).cpu()) < relative


if not INTERPRETING:

    def test_kernels_in_the_interpreter():
        interpreted_tests(__file__)

    @pytest.mark.parametrize("limits", [H200, Limits(108, 166912), Limits(82, 101376)], ids=str)
    @pytest.mark.parametrize("gated", [False, True])
    @pytest.mark.parametrize("itemsize", [2, 4])
    def test_tiles_fit_the_machine(limits, gated, itemsize):
        for rows in (1, 2, 16, 17, 32, 33, 63, 64, 65, 100, 128, 200, 256, 257, 1024, 8192):
            for outputs in (1, 16, 100, 1024, 4096, 6144, 24576, 151936):
                tile = tile_of(rows, outputs, gated=gated, itemsize=itemsize, limits=limits)
                held = itemsize * tile.inputs * tile.stages * (tile.rows + tile.outputs * (1 + gated))
                assert held <= limits.shared, (rows, outputs, tile)
                assert tile.stages >= 2 and min(tile.rows, tile.outputs) >= 16
                assert tile.rows * tile.outputs * (1 + gated) <= 32768  # sums in registers

    @pytest.mark.parametrize("limits", [H200, Limits(108, 166912), Limits(82, 101376)], ids=str)
    def test_tiles_of_parts_all_run_at_once(limits):
        found = {
            (rows, outputs): parts_tile(rows, outputs, 2, limits)
            for rows in (1, 16, 17, 33, 65, 96, 128, 129, 256)
            for outputs in (16, 576, 896, 1024, 1536, 2048, 2560, 4096, 5120)
        }
        for (rows, outputs), tile in found.items():
            if tile:
                held = 2 * tile.inputs * tile.stages * (tile.rows + tile.outputs)
                assert held <= limits.shared and tile.stages >= 2, (rows, outputs, tile)
                assert 2 * -(-rows // tile.rows) * -(-outputs // tile.outputs) <= limits.multiprocessors
        assert None in found.values() and len({tile.rows for tile in found.values() if tile}) == 3

    def test_tiles_of_halves_are_those_that_were_fastest():
        """Rows of tiles by rows of the product, for the widths of models; None: whole products were as fast."""
        fastest = {
            896: {24: 16, 64: 16, 96: 32, 128: 32},
            1024: {24: 16, 64: 16, 96: 32, 128: 32},
            1536: {24: 16, 32: 16, 48: 32, 64: 32, 96: 64, 128: 64},
            2048: {2: 16, 16: 16, 48: 32, 64: 32, 96: 64, 128: 64},
            2560: {2: 16, 16: 16, 24: 32, 32: 32, 48: 64, 64: 64, 96: None, 128: None},
            4096: {2: 16, 16: 16, 24: 32, 32: 32, 64: None, 96: None},
        }
        for outputs, of_rows in fastest.items():
            tiles = {rows: parts_tile(rows, outputs, 2) for rows in of_rows}
            assert {rows: tile and tile.rows for rows, tile in tiles.items()} == of_rows, outputs

    @pytest.mark.parametrize(
        "rows, numbers, launch",
        [
            (1, SMALL_WEIGHT, (True, False)),
            (16, SMALL_WEIGHT, (True, False)),
            (17, SMALL_WEIGHT, (True, True)),
            (8192, SMALL_WEIGHT, (True, True)),
            (1, SMALL_WEIGHT + 1, (True, False)),
            (96, SMALL_WEIGHT + 1, (True, False)),
            (97, SMALL_WEIGHT + 1, (False, False)),
        ],
    )
    def test_large_weights_let_no_kernel_in_early(rows, numbers, launch):
        assert dependence(rows, numbers) == launch

    @pytest.mark.parametrize("large", [False, True])
    @pytest.mark.parametrize("rows", [16, 17, 96, 97])
    def test_a_launch_depends_as_said(rows, large, monkeypatch):
        options = []

        class Kernel:
            def __getitem__(self, grid):
                return lambda *operands, **given: options.append((given["PDL"], given["EARLY"]))

        monkeypatch.setattr(tiled_linear, "tiled_linear_kernel", Kernel())
        monkeypatch.setattr(tiled_linear, "launch_options", lambda device, pdl: {"PDL": pdl})
        monkeypatch.setattr(tiled_linear, "SMALL_WEIGHT", 127 if large else 128)
        x, w = torch.zeros(rows, 16), torch.zeros(8, 16)
        launch_tiled(x, w)
        launch_tiled_parts(x, w, 2)
        launch_tiled(x, w, pdl=True, early=True)
        launch_tiled(x, w, pdl=False, early=False)
        chosen = (False if large and rows > 96 else None, not large and rows > 16)  # None: where the device can
        assert options == [chosen, chosen, (True, True), (False, False)]

    def test_programs_that_stay_have_something_to_do():
        for rows, outputs in ((512, 12288), (1024, 3072), (8192, 4096), (640, 256), (100_000, 25_600)):
            for gated in (False, True):
                tiles = -(-rows // 128) * -(-outputs // (128 if gated else 256))
                even = tiles / (100 * -(-tiles // 100)) >= 0.8
                assert keeps_busy(rows, outputs, gated, 100, 232448) == even, (rows, outputs, gated)
        assert keeps_busy(512, 12288, True, *H200) and not keeps_busy(511, 12288, True, *H200)
        assert not keeps_busy(512, 12288, True, 132, 166912)  # memory of an A100
        assert keeps_busy(512, 1024, False, 16, 232448) and not keeps_busy(512, 1028, False, 16, 232448)  # rows of 16 B

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("rows, inputs, outputs", [(1000, 1024, 6144), (512, 4096, 24576), (2050, 200, 1040)])
    def test_programs_that_stay_have_the_bits_of_those_that_end(rows, inputs, outputs, dtype):
        x, w = product_case(rows, inputs, outputs, dtype, "cuda")
        for gated in (False, True):
            found = launch_persistent(x, w, gated=gated, programs=132)
            by_tiles = torch.cat([launch_tiled(part, w, gated=gated) for part in x.split(100)])
            assert torch.equal(found, by_tiles), gated

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype, relative", [(torch.bfloat16, 6e-3), (torch.float16, 1e-3)], ids=str)
    @pytest.mark.parametrize("inputs, outputs", [(1024, 6144), (3072, 1024), (4096, 4096), (200, 1000)])
    def test_bits_depend_on_neither_tile_nor_rows_nor_loads(inputs, outputs, dtype, relative):
        x, w = product_case(300, inputs, outputs, dtype, "cuda")
        whole = launch_tiled(x, w)
        check_product(whole, x, w, relative)
        for first, last in ((0, 1), (3, 9), (5, 29), (17, 65), (0, 128), (100, 260), (44, 300)):
            assert torch.equal(launch_tiled(x[first:last], w), whole[first:last]), (first, last)
        shapes = (16, 16, 256, 4, 3), (64, 128, 64, 4, 4), (128, 64, 128, 4, 3), (16, 64, 64, 4, 4)
        for tile in (Tile(*shape) for shape in shapes):
            for tma in (False, True):
                assert torch.equal(launch_tiled(x, w, tile=tile, tma=tma), whole), (tile, tma)

    @pytest.mark.gpu
    @pytest.mark.parametrize("rows", [17, 31, 64, 65, 128])
    @pytest.mark.parametrize("inputs, outputs", [(2048, 1024), (3072, 1024), (2056, 1000), (264, 72)])
    def test_parts_on_a_gpu(inputs, outputs, rows, unwritten_is_nan):
        x, w = product_case(rows, inputs, outputs, torch.bfloat16, "cuda")
        for parts in (1, 2, 3):
            tile = parts_tile(rows, outputs, parts, limits_of(x.device))
            found = launch_tiled_parts(x, w, parts)
            check_parts(found, x, w, tile.inputs, 3e-5)  # tensor cores do not round sums to the nearest float32
            assert torch.equal(launch_tiled_parts(x, w, parts, tma=False, pdl=False), found)

    @pytest.mark.gpu
    @pytest.mark.parametrize("rows", [2, 16, 64, 96, 97])
    def test_large_weights_one_behind_the_other_in_a_graph(rows):
        x, w = product_case(rows, 4096, 4096, torch.bfloat16, "cuda")
        assert w.numel() > SMALL_WEIGHT

        def chain(pdl):
            y = x
            for _ in range(6):
                y = launch_tiled(y, w, pdl=pdl)
            return y

        graph, found = captured(lambda: chain(None))
        graph.replay()
        assert torch.equal(found, chain(False))

    @pytest.mark.gpu
    @pytest.mark.parametrize("inputs", [2048, 2056, 3072])
    def test_one_part_has_the_bits_of_the_product(inputs):
        x, w = product_case(48, inputs, 1024, torch.bfloat16, "cuda")
        assert torch.equal(launch_tiled_parts(x, w, 1)[0].bfloat16(), launch_tiled(x, w))

    @pytest.mark.gpu
    @pytest.mark.parametrize("rows", [1, 16, 24, 48, 64, 96, 128, 200, 256, 300])
    @pytest.mark.parametrize("inputs, outputs", [(1024, 6144), (200, 1008), (4096, 24576)])
    def test_gated_has_the_bits_of_a_product_and_a_silu(rows, inputs, outputs):
        x, w = product_case(rows, inputs, outputs, torch.bfloat16, "cuda")
        assert torch.equal(launch_tiled(x, w, gated=True), silu_mul(launch_tiled(x, w)))

else:
    DTYPES = [(torch.float32, 1e-5), (torch.float16, 1e-3), (torch.bfloat16, 6e-3)]

    @pytest.mark.parametrize("tma", [False, True])
    @pytest.mark.parametrize("dtype, relative", DTYPES, ids=str)
    @pytest.mark.parametrize("rows, inputs, outputs", SHAPES)
    def test_product(rows, inputs, outputs, dtype, relative, tma):
        x, w = product_case(rows, inputs, outputs, dtype, "cpu")
        check_product(launch_tiled(x, w, tma=tma), x, w, relative)

    @pytest.mark.parametrize("tma", [False, True])
    @pytest.mark.parametrize("tile", [Tile(16, 16, 64, 4, 2), Tile(16, 64, 32, 4, 2), Tile(64, 32, 128, 4, 2)], ids=str)
    @pytest.mark.parametrize("rows, inputs, outputs", [(3, 104, 40), (40, 136, 72)])
    def test_gated(rows, inputs, outputs, tile, tma):
        x, w = product_case(rows, inputs, outputs, torch.bfloat16, "cpu")
        gate, up = (x.double() @ w.double().T).chunk(2, -1)
        found = launch_tiled(x, w, gated=True, tile=tile, tma=tma)
        torch.testing.assert_close(found.double(), torch.nn.functional.silu(gate) * up, rtol=0.03, atol=0.01)

    @pytest.mark.parametrize("tma", [False, True])
    @pytest.mark.parametrize(
        "tile, parts", [(Tile(16, 64, 32, 4, 2), 3), (Tile(32, 64, 64, 4, 2), 2), (Tile(64, 32, 128, 4, 2), 5)], ids=str
    )
    @pytest.mark.parametrize("rows, inputs, outputs", [(3, 104, 40), (70, 320, 72), (33, 24, 136)])
    def test_parts(rows, inputs, outputs, tile, parts, tma, unwritten_is_nan):
        """Some parts have a shorter last tile, some none."""
        x, w = product_case(rows, inputs, outputs, torch.bfloat16, "cpu")
        check_parts(launch_tiled_parts(x, w, parts, tile=tile, tma=tma), x, w, tile.inputs)

    @pytest.mark.parametrize("rows, inputs, outputs", SHAPES[:3])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_parts_by_the_tile_that_is_chosen(rows, inputs, outputs, dtype, unwritten_is_nan):
        x, w = product_case(rows, inputs, outputs, dtype, "cpu")
        in_parts = parts_tile(rows, outputs, 2) if dtype == torch.bfloat16 else None
        tile = in_parts or tile_of(rows, outputs, itemsize=dtype.itemsize)
        check_parts(launch_tiled_parts(x, w, 2), x, w, tile.inputs)
        one = launch_tiled_parts(x, w, 1, tile=tile)
        assert torch.equal(one[0].to(dtype), launch_tiled(x, w, tile=tile))

    def test_halves_whose_sum_is_normed(monkeypatch, unwritten_is_nan):
        (x, w), residual = product_case(20, 300, 40, torch.bfloat16, "cpu"), torch.randn(20, 40).bfloat16()
        halves = PRODUCTS["tiled halves"](x, w)
        check_parts(halves, x, w, 256)
        monkeypatch.setattr("fnllm_kernels.linear_add_norm.way_of", lambda x, w: "tiled halves")
        _, total = linear_add_rms_norm(x, w, residual, torch.ones(40).bfloat16(), 1e-5)
        assert torch.equal(total, (halves[0] + halves[1]).bfloat16() + residual)

    @pytest.mark.parametrize("rows, inputs, outputs", [(128, 64, 256), (200, 136, 272), (300, 40, 528)])
    def test_programs_that_stay(rows, inputs, outputs):
        x, w = product_case(rows, inputs, outputs, torch.bfloat16, "cpu")
        for programs in (1, 2, 50):
            check_product(launch_persistent(x, w, programs=programs), x, w, 6e-3)
        gate, up = (x.double() @ w.double().T).chunk(2, -1)
        found = launch_persistent(x, w, gated=True, programs=3)
        torch.testing.assert_close(found.double(), torch.nn.functional.silu(gate) * up, rtol=0.03, atol=0.01)

    def test_programs_that_stay_are_for_16_bit_numbers(monkeypatch):
        """They would round float32 operands, need twice the memory that a multiprocessor has, and know of no parts."""
        called = []
        monkeypatch.setattr("fnllm_kernels.tiled_linear.keeps_busy", lambda *a: True)
        monkeypatch.setattr("fnllm_kernels.tiled_linear.launch_persistent", lambda *a, **k: called.append(a[0].dtype))
        x, w = product_case(33, 64, 96, torch.float32, "cpu")
        check_product(launch_tiled(x, w, tma=True), x, w, 1e-5)
        launch_tiled(x.half(), w.half(), tma=True)
        assert called == [torch.float16]
        check_parts(launch_tiled_parts(x.half(), w.half(), 2, tma=True), x.half(), w.half(), 256)
        assert len(called) == 1

    def test_rows_that_do_not_follow_each_other_and_none():
        x, w = product_case(5, 32, 16, torch.float32, "cpu")
        wide = torch.zeros(5, 64)
        wide[:, ::2] = x
        assert torch.equal(launch_tiled(wide[:, ::2], w), launch_tiled(x, w))
        assert launch_tiled(x[:0], w).shape == (0, 16)
        assert torch.equal(launch_tiled_parts(wide[:, ::2], w, 2), launch_tiled_parts(x, w, 2))
        assert launch_tiled_parts(x[:0], w, 2).shape == (2, 0, 16)
