"""Checks and times the batch-1 decode kernels on a GPU: python benchmarks/decode_kernels.py --out decode.json

Times are medians of CUDA graph replays over weights that together exceed the L2 cache, each kernel waiting for the one
before as in a step. A share is of 4.24 TB/s. Parts: linear (every tile of a sweep, at the products of each shape),
attention (every way of dividing it), chain (whole layers with the default tiles, and how much each kernel alone takes).
Compiling for the sweeps takes most of the time: `--workers` processes do it beforehand.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "weights")]

from provenance import provenance  # noqa: E402
from timing import replay_seconds  # noqa: E402
from workloads import READ_BYTES_PER_S  # noqa: E402

from fnllm_kernels import decode_attention as attention  # noqa: E402
from fnllm_kernels import decode_linear as linear  # noqa: E402
from fnllm_kernels.decode_linear import Tiles, launch_linear  # noqa: E402
from fnllm_kernels.small_linear import linear_reference  # noqa: E402

BF16 = torch.bfloat16
CONTEXTS = (128, 384, 640, 1024)
EPS = 1e-6


class Shape(NamedTuple):
    """A model's sizes, or one rank's of two."""

    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int = 128

    def products(self) -> dict[str, tuple[int, int, bool]]:
        """(outputs, width, gated) of each product of a layer."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        return {
            "qkv": (qkv, self.hidden, False),
            "o": (self.hidden, self.heads * self.head_dim, False),
            "gate_up": (self.mlp, self.hidden, True),
            "down": (self.hidden, self.mlp, False),
        }


SHAPES = {
    "0.6b": Shape(28, 1024, 3072, 16, 8),
    "8b": Shape(36, 4096, 12288, 32, 8),
    "8b of two ranks": Shape(36, 4096, 6144, 16, 4),
}


def random(*shape, scale=1.0):
    return torch.empty(shape, dtype=BF16, device="cuda").normal_(0, scale)


def error_of(got, expected) -> float:
    got, expected = got.double(), expected.double()
    return float((got - expected).norm() / expected.norm())


def extras(name: str, shape: Shape) -> dict:
    """What comes with a product in the layer: norm before it, gate and up in one, or the residual added."""
    if name in ("qkv", "gate_up"):
        return dict(norm=random(shape.hidden, scale=0.1) + 1, eps=EPS, gated=name == "gate_up")
    return dict(residual=random(1, shape.hidden))


def tile_candidates(width: int, gated: bool) -> list[Tiles | None]:
    """None, the default, and the tiles whose weights fit in the registers, few enough to compile all."""
    found: list[Tiles | None] = [None]
    for warps in (2, 4, 8):
        for rows in (1, 2, 4):
            for chunks in (1, 2, 4, 8, 12, 16):
                held = chunks * rows * (2 if gated else 1)
                if width // 256 % chunks == 0 and 4 <= held <= 16:
                    found.append(Tiles(warps, rows, 128, chunks))
    return found


def attention_candidates(shape: Shape) -> list[dict]:
    """Query heads of a program, warps, keys of a tile, and least keys of a split."""
    group, found = shape.heads // shape.kv_heads, []
    for each in (1, 2, 4):
        for warps, keys in ((4, 64), (4, 32), (8, 64), (2, 32)):
            for least in (64, 128, 256):
                if each <= group and (each == 1 or warps == 4):
                    found.append(dict(each=each, warps=warps, keys=keys, least=least, splits=32))
    return [*found, *(dict(each=1, splits=splits) for splits in (8, 16, 32)), dict(each=1, splits=32, early=False)]


class Model:
    """Random weights and caches of a shape, and one sequence of some length."""

    def __init__(self, shape: Shape, layers: int, block_size: int = 128):
        torch.manual_seed(0)
        d, self.shape, self.size = shape.head_dim, shape, block_size
        self.layers = [
            {
                name: random(outputs * (2 if gated else 1), width, scale=width**-0.5)
                for name, (outputs, width, gated) in shape.products().items()
            }
            | {name: random(shape.hidden, scale=0.1) + 1 for name in ("input_norm", "post_norm")}
            | {name: random(d, scale=0.1) + 1 for name in ("q_norm", "k_norm")}
            for _ in range(layers)
        ]
        blocks = max(CONTEXTS) // block_size
        self.caches = [[random(blocks, block_size, shape.kv_heads, d) for _ in "kv"] for _ in range(layers)]
        self.table = torch.randperm(blocks, device="cuda").view(1, -1).int()
        self.token = random(1, shape.hidden)
        self.counters = torch.zeros(shape.heads, dtype=torch.int32, device="cuda")
        self.set_context(384)

    def set_context(self, context: int) -> None:
        angles = torch.rand(1, self.shape.head_dim // 2, device="cuda") * 6
        self.cos, self.sin = angles.cos(), angles.sin()
        self.lens = torch.full((1,), context, dtype=torch.int32, device="cuda")
        self.slots = self.table[:, (context - 1) // self.size].long() * self.size + (context - 1) % self.size

    def attend(self, qkv, index: int, how=attention.launch_decode_attention, caches=None, **options):
        p, (k, v) = self.layers[index], caches or self.caches[index]
        rest = () if how is attention.decode_attention_reference else (self.counters,)
        return how(
            qkv, p["q_norm"], p["k_norm"], EPS, self.cos, self.sin, k, v, self.table, self.lens, self.slots, *rest,
            self.shape.heads, self.shape.head_dim**-0.5, 0, **options,
        )  # fmt: skip

    def chain(self, product=launch_linear, how=attention.launch_decode_attention):
        h = self.token
        for index, p in enumerate(self.layers):
            qkv = product(h, p["qkv"], norm=p["input_norm"], eps=EPS)
            h = product(self.attend(qkv, index, how), p["o"], residual=h)
            act = product(h, p["gate_up"], norm=p["post_norm"], eps=EPS, gated=True)
            h = product(act, p["down"], residual=h)
        return h

    def nbytes(self) -> int:
        return sum(t.nbytes for p in self.layers for t in p.values())


def linear_jobs():
    """(shape's name, product, tiles, call on one weight) of every product of the sweep."""
    for label, shape in SHAPES.items():
        for name, (outputs, width, gated) in shape.products().items():
            rows = outputs * (2 if gated else 1)
            count = max(2, min(36, -(-400_000_000 // (2 * rows * width))))
            yield label, shape, name, rows, width, count, tile_candidates(width, gated)


def linear_part(report) -> None:
    for label, shape, name, rows, width, count, tiles in linear_jobs():
        weights = [random(rows, width, scale=width**-0.5) for _ in range(count)]
        x, more = random(1, width), extras(name, shape)
        exact = {k: v.double() if torch.is_tensor(v) else v for k, v in more.items()}
        wanted = linear_reference(x.double(), weights[0].double(), **exact)
        found = []
        for tile in tiles:
            run = lambda w, tile=tile: launch_linear(x, w, tiles=tile, **more)  # noqa: E731, B023
            seconds = replay_seconds(lambda run=run: [run(w) for w in weights]) / count  # noqa: B023
            found.append((round(seconds * 1e6, 2), "default" if tile is None else str(tuple(tile))))
            report(part="check", shape=label, product=name, tiles=found[-1][1], error=error_of(run(weights[0]), wanted))
        ideal = 2 * rows * width / READ_BYTES_PER_S * 1e6
        report(
            part="linear", shape=label, product=name, ideal_us=round(ideal, 2), default=found[0], best=sorted(found)[:6]
        )


def attention_part(report) -> None:
    for label, shape in SHAPES.items():
        model = Model(shape, min(28, shape.layers))
        qkv = random(1, shape.products()["qkv"][0])
        for options in attention_candidates(shape):
            copy = [c.clone() for c in model.caches[0]]
            wanted = model.attend(qkv, 0, attention.decode_attention_reference, copy)
            error, us = error_of(model.attend(qkv, 0, **options), wanted), {}
            for context in CONTEXTS:
                model.set_context(context)
                n = len(model.layers)
                work = lambda options=options, n=n: [model.attend(qkv, i, **options) for i in range(n)]  # noqa: E731, B023
                us[context] = round(replay_seconds(work) / n * 1e6, 2)
            model.set_context(384)
            report(part="attention", shape=label, **options, us=us, error=error)


def chain_part(report) -> None:
    for label, shape in SHAPES.items():
        small = Model(shape, 2)
        exact = small.chain(linear_reference, attention.decode_attention_reference)
        report(part="check", shape=label, chain="2 layers", error=error_of(small.chain(), exact))
        model = Model(shape, shape.layers)
        for context in CONTEXTS:
            model.set_context(context)
            seconds = replay_seconds(model.chain)
            us, share = seconds / shape.layers * 1e6, model.nbytes() / seconds / READ_BYTES_PER_S
            report(part="chain", shape=label, context=context, ms=seconds * 1e3, us_layer=us, share=share)


def warm(worker: int, workers: int) -> None:
    """Compile this worker's share of the sweeps' kernels into Triton's cache on the disk, and run nothing."""

    class CompileOnly(NamedTuple):
        kernel: object

        def __getitem__(self, grid):
            return lambda *args, **kwargs: self.kernel.warmup(*args, grid=grid, **kwargs)

    linear.few_rows_kernel = CompileOnly(linear.few_rows_kernel)
    attention.decode_attention_kernel = CompileOnly(attention.decode_attention_kernel)
    jobs = []
    for _, shape, name, rows, width, _, tiles in linear_jobs():
        w, x, more = torch.empty(rows, width, dtype=BF16, device="cuda"), random(1, width), extras(name, shape)
        jobs += [lambda x=x, w=w, t=t, more=more: launch_linear(x, w, tiles=t, **more) for t in tiles]
    for shape in SHAPES.values():
        model, qkv = Model(shape, 1), random(1, shape.products()["qkv"][0])
        jobs += [lambda m=model, q=qkv, o=o: m.attend(q, 0, **o) for o in attention_candidates(shape)]
    for job in jobs[worker::workers]:
        job()


PARTS = {"chain": chain_part, "attention": attention_part, "linear": linear_part}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("decode.json"))
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--workers", type=int, default=14, help="processes that compile beforehand")
    parser.add_argument("--warm", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.warm is not None:
        return warm(args.warm, args.workers)
    command = [sys.executable, __file__, "--workers", str(args.workers), "--warm"]
    began = time.time()
    for process in [subprocess.Popen([*command, str(i)]) for i in range(args.workers)]:
        process.wait()
    rows = [dict(part="compile", seconds=time.time() - began)]

    header = provenance()

    def report(**row) -> None:
        print(row, flush=True)
        rows.append(row)
        args.out.write_text(json.dumps(dict(header, rows=rows), indent=1) + "\n")  # kept as they come

    for part in args.parts.split(","):
        PARTS[part](report)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
