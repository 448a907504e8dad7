"""Checks and times the batch-1 decode kernels on a GPU: python benchmarks/decode_kernels.py --out decode.json

Each part runs in a process of its own with a time limit, so that a failing or hanging kernel costs only its part. Times
are medians of CUDA graph replays over weights that together exceed the L2 cache. A share is of 4.24 TB/s.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "kernels")]
os.environ.setdefault("TRITON_CACHE_DIR", "/tmp/fnllm_triton_cache")

from fnllm_kernels import decode_attention as attention  # noqa: E402
from fnllm_kernels import decode_linear as linear  # noqa: E402
from fnllm_kernels import decode_step as step  # noqa: E402
from fnllm_kernels import decode_step_kernel as step_kernel  # noqa: E402
from fnllm_kernels.decode_linear import DotTiles, Tiles, launch_linear  # noqa: E402
from fnllm_kernels.small_linear import linear_reference  # noqa: E402

PEAK = 4.24e12  # bytes a second, measured read bandwidth of an H200
BF16 = torch.bfloat16
SMALL = step.StepShape(1024, 3072, 16, 8, 128, 64, 1e-6, True, False)
LARGE = step.StepShape(4096, 12288, 32, 8, 128, 64, 1e-6, True, False)
RESULTS: list[Path] = []  # where this process's results go


def report(part: str, name: str, **values) -> None:
    if RESULTS:  # a line at once: a part that is stopped at its limit keeps what it had
        with RESULTS[0].open("a") as file:
            file.write(json.dumps({"part": part, "name": name, **values}) + "\n")
    shown = "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items())
    print(f"{part:9} {name:58} {shown}", flush=True)


def attempt(part: str, name: str, work):
    try:
        return work()
    except Exception as error:  # one failing case must not end the run
        lines = str(error).strip().splitlines() or [""]
        report(part, name, error=f"{type(error).__name__}: {lines[-1][:160]}")
        return None


def random(*shape, scale=1.0):
    return torch.empty(shape, dtype=BF16, device="cuda").normal_(0, scale)


def error_of(got, expected) -> float:
    got, expected = got.double(), expected.double()
    return float((got - expected).norm() / expected.norm())


def graph_time(work, replays=15) -> float:
    """Median seconds of one replay of a graph of work()."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            kept = work()
        times = []
        for _ in range(replays):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
    del kept
    return statistics.median(times[3:])


def linear_candidates(rows: int, outputs: int, width: int):
    chunks = width // 256
    if rows <= 4:
        whole = {4: [(4, 1, 4), (4, 2, 4), (4, 4, 4), (8, 2, 4)], 8: [(4, 1, 8), (8, 1, 8), (4, 2, 8), (4, 2, 4)],
                 12: [(4, 1, 12), (8, 1, 12), (2, 1, 12), (4, 1, 6)],
                 16: [(4, 1, 16), (4, 2, 8), (4, 4, 4), (8, 2, 8), (4, 4, 2)],
                 48: [(4, 2, 8), (4, 4, 4), (4, 1, 12), (8, 2, 8)]}[chunks]  # fmt: skip
        if rows > 1:
            whole = whole[:1]
        tiles = [Tiles(w, r, 128, c) for w, r, c in whole]
        if rows == 1 and outputs == 4096 and width == 1024:
            tiles.append(tiles[1]._replace(early=False))
        if rows >= 2:
            tiles.append(DotTiles(8 if outputs <= 1024 else 16, 4, 128, 4))
        return tiles
    small = outputs <= 1024
    return [DotTiles(8 if small else 16, 4, 128, 4), DotTiles(8 if small else 16, 4, 256, 4),
            DotTiles(16 if small else 32, 4, 128, 4)]  # fmt: skip


LINEARS = ((6144, 1024), (4096, 1024), (1024, 2048), (1024, 3072), (24576, 4096), (6144, 4096), (4096, 4096),
           (4096, 12288), (151936, 1024))  # fmt: skip


def linear_part() -> None:
    for rows, outputs, width, tiles, options in (
        (1, 6144, 1024, None, {"norm": 1, "gated": True}), (1, 4096, 1024, None, {"norm": 1}),
        (1, 1024, 3072, None, {"residual": 1}), (3, 24576, 4096, None, {"norm": 1, "gated": True}),
        (4, 4096, 12288, None, {"residual": 1}), (2, 1000, 1024, None, {"norm": 1, "bias": 1}),
        (5, 1024, 3072, None, {"residual": 1}), (16, 6144, 4096, None, {"norm": 1, "bias": 1}),
        (13, 6144, 1024, None, {"norm": 1, "gated": True}), (1, 151936, 1024, None, {"norm": 1}),
    ):  # fmt: skip
        name = f"{rows} x {outputs} x {width} {'+'.join(options)}"

        def check(rows=rows, outputs=outputs, width=width, tiles=tiles, options=options, name=name):
            gated = bool(options.get("gated"))
            x, w = random(rows, width), random(outputs, width, scale=width**-0.5)
            extra = {"gated": gated, "eps": 1e-6}
            if "norm" in options:
                extra["norm"] = random(width)
            if "bias" in options:
                extra["bias"] = random(outputs)
            if "residual" in options:
                extra["residual"] = random(rows, outputs)
            wide = {k: v.double() if torch.is_tensor(v) else v for k, v in extra.items()}
            exact = linear_reference(x.double(), w.double(), **wide)
            report("check", f"linear {name}", error=error_of(launch_linear(x, w, **extra), exact),
                   plain=error_of(linear_reference(x, w, **extra), exact))  # fmt: skip

        attempt("check", name, check)
    cases = [(o, h, t) for o, h in LINEARS for t in (1, 2, 4, 8, 16)]
    weights = {
        (o, h): [random(o, h, scale=h**-0.5) for _ in range(max(1, min(28, -(-400_000_000 // (2 * o * h)))))]
        for o, h in LINEARS
    }
    inputs = {(h, t): random(t, h) for _, h in LINEARS for t in (1, 2, 4, 8, 16)}
    for o, h, t in cases:
        ws, x = weights[o, h], inputs[h, t]
        plain = attempt(
            "linear",
            f"{o}x{h}",
            lambda ws=ws, x=x: graph_time(lambda: [torch.nn.functional.linear(x, w) for w in ws]) / len(ws),
        )
        found = []
        for tiles in linear_candidates(t, o, h):
            seconds = attempt(
                "linear", f"{t} x {o} x {h} {tuple(tiles)}",
                lambda ws=ws, x=x, tiles=tiles: graph_time(lambda: [launch_linear(x, w, tiles=tiles) for w in ws]) / len(ws),
            )  # fmt: skip
            if seconds:
                found.append((seconds, tiles))
        if found and plain:
            seconds, best = min(found)
            report("linear", f"{t} x {o} x {h}", us=seconds * 1e6, share=2 * o * h / seconds / PEAK, cublas_us=plain * 1e6,
                   cublas_share=2 * o * h / plain / PEAK, best=str(tuple(best)),
                   all=" ".join(f"{s * 1e6:.2f}" for s, _ in found))  # fmt: skip


class Model:
    """Random weights and caches of a shape, and rows of one length."""

    def __init__(self, shape, layers: int, rows: int, context: int, seed=0):
        torch.manual_seed(seed)
        n, k, d = shape.heads, shape.kv_heads, shape.head_dim
        h, i, s = shape.hidden, shape.mlp, shape.block_size
        self.shape, self.rows, self.k = shape, rows, k
        self.layers = [
            {"input_norm": random(h, scale=0.1) + 1, "qkv": random((n + 2 * k) * d, h, scale=h**-0.5), "q_norm": random(d, scale=0.1) + 1,
             "k_norm": random(d, scale=0.1) + 1, "o": random(h, n * d, scale=(n * d) ** -0.5), "post_norm": random(h, scale=0.1) + 1,
             "gate_up": random(2 * i, h, scale=h**-0.5), "down": random(h, i, scale=i**-0.5)}
            for _ in range(layers)
        ]  # fmt: skip
        self.most = 1024
        blocks = rows * self.most // s
        self.caches = [(random(blocks, s, k, d), random(blocks, s, k, d)) for _ in range(layers)]
        self.tables = torch.randperm(blocks, device="cuda").view(rows, -1).int()
        self.embed = random(4096, h)
        self.token = torch.randint(0, 4096, (rows,), device="cuda")
        self.counters = torch.zeros(rows * n, dtype=torch.int32, device="cuda")
        self.state = step.new_step_state("cuda", k)
        self.table = step.layer_table(self.layers, self.caches, [0] * layers)
        self.set_context(context)

    def set_context(self, context: int) -> None:
        s = self.shape.block_size
        angles = torch.rand(self.rows, self.shape.head_dim // 2, device="cuda") * 6
        self.cos, self.sin = angles.cos(), angles.sin()
        self.lens = torch.full((self.rows,), context, dtype=torch.int32, device="cuda")
        self.slots = self.tables[:, (context - 1) // s].long() * s + (context - 1) % s

    def attend(self, qkv, index: int, **options):
        layer, (k, v) = self.layers[index], self.caches[index]
        return attention.launch_decode_attention(
            qkv, layer["q_norm"], layer["k_norm"], 1e-6, self.cos, self.sin, k, v, self.tables, self.lens, self.slots,
            self.counters, self.shape.heads, self.shape.head_dim**-0.5, 0, **options,
        )  # fmt: skip

    def chain(self, tiles=None, attend=None):
        tiles, h = tiles or {}, self.embed[self.token]
        for index, layer in enumerate(self.layers):
            qkv = launch_linear(h, layer["qkv"], norm=layer["input_norm"], eps=1e-6, tiles=tiles.get("qkv"))
            y = self.attend(qkv, index, **(attend or {}))
            h = launch_linear(y, layer["o"], residual=h, tiles=tiles.get("o"))
            act = launch_linear(
                h, layer["gate_up"], norm=layer["post_norm"], eps=1e-6, gated=True, tiles=tiles.get("up")
            )
            h = launch_linear(act, layer["down"], residual=h, tiles=tiles.get("down"))
        return h

    def reference(self):
        rows = []
        for t in range(self.rows):
            rows.append(step.decode_step_reference(
                self.token[t : t + 1], self.embed, self.layers, self.caches, [0] * len(self.layers), self.cos[t : t + 1],
                self.sin[t : t + 1], self.tables[t : t + 1], self.lens[t : t + 1], self.slots[t : t + 1], self.shape,
                self.shape.head_dim**-0.5,
            ))  # fmt: skip
        return torch.cat(rows)

    def step(self, tiles, **options):
        return step.launch_decode_step(
            self.token, self.embed, self.table, self.cos, self.sin, self.tables, self.lens, self.slots, self.state,
            self.shape, self.shape.head_dim**-0.5, tiles=tiles, **options,
        )  # fmt: skip

    def bytes(self) -> int:
        return sum(t.nbytes for layer in self.layers for t in layer.values())


ATTENTIONS = [
    {"warps": w, "keys": k, "least": n}
    for w, k, n in ((4, 64, 64), (4, 64, 128), (4, 32, 64), (8, 64, 64), (8, 128, 128))
]


def attention_part() -> None:
    for rows in (1, 8, 16):
        model = Model(SMALL, 28, rows, 640)
        qkv = random(rows, 4096)
        for options in ATTENTIONS if rows == 1 else ATTENTIONS[:2]:

            def check(model=model, qkv=qkv, options=options, rows=rows):
                for context in (1, 65, 640):
                    model.set_context(context)
                    k, v = (c.clone() for c in model.caches[0])
                    layer = model.layers[0]
                    want = attention.decode_attention_reference(
                        qkv, layer["q_norm"], layer["k_norm"], 1e-6, model.cos, model.sin, k, v, model.tables, model.lens,
                        model.slots, 16, 128**-0.5, 0,
                    )  # fmt: skip
                    got = model.attend(qkv, 0, **options)
                    report("check", f"attention rows {rows} context {context} {options}", error=error_of(got, want),
                           k=error_of(model.caches[0][0], k), v=error_of(model.caches[0][1], v),
                           counters=int(model.counters.sum()))  # fmt: skip

            attempt("check", f"attention {options}", check)
            for context in (128, 384, 640, 1024):
                model.set_context(context)
                for early in (True, False) if context == 384 else (True,):
                    name = f"rows {rows} context {context} {tuple(options.values())} early {early}"
                    seconds = attempt("attend", name, lambda model=model, qkv=qkv, options=options, early=early: graph_time(
                        lambda: [model.attend(qkv, i, early=early, **options) for i in range(28)]) / 28)  # fmt: skip
                    if seconds:
                        report("attend", name, us=seconds * 1e6)
        del model


CHAINS = {
    "default": {},
    "wide": {"qkv": Tiles(4, 4, 128, 4), "up": Tiles(4, 2, 128, 4)},
    "eight warps": {"qkv": Tiles(8, 2, 128, 4), "up": Tiles(8, 1, 128, 4), "o": Tiles(8, 1, 128, 8), "down": Tiles(8, 1, 128, 12)},
    "late": {"qkv": Tiles(4, 2, 128, 4, False), "up": Tiles(4, 1, 128, 4, False), "o": Tiles(4, 1, 128, 8, False), "down": Tiles(4, 1, 128, 12, False)},
}  # fmt: skip


def chain_part() -> None:
    for rows in (1, 2, 4, 8, 16):
        model = Model(SMALL, 2, rows, 300)
        attempt("check", f"chain rows {rows}", lambda model=model, rows=rows: report(
            "check", f"chain rows {rows}, 2 layers", error=error_of(model.chain(), model.reference())))  # fmt: skip
    for name, shape, layers, cases in (("0.6B", SMALL, 28, (1, 2, 4, 8, 16)), ("8B", LARGE, 36, (1, 8, 16))):
        for rows in cases:
            model = Model(shape, layers, rows, 384)
            for variant, tiles in CHAINS.items() if rows == 1 and shape is SMALL else [("default", {})]:
                for context in (128, 640) if rows in (1, 16) else (384,):
                    model.set_context(context)
                    late = {"early": False} if variant == "late" else None
                    case = f"{name} rows {rows} context {context} {variant}"
                    seconds = attempt(
                        "chain",
                        case,
                        lambda model=model, tiles=tiles, late=late: graph_time(lambda: model.chain(tiles, late)),
                    )
                    if seconds:
                        report(
                            "chain",
                            case,
                            ms=seconds * 1e3,
                            us_layer=seconds / layers * 1e6,
                            share=model.bytes() / seconds / PEAK,
                        )
            del model


def step_variants(count: int):
    """(name, shape, tiles, options) of the one-launch step, the likeliest first."""
    small, large = step.step_tiles(SMALL, count), step.step_tiles(LARGE, count)
    return [
        ("0.6B default", SMALL, small, {}),
        ("0.6B least 64", SMALL, small._replace(least=64), {}),
        ("0.6B barriers only", SMALL, small, {"phases": 0}),
        ("0.6B no attention", SMALL, small, {"phases": 63 - 4}),
        ("0.6B attention only", SMALL, small, {"phases": 4}),
        ("8B default", LARGE, large, {}),
        ("0.6B 16 warps", SMALL, step.step_tiles(SMALL, count, warps=16, held=12), {}),
        ("8B held 32", LARGE, step.step_tiles(LARGE, count, held=32), {}),
    ]


class CompileOnly:
    """Stands for a Triton kernel: a launch compiles it into the cache on disk and runs nothing."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.kernel.warmup(*args, grid=grid, **kwargs)


def warm_part(index: int) -> None:
    """Compiles this worker's share of all kernels; what fails shows again, with its name, when it is used."""
    for module, name in (
        (linear, "few_rows_kernel"), (linear, "dot_kernel"), (attention, "decode_attention_kernel"),
        (step_kernel, "decode_step_kernel"),
    ):  # fmt: skip
        setattr(module, name, CompileOnly(getattr(module, name)))
    count = torch.cuda.get_device_properties(0).multi_processor_count
    models = {(shape, rows): Model(shape, 1, rows, 300) for shape in (SMALL, LARGE) for rows in (1, 2, 4, 8, 16)}
    qkv = {rows: random(rows, 4096) for rows in (1, 8, 16)}
    jobs = [
        lambda shape=shape, tiles=tiles, options=options: models[shape, 1].step(tiles, **options)
        for _, shape, tiles, options in step_variants(count)
    ]  # fmt: skip
    for shape in (SMALL, LARGE):
        for rows in (1, 2, 4, 8, 16):
            jobs.append(lambda shape=shape, rows=rows: models[shape, rows].chain())
    jobs += [lambda tiles=tiles: models[SMALL, 1].chain(tiles) for tiles in CHAINS.values() if tiles]
    for rows in (1, 8, 16):
        for options in ATTENTIONS if rows == 1 else ATTENTIONS[:2]:
            for early in (True, False):
                jobs.append(lambda rows=rows, options=options, early=early: models[SMALL, rows].attend(
                    qkv[rows], 0, early=early, **options))  # fmt: skip
    for o, h in LINEARS:
        w = torch.empty(o, h, dtype=BF16, device="cuda")
        for t in (1, 2, 4, 16):
            x = random(t, h)
            jobs += [
                lambda x=x, w=w, tiles=tiles: launch_linear(x, w, tiles=tiles) for tiles in linear_candidates(t, o, h)
            ]
    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(job) for job in jobs[index::WORKERS]]:
            future.exception()


def step_part() -> None:
    count = torch.cuda.get_device_properties(0).multi_processor_count
    variants = step_variants(count)
    for name, shape, tiles, options in variants:
        if options:
            continue

        def check(name=name, shape=shape, tiles=tiles):
            for context in (1, 66, 640, 1000):
                model = Model(shape, 2, 1, context)
                want = model.reference()
                for mode, extra in (("one launch", {}), ("plain launch", {"cooperative": False})):
                    got = [model.step(tiles, **extra) for _ in range(3)]
                    torch.cuda.synchronize()
                    same = all(torch.equal(g, got[0]) for g in got)
                    report("check", f"step {name} context {context} {mode}", error=error_of(got[0], want), repeats=same)
                    if context != 66:
                        break

        attempt("check", f"step {name}", check)
    for _label, shape, layers in (("0.6B", SMALL, 28), ("8B", LARGE, 36)):
        model = Model(shape, layers, 1, 384)
        for name, its_shape, tiles, options in variants:
            if its_shape is not shape:
                continue
            for context in (128, 640) if options else (128, 384, 640, 1000):
                model.set_context(context)
                case = f"{name} context {context}"
                seconds = attempt(
                    "step",
                    case,
                    lambda model=model, tiles=tiles, options=options: graph_time(lambda: model.step(tiles, **options)),
                )
                if seconds:
                    report(
                        "step",
                        case,
                        ms=seconds * 1e3,
                        us_layer=seconds / layers * 1e6,
                        share=model.bytes() / seconds / PEAK,
                    )
        del model
    model = Model(SMALL, 28, 1, 384)
    seconds = attempt(
        "step",
        "0.6B default, no cooperative launch",
        lambda: graph_time(lambda: model.step(variants[0][2], cooperative=False)),
    )
    if seconds:
        report("step", "0.6B default context 384, no cooperative launch", ms=seconds * 1e3)


PARTS = {"linear": linear_part, "attention": attention_part, "chain": chain_part, "step": step_part}
WORKERS = 8
PARTS |= {f"warm{i}": lambda i=i: warm_part(i) for i in range(WORKERS)}
LIMITS = {"linear": 50, "attention": 25, "chain": 40, "step": 50}
COMPILE_LIMIT = 90


def start(part: str, out: str):
    command = [sys.executable, __file__, "--part", part, "--out", f"{out}.{part}"]
    return subprocess.Popen(command), time.time()


def finish(part: str, started, out: str) -> list[dict]:
    process, begin = started
    try:
        process.wait(timeout=max(1, LIMITS.get(part, COMPILE_LIMIT) - (time.time() - begin)))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        print(f"{part}: stopped at its limit", flush=True)
    path = Path(f"{out}.{part}")
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    path.unlink(missing_ok=True)
    print(f"{part}: rc {process.returncode}, {time.time() - begin:.0f} s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="decode.json")
    parser.add_argument("--part", choices=PARTS, help="run this part alone, in this process")
    parser.add_argument("--parts", default="step,chain,attention,linear", help="the parts to run, comma-separated")
    args = parser.parse_args()
    if args.part:
        RESULTS.append(Path(args.out))
        return PARTS[args.part]()
    parts, rows = args.parts.split(","), []
    workers = [(f"warm{i}", start(f"warm{i}", args.out)) for i in range(WORKERS)]
    for part, worker in workers:
        rows += finish(part, worker, args.out)
    for part in parts:
        rows += finish(part, start(part, args.out), args.out)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    Path(args.out).write_text(json.dumps({"device": device, "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
