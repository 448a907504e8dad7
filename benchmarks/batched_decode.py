"""Times a layer of a decode step of 2 to 256 sequences on a GPU: python benchmarks/batched_decode.py --out FILE

The chain of a layer's kernels runs in a CUDA graph over several layers' weights and caches, which together exceed the
L2 cache: with QK-norm, rotation and store as a kernel of their own ("apart") or inside attention ("fused"), launched
dependently (pdl true), not so, or as a step does it (null): all but large weights' products of more than 96 rows.
Products before a norm are made in halves where a compiled step does so. Each kernel is timed alone too, one call after
another. A share is of the least time that its bytes need at 4.24 TB/s or its arithmetic at 776 TFLOP/s, whichever is
longer. `--dry` runs a tiny shape in plain torch.
"""

import argparse
import functools
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "weights")]

from provenance import provenance  # noqa: E402
from timing import replay_seconds  # noqa: E402
from workloads import FLOPS_PER_S, READ_BYTES_PER_S  # noqa: E402
from workloads import SHAPES as MODELS  # noqa: E402

from fnllm_kernels import linear_add_norm, norm, qk_norm_rope_store, silu_mul, small_linear  # noqa: E402
from fnllm_kernels.attention_reference import paged_attention_reference  # noqa: E402
from fnllm_kernels.attention_triton import decode_attention_triton, triton_metadata  # noqa: E402
from fnllm_kernels.attention_triton_plan import runs_direct  # noqa: E402
from fnllm_kernels.qk_norm_rope_attention import (  # noqa: E402
    qk_norm_rope_attention_reference,
    qk_norm_rope_attention_triton,
)
from fnllm_kernels.tiled_linear import launch_tiled, launch_tiled_parts  # noqa: E402

EPS = 1e-6
BLOCK_SIZE = 128
LAYERS = 16  # in one graph
COLD_BYTES = 200e6  # of the weights that a graph goes through, several times the L2 cache


class Shape(NamedTuple):
    """A model's sizes, and how many layers' weights to go through."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int

    def products(self) -> dict[str, tuple[int, int]]:
        """(outputs, width) of each product of a layer."""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            "o": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.mlp, self.hidden),
            "down": (self.hidden, self.mlp),
        }

    def copies(self) -> int:
        nbytes = sum(2 * outputs * width for outputs, width in self.products().values())
        return max(2, min(8, round(COLD_BYTES / nbytes)))


NAMES = "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"
SHAPES = {size: Shape(*(fields[name] for name in NAMES)) for size, fields in MODELS.items()}
DRY_SHAPE = Shape(32, 4, 2, 8, 48)
ROWS, CONTEXTS = (2, 8, 32, 64, 128, 256), (256, 800)


class Kernels(NamedTuple):
    """The functions of a layer, launched one way; `before_norm` is the product, or its halves, for `add_norm`."""

    add_norm: Callable[..., tuple[Tensor, Tensor]]
    product: Callable[..., Tensor]
    before_norm: Callable[..., Tensor]
    store: Callable[..., Tensor]
    attend: Callable[..., Tensor]
    fused: Callable[..., Tensor]
    silu: Callable[..., Tensor]


def plain_product(x: Tensor, w: Tensor, gated: bool = False) -> Tensor:
    y = torch.nn.functional.linear(x, w)
    return silu_mul.silu_mul_reference(y) if gated else y


def kernel_of(x: Tensor, w: Tensor, *, gated: bool = False, before_norm: bool = False) -> str:
    """What a compiled step runs for a product."""
    if before_norm and (way := linear_add_norm.way_of(x, w)) != "whole":
        return way
    if small_linear.prefers_tiles(x, w, gated):
        return "tiles"
    return "few rows" if small_linear.takes(x, w) else "cuBLAS"


def kernels_of(device: str, pdl: bool | None) -> Kernels:
    """The Triton kernels and cuBLAS as a step chooses between them, or plain torch off the GPU."""
    if device == "cpu":
        attend = functools.partial(paged_attention_reference, max_seqlen_q=1)
        return Kernels(
            norm.add_rms_norm_reference, plain_product, plain_product, qk_norm_rope_store.qk_norm_rope_store_reference,
            lambda *args, metadata, **options: attend(*args, **options),
            qk_norm_rope_attention_reference, silu_mul.silu_mul_reference,
        )  # fmt: skip
    from fnllm_kernels.decode_linear import launch_linear

    def product(x: Tensor, w: Tensor, gated: bool = False) -> Tensor:
        kernel = kernel_of(x, w, gated=gated)
        if kernel == "tiles":
            return launch_tiled(x, w, gated=gated, pdl=pdl)
        if kernel == "few rows":
            return launch_linear(x, w, gated=gated, pdl=pdl)
        y = torch.nn.functional.linear(x, w)
        return silu_mul._silu_mul_triton(y, pdl=pdl) if gated else y

    def before_norm(x: Tensor, w: Tensor) -> Tensor:
        way = linear_add_norm.way_of(x, w)
        if way == "tiled halves":
            return launch_tiled_parts(x, w, 2, pdl=pdl)
        return linear_add_norm.cublas_halves(x, w) if way == "cuBLAS halves" else product(x, w)

    def launched(function: Callable) -> Callable:
        return functools.partial(function, pdl=pdl)

    return Kernels(
        launched(norm._norm_triton), product, before_norm, launched(qk_norm_rope_store._launch),
        launched(decode_attention_triton), launched(qk_norm_rope_attention_triton), launched(silu_mul._silu_mul_triton),
    )  # fmt: skip


class Model:
    """Random weights and caches of some layers of a shape; the same cache serves every number of rows."""

    def __init__(self, shape: Shape, device: str, most_keys: int):
        torch.manual_seed(0)
        self.shape, self.device = shape, device
        dtype = torch.float32 if device == "cpu" else torch.bfloat16

        def normal(*size: int, scale: float = 1.0) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device).normal_(0, scale)

        self.normal = normal
        self.layers = [
            {name: normal(*size, scale=size[1] ** -0.5) for name, size in shape.products().items()}
            | {name: 1 + normal(shape.hidden, scale=0.1) for name in ("input_norm", "post_norm")}
            | {name: 1 + normal(shape.head_dim, scale=0.1) for name in ("q_norm", "k_norm")}
            for _ in range(shape.copies())
        ]
        blocks = most_keys // BLOCK_SIZE
        size = blocks, BLOCK_SIZE, shape.kv_heads, shape.head_dim
        self.caches = [(normal(*size), normal(*size)) for _ in self.layers]
        self.order = torch.randperm(blocks, device=device).int()

    def weight_bytes(self) -> int:
        return sum(t.nbytes for t in self.layers[0].values())


class Step:
    """A decode step of `rows` sequences with `context` keys each, the new one included."""

    def __init__(self, model: Model, rows: int, context: int):
        self.model, shape, device = model, model.shape, model.device
        blocks = -(-context // BLOCK_SIZE)
        angles = torch.rand(rows, shape.head_dim // 2, device=device) * 6
        self.cos, self.sin = angles.cos(), angles.sin()
        self.tables = model.order[: rows * blocks].view(rows, blocks).contiguous()
        self.slots = self.tables[:, -1].long() * BLOCK_SIZE + (context - 1) % BLOCK_SIZE
        self.cu = torch.arange(rows + 1, device=device).int()
        self.lens = torch.full((rows,), context, device=device).int()
        self.x, self.residual = (model.normal(rows, shape.hidden) for _ in range(2))
        self.direct = runs_direct(rows, shape.kv_heads, context)
        plan = None
        if device == "cuda":
            plan = triton_metadata(self.lens, self.cu, shape.kv_heads, shape.head_dim, self.x.dtype, 0, context)
        self.options = dict(scale=shape.head_dim**-0.5, metadata=plan, max_context=context)

    def heads_of(self, qkv: Tensor, layer: int) -> tuple:
        p = self.model.layers[layer]
        return qkv, p["q_norm"], p["k_norm"], EPS, self.cos, self.sin, *self.model.caches[layer], self.slots

    def store(self, k: Kernels, qkv: Tensor, layer: int) -> Tensor:
        return k.store(*self.heads_of(qkv, layer), self.model.shape.heads, self.model.shape.kv_heads)

    def attend(self, k: Kernels, q: Tensor, layer: int) -> Tensor:
        return k.attend(q, *self.model.caches[layer], self.tables, self.cu, self.lens, **self.options)

    def fused(self, k: Kernels, qkv: Tensor, layer: int) -> Tensor:
        where = self.tables, self.cu, self.lens
        return k.fused(*self.heads_of(qkv, layer), *where, num_heads=self.model.shape.heads, **self.options)

    def chain(self, k: Kernels, fused: bool, layers: int) -> Tensor:
        x, residual = self.x, self.residual
        for index in range(layers):
            layer = index % len(self.model.layers)
            p = self.model.layers[layer]
            h, residual = k.add_norm(x, residual, p["input_norm"], EPS)
            qkv = k.product(h, p["qkv"])
            out = self.fused(k, qkv, layer) if fused else self.attend(k, self.store(k, qkv, layer), layer)
            h, residual = k.add_norm(k.before_norm(out.flatten(1), p["o"]), residual, p["post_norm"], EPS)
            x = k.before_norm(k.product(h, p["gate_up"], gated=True), p["down"])
        return x  # of the last layer perhaps in halves, which no norm adds

    def attention_bytes(self) -> int:
        s, rows = self.model.shape, self.x.shape[0]
        return 2 * rows * s.head_dim * (2 * s.kv_heads * int(self.lens[0]) + 2 * s.heads + 2 * s.kv_heads)


class Alone(NamedTuple):
    """One kernel by itself: a call over the weights or cache of a layer, and what it must move and compute."""

    name: str
    call: Callable[[int], object]
    nbytes: int
    flops: int = 0


def kernels_alone(step: Step, k: Kernels, *, with_products: bool) -> Iterator[Alone]:
    """Every kernel of the chain; those that do not depend on the context only where asked for."""
    model, shape, rows = step.model, step.model.shape, step.x.shape[0]
    qkv = model.normal(rows, shape.products()["qkv"][0])
    q = model.normal(rows, shape.heads, shape.head_dim)
    yield Alone("attention", lambda i: step.attend(k, q, i), step.attention_bytes())
    yield Alone("fused attention", lambda i: step.fused(k, qkv, i), step.attention_bytes())
    if not with_products:
        return
    gate_up = model.normal(rows, 2 * shape.mlp)
    yield Alone("qk_norm_rope_store", lambda i: step.store(k, qkv, i), 4 * qkv.numel())
    norm_of = lambda i: k.add_norm(step.x, step.residual, model.layers[i]["input_norm"], EPS)  # noqa: E731
    yield Alone("add_rms_norm", norm_of, 8 * step.x.numel())
    yield Alone("silu_mul", lambda i: k.silu(gate_up), 3 * gate_up.numel())
    for name, (outputs, width) in shape.products().items():
        x = model.normal(rows, width)
        gated, normed = name == "gate_up", name in ("o", "down")
        make = k.before_norm if normed else functools.partial(k.product, gated=gated)
        call = lambda i, name=name, x=x, make=make: make(x, model.layers[i][name])  # noqa: E731
        kernel = kernel_of(x, model.layers[0][name], gated=gated, before_norm=normed)
        moved = 2 * (outputs * width + rows * (outputs + width))
        yield Alone(f"{name} by {kernel}", call, moved, 2 * rows * outputs * width)


def time_us(work: Callable[[], object], device: str) -> tuple[float, object]:
    """(median microseconds of one replay of a graph of `work`, what it gave); off the GPU of one call."""
    if device == "cpu":
        began = time.perf_counter()
        found = work()
        return (time.perf_counter() - began) * 1e6, found
    found = work()
    kept = found.clone() if isinstance(found, Tensor) else None
    return replay_seconds(work) * 1e6, kept


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def measure(size: str, model: Model, rows: int, context: int, layers: int, report: Callable[..., None]) -> None:
    """The chains and the kernels of one shape, number of rows and context."""
    step, device = Step(model, rows, context), model.device
    where = dict(shape=size, rows=rows, context=context)
    floor = (model.weight_bytes() + step.attention_bytes()) / READ_BYTES_PER_S * 1e6
    products = sum(2 * rows * outputs * width for outputs, width in model.shape.products().values())
    floor = max(floor, products / FLOPS_PER_S * 1e6)
    first: dict[str, Tensor] = {}
    for fused, pdl in itertools.product((False, True), (False, True, None)):
        name, k = "fused" if fused else "apart", kernels_of(device, pdl)
        us, found = time_us(lambda k=k, fused=fused: step.chain(k, fused, layers), device)
        us = us / layers
        assert isinstance(found, Tensor)
        before = first.setdefault(name, found)
        report(
            part="chain", **where, chain=name, pdl=pdl, us_layer=round(us, 3), floor_us=round(floor, 3),
            share=round(floor / us, 4), divided=not step.direct,
            same_bits_without_pdl=torch.equal(found, before), error_to_apart=relative_error(found, first["apart"]),
        )  # fmt: skip
    for pdl in (False, True):
        with_products = context == CONTEXTS[0] or device == "cpu"
        for alone in kernels_alone(step, kernels_of(device, pdl), with_products=with_products):
            if pdl and "cuBLAS" in alone.name:
                continue
            count = len(model.layers)
            us, _ = time_us(lambda alone=alone: [alone.call(i % count) for i in range(LAYERS)], device)  # noqa: B023
            us, floor = us / LAYERS, max(alone.nbytes / READ_BYTES_PER_S, alone.flops / FLOPS_PER_S) * 1e6
            report(
                part="kernel", **where, kernel=alone.name, pdl=pdl, us=round(us, 3), floor_us=round(floor, 3),
                share=round(floor / us, 4),
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the rows")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS)
    parser.add_argument("--dry", action="store_true", help="a tiny shape in plain torch on the CPU")
    options = parser.parse_args()
    if not options.dry and not torch.cuda.is_available():
        parser.error("no CUDA device: the kernels are timed on a GPU; try --dry")
    device, began, rows = "cpu" if options.dry else "cuda", time.time(), []
    header = provenance()
    shapes = {"dry": DRY_SHAPE} if options.dry else {size: SHAPES[size] for size in options.shapes}

    def report(**row: object) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        options.out.write_text(json.dumps(header | {"rows": rows}, indent=1) + "\n")  # kept as they come

    for size, shape in shapes.items():
        most = max(options.rows) * max(-(-context // BLOCK_SIZE) for context in options.contexts) * BLOCK_SIZE
        model = Model(shape, device, most)
        for count, context in itertools.product(options.rows, options.contexts):
            measure(size, model, count, context, 2 if options.dry else LAYERS, report)
        del model
    report(part="end", seconds=round(time.time() - began, 1))


if __name__ == "__main__":
    main()
