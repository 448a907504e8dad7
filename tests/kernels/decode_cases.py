"""Runs the decode kernels in Triton's interpreter and prints, as JSON, name and relative errors of each case.

Run as a program of its own, since Triton reads TRITON_INTERPRET when it is imported.
"""

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "kernels"))

import decode_interpreter  # noqa: F401  (first: it switches the interpreter on)
import torch

from fnllm_kernels.decode_attention import decode_attention_reference, launch_decode_attention
from fnllm_kernels.decode_linear import DotTiles, Tiles, launch_linear
from fnllm_kernels.small_linear import linear_reference

BF16 = torch.bfloat16


def random(*shape, scale=1.0):
    return (torch.randn(*shape) * scale).to(BF16)


def gain(size):
    return (torch.rand(size) + 0.5).to(BF16)


def error(got, expected):
    return float((got.double() - expected.double()).norm() / (expected.double().norm() + 1e-30))


def spread(x):
    """The same vector with something else between its numbers."""
    return torch.stack((x, torch.full_like(x, 9)), 1)[:, 0]


def between(x):
    """The same row, which begins between two pairs of numbers."""
    return torch.cat((x[:, :1], x), 1)[:, 1:]


def turned(x):
    """The same row, as a column that was turned: contiguous, with a stride of one along both."""
    return torch.empty_strided(x.shape, (1, 1), dtype=x.dtype).copy_(x)


def linear(
    name, rows, width, outputs, tiles, *, norm=False, bias=False, residual=False, gated=False, of_x=None, vector=None
):
    x, w = random(rows, width), random(outputs, width, scale=0.2)
    given = {"gated": gated, "eps": 1e-6}
    if norm:
        given["norm"] = gain(width)
    if bias:
        given["bias"] = random(outputs)
    if residual:
        given["residual"] = random(rows, outputs)
    exact = {k: v.double() if torch.is_tensor(v) else v for k, v in given.items()}
    expected = linear_reference(x.double(), w.double(), **exact)
    x = x if of_x is None else of_x(x)
    if vector is not None:
        given |= {name: vector(given[name]) for name in ("norm", "bias") if name in given}
    return {"name": name, "y": error(launch_linear(x, w, tiles=tiles, **given), expected)}


def attention(name, contexts, heads, kv_heads, head_dim, block_size, window=0, norm=True, vector=None, **options):
    rows, blocks = len(contexts), max(1, -(-max(contexts) // block_size))
    order = torch.randperm(rows * blocks + 3)[: rows * blocks].view(rows, blocks).int()
    tables = order.clone()
    for t, context in enumerate(contexts):
        tables[t, -(-context // block_size) :] = -1  # never an index
    caches = [random(rows * blocks + 3, block_size, kv_heads, head_dim) for _ in range(2)]
    expected_caches = [c.clone() for c in caches]
    qkv = random(rows, (heads + 2 * kv_heads) * head_dim)
    norms = (gain(head_dim), gain(head_dim)) if norm else (None, None)
    angles = torch.rand(rows, head_dim // 2) * 6
    lens = torch.tensor(contexts, dtype=torch.int32)
    slots = torch.tensor(
        [
            -1 if c == 0 else int(order[t, (c - 1) // block_size]) * block_size + (c - 1) % block_size
            for t, c in enumerate(contexts)
        ]
    )
    counters = torch.zeros(rows * heads, dtype=torch.int32)
    fixed = (qkv, *norms, 1e-6, angles.cos(), angles.sin())
    expected = decode_attention_reference(*fixed, *expected_caches, tables, lens, slots, heads, head_dim**-0.5, window)
    if vector is not None:
        fixed, lens, slots = (qkv, *map(vector, norms), *fixed[3:]), vector(lens), vector(slots)
    got = launch_decode_attention(
        *fixed, *caches, tables, lens, slots, counters, heads, head_dim**-0.5, window, **options
    )
    return {
        "name": name, "y": error(got, expected), "k": error(caches[0], expected_caches[0]),
        "v": error(caches[1], expected_caches[1]), "counters": int(counters.abs().sum()),
    }  # fmt: skip


CASES = {
    "linear": [
        lambda: linear("one row", 1, 32, 10, Tiles(2, 1, 8, 2)),
        lambda: linear("norm, bias", 1, 32, 10, Tiles(2, 2, 8, 2), norm=True, bias=True),
        lambda: linear("three rows, pieces past the end", 3, 40, 10, Tiles(2, 2, 8, 2), norm=True, bias=True),
        lambda: linear("gated in units", 2, 40, 10, Tiles(2, 2, 8, 1), norm=True, gated=True, bias=True),
        lambda: linear("gated, three rows a warp", 2, 40, 22, Tiles(2, 3, 8, 4), norm=True, gated=True),
        lambda: linear("residual", 2, 24, 10, Tiles(2, 2, 8, 4), residual=True),
        lambda: linear("one output", 1, 32, 1, Tiles(2, 1, 8, 2)),
        lambda: linear("vectors apart", 1, 32, 10, Tiles(2, 2, 8, 2), norm=True, bias=True, vector=spread),
        lambda: linear("a row between pairs", 1, 32, 10, Tiles(2, 1, 8, 2), of_x=between),
        lambda: linear("a turned row", 1, 32, 10, Tiles(2, 1, 8, 2), of_x=turned),
        lambda: linear("tensor cores", 5, 64, 10, DotTiles(8, 2, 16, 4)),
        lambda: linear(
            "tensor cores, all options", 16, 80, 20, DotTiles(8, 2, 16, 4), norm=True, bias=True, residual=True
        ),
        lambda: linear(
            "tensor cores, vectors apart", 5, 64, 10, DotTiles(8, 2, 16, 4), norm=True, bias=True, vector=spread
        ),
        lambda: linear("tensor cores, gated", 5, 80, 20, DotTiles(8, 2, 16, 4), norm=True, bias=True, gated=True),
    ],
    "attention": [
        lambda: attention("padding row", [5, 1, 0, 9], 4, 2, 32, 4, splits=4, warps=1, keys=8, least=8),
        lambda: attention("splits", [37, 20], 4, 2, 32, 8, splits=4, warps=1, keys=8, least=8),
        lambda: attention("window", [37, 20], 4, 2, 32, 8, window=7, splits=4, warps=1, keys=8, least=8),
        lambda: attention("no norm, one split", [37, 20], 2, 2, 32, 16, norm=False, splits=1, warps=1, keys=8, least=8),
        lambda: attention("a head each", [37, 20], 4, 2, 32, 8, splits=4, warps=1, keys=8, least=8, each=1),
        lambda: attention("vectors apart", [37, 20], 4, 2, 32, 8, vector=spread, splits=4, warps=1, keys=8, least=8),
        lambda: attention("groups of three", [130], 6, 2, 32, 16, window=100, splits=8, warps=1, keys=8, least=16),
    ],
}

if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(json.dumps({kind: [case() for case in cases] for kind, cases in CASES.items()}))
