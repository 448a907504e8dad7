"""Times products of 1 to 8192 rows by tiles and by cuBLAS on a GPU: python benchmarks/linear_tiles.py --out tiles.json

Each product runs in a CUDA graph over weights that together exceed the L2 cache, with every tile that `tile_of` chooses
for some product here; gate and up in one kernel stand against cuBLAS and a kernel for SiLU. The floor is the time that
bytes need at 4.24 TB/s or arithmetic at 776 TFLOP/s. `chosen_us` is what `launch_tiled` does by itself, which for many
rows may be programs that go from tile to tile. `--sustained S` runs that and cuBLAS for so many seconds each and tells
their last tenth: long products of many rows draw all the power, and the clock falls.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from provenance import provenance
from timing import replay_seconds
from torch import Tensor
from torch.nn.functional import linear
from workloads import FLOPS_PER_S, READ_BYTES_PER_S

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "kernels")]

from fnllm_kernels.silu_mul import silu_mul  # noqa: E402
from fnllm_kernels.small_linear import small_linear  # noqa: E402
from fnllm_kernels.tiled_linear import Tile, launch_tiled, tile_of  # noqa: E402

PRODUCTS = {  # (rows of the weight, inputs, gated)
    "8b": ((6144, 4096, False), (4096, 4096, False), (24576, 4096, False), (24576, 4096, True), (4096, 12288, False)),
    "0.6b": ((4096, 1024, False), (1024, 2048, False), (6144, 1024, False), (6144, 1024, True), (1024, 3072, False)),
}
ROWS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 208, 224, 256, 512, 1024, 2048, 8192)
COLD_BYTES = 2.5e8  # several times the L2 cache


def outputs_of(weight_rows: int, gated: bool) -> int:
    return weight_rows // 2 if gated else weight_rows


def tiles(gated: bool) -> list[Tile]:
    """Every tile that some product here is given."""
    products = [p for size in PRODUCTS.values() for p in size if p[2] == gated]
    return sorted({tile_of(rows, outputs_of(p[0], gated), gated=gated) for p in products for rows in ROWS})


def candidates(rows: int, outputs: int, gated: bool) -> list[Tile]:
    """Tiles that are worth a try: neither far taller than the rows nor so large that a few programs do it all."""
    chosen = tile_of(rows, outputs, gated=gated)

    def worth_it(tile: Tile) -> bool:
        if rows > 256:
            return tile.rows >= 128
        programs = -(-rows // tile.rows) * outputs // tile.outputs
        tall = tile.rows >= 2 * max(rows, 16) and (outputs > 2048 or tile.rows > 64)
        return programs >= 48 and rows <= 4 * tile.rows and not tall

    return [tile for tile in tiles(gated) if tile == chosen or worth_it(tile)]


def sustained_us(work: Callable[[], object], seconds: float) -> float:
    """Microseconds of one call near the end of a run of so many seconds."""
    stream, began, times = torch.cuda.Stream(), time.perf_counter(), []
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = work()
    while time.perf_counter() - began < seconds:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 100)
    del kept
    last = sorted(times[-max(1, len(times) // 10) :])
    return last[len(last) // 2]


def measure(
    size: str, product: tuple[int, int, bool], rows: int, weights: list[Tensor], x: Tensor, seconds: float
) -> dict:
    """One product at one number of rows."""
    weight_rows, inputs, gated = product
    outputs = outputs_of(weight_rows, gated)
    some = weights if rows <= 256 else weights[:2]

    def cublas(w: Tensor) -> Tensor:
        return silu_mul(linear(x, w)) if gated else linear(x, w)

    def us(call: Callable[[Tensor], Tensor]) -> float:
        return round(replay_seconds(lambda: [call(w) for w in some], 5) * 1e6 / len(some), 2)

    wanted, found = cublas(some[0]).float(), {}
    first = None
    for tile in candidates(rows, outputs, gated):
        got = launch_tiled(x, some[0], gated=gated, tile=tile)
        first = got if first is None else first
        assert torch.equal(got, first), (product, rows, tile)
        found[tile] = us(lambda w, tile=tile: launch_tiled(x, w, gated=gated, tile=tile))
    assert first is not None and torch.equal(launch_tiled(x, some[0], gated=gated), first), (product, rows)
    chosen, best = tile_of(rows, outputs, gated=gated), min(found, key=found.__getitem__)
    floor = max(2 * weight_rows * inputs / READ_BYTES_PER_S, 2 * rows * weight_rows * inputs / FLOPS_PER_S) * 1e6
    row = dict(
        size=size, outputs=weight_rows, inputs=inputs, gated=gated, rows=rows, floor_us=round(floor, 2),
        cublas_us=us(cublas), default_us=us(lambda w: small_linear(x, w, gated=gated)), tile=chosen._asdict(),
        tile_us=found[chosen], chosen_us=us(lambda w: launch_tiled(x, w, gated=gated)),
        best=best._asdict(), best_us=found[best], tried=len(found),
        error_to_cublas=float((first.float() - wanted).norm() / wanted.norm()),
    )  # fmt: skip
    if seconds and rows in (64, 128, 256, 512, 2048, 8192):
        row["sustained_us"] = round(
            sustained_us(lambda: [launch_tiled(x, w, gated=gated) for w in some], seconds) / len(some), 2
        )
        row["sustained_cublas_us"] = round(sustained_us(lambda: [cublas(w) for w in some], seconds) / len(some), 2)
    return row


def compile_beforehand(workers: int) -> None:
    """Every tile once, in processes of their own: compiling takes most of the time."""
    command = [sys.executable, __file__, "--out", "/dev/null", "--compile"]
    started = [subprocess.Popen([*command, str(index), "--workers", str(workers)]) for index in range(workers)]
    if any(process.wait() for process in started):
        raise RuntimeError("a worker that compiles tiles failed; its traceback is above")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the rows")
    parser.add_argument("--sizes", nargs="+", default=list(PRODUCTS), choices=list(PRODUCTS))
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--sustained", type=float, default=0.0, metavar="S")
    parser.add_argument("--workers", type=int, default=8, help="processes that compile")
    parser.add_argument("--compile", type=int, metavar="INDEX", help="only compile, as one of the workers")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: products are timed on a GPU")
    if options.compile is not None:
        x, w = (torch.zeros(size, 256, dtype=torch.bfloat16, device="cuda") for size in (256, 512))
        for gated in (False, True):
            for tile in tiles(gated)[options.compile :: options.workers]:
                launch_tiled(x, w, gated=gated, tile=tile)
        return
    compile_beforehand(options.workers)
    header, rows = provenance(), []
    for size in options.sizes:
        for product in PRODUCTS[size]:
            count = max(2, int(COLD_BYTES / (2 * product[0] * product[1])))
            shape = product[:2]
            weights = [torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02) for _ in range(count)]
            x = torch.empty(max(options.rows), product[1], dtype=torch.bfloat16, device="cuda").normal_()
            for number in options.rows:
                rows.append(measure(size, product, number, weights, x[:number], options.sustained))
                print(json.dumps(rows[-1]), flush=True)
                options.out.write_text(json.dumps(header | {"rows": rows}, indent=1) + "\n")
            del weights


if __name__ == "__main__":
    main()
