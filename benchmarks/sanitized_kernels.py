"""Every custom op once on small, odd shapes, for compute-sanitizer: `python benchmarks/sanitized_kernels.py`.

    compute-sanitizer --tool memcheck --error-exitcode 9 python benchmarks/sanitized_kernels.py

Sizes are no multiples of a tile, some slots, table entries and rows are padding, and tensors are allocated one by one,
so that a read past an end leaves its allocation. Results are compared with the same op on the CPU. Each op's name is
printed before it runs; `--only a,b` runs some, `--device cpu` tries the driver itself.
"""

import argparse
import os
import sys
from collections.abc import Callable

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # the sanitizer then sees where each tensor ends

import torch
from torch import Tensor

from fnllm_kernels.attention import attention_metadata, default_backend, paged_attention
from fnllm_kernels.decode_attention import decode_attention
from fnllm_kernels.grouped_linear import grouped_linear, grouped_outer
from fnllm_kernels.invariant_linear import invariant_linear
from fnllm_kernels.kv_store import copy_blocks, store_kv
from fnllm_kernels.linear_add_norm import linear_add_rms_norm
from fnllm_kernels.noise import mixed_keys
from fnllm_kernels.norm import add_rms_norm, rms_norm
from fnllm_kernels.qk_norm_rope_attention import qk_norm_rope_attention
from fnllm_kernels.qk_norm_rope_store import qk_norm_rope_store
from fnllm_kernels.sample_logits import sample_logits
from fnllm_kernels.silu_mul import silu_mul
from fnllm_kernels.small_linear import norm_linear, small_linear
from fnllm_kernels.threshold import measure_above, reach

BOUND = 3e-2  # of the norm of the difference to that of the CPU's result
DTYPE = torch.bfloat16
NOISE = torch.Generator().manual_seed(0)


def normal(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(*shape, generator=NOISE).to(dtype)


def ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def caches(kv_heads: int = 2, head_dim: int = 32, blocks: int = 7, size: int = 8) -> tuple[Tensor, Tensor]:
    return normal(blocks, size, kv_heads, head_dim), normal(blocks, size, kv_heads, head_dim)


def case_linear(rows: int, gated: bool) -> tuple[Callable, tuple]:
    return (lambda x, w: small_linear(x, w, gated=gated)), (normal(rows, 72), normal(46, 72))


def case_norm_linear(rows: int) -> tuple[Callable, tuple]:
    return (lambda x, n, w, b: norm_linear(x, n, 1e-6, w, bias=b)), (
        normal(rows, 72), 1 + normal(72) / 4, normal(46, 72), normal(46),
    )  # fmt: skip


def case_linear_norm(rows: int, inputs: int, outputs: int) -> tuple[Callable, tuple]:
    return (lambda x, w, r, n: torch.stack(linear_add_rms_norm(x, w, r, n, 1e-6))), (
        normal(rows, inputs), normal(outputs, inputs), normal(rows, outputs), normal(outputs),
    )  # fmt: skip


def case_attention(backend: str, queries: tuple[int, ...], contexts: tuple[int, ...], window: int) -> tuple:
    """Paged attention of a few sequences, the last of them padding; table entries past a length are -1."""
    cu = torch.tensor([0, *queries]).cumsum(0).int()
    tables = torch.full((len(queries), 4), -1, dtype=torch.int32)
    size, head_dim = (128, 64) if backend in ("fa3", "fa2") else (8, 32)
    for row, context in enumerate(contexts):
        used = -(-context // size)
        tables[row, :used] = torch.randperm(7, generator=NOISE)[:used].int()
    static = dict(max_seqlen_q=max(queries), window=window)
    heads = 6

    def run(q: Tensor, k: Tensor, v: Tensor, tables: Tensor, cu: Tensor, lens: Tensor) -> Tensor:
        chosen = backend if q.is_cuda else "reference"
        metadata = attention_metadata(
            lens, cu, num_tokens=q.shape[0], num_heads=heads, num_kv_heads=2, head_dim=head_dim, block_size=size,
            max_blocks=4, dtype=DTYPE, backend=chosen, **static,
        ) if q.is_cuda else None  # fmt: skip
        return paged_attention(
            q, k, v, tables, cu, lens, scale=head_dim**-0.5, backend=chosen, metadata=metadata, **static
        )

    return run, (
        normal(sum(queries) + 3, heads, head_dim),
        *caches(2, head_dim, size=size),
        tables,
        cu,
        ints(*contexts),
    )


def case_decode_attention(window: int) -> tuple:
    def run(
        qkv: Tensor, qn: Tensor, kn: Tensor, cos: Tensor, sin: Tensor, k: Tensor, v: Tensor, *rest: Tensor
    ) -> Tensor:
        return decode_attention(qkv, qn, kn, 1e-6, cos, sin, k, v, *rest, num_heads=4, scale=32**-0.5, window=window)

    angle = normal(3, 16, dtype=torch.float32)
    tables = torch.tensor([[2, 0, 5, 4], [1, -1, -1, -1], [3, 6, -1, -1]], dtype=torch.int32)
    return run, (
        normal(3, 8 * 32), 1 + normal(32) / 4, 1 + normal(32) / 4, angle.cos(), angle.sin(), *caches(),
        tables, ints(27, 0, 9), ints(4 * 8 + 2, -1, 6 * 8, dtype=torch.int64), torch.zeros(12, dtype=torch.int32),
    )  # fmt: skip


def case_rope_attention(window: int, norm: bool) -> tuple:
    """A decode step of two sequences and a padding row from the qkv projection on."""

    def run(qkv: Tensor, cos: Tensor, sin: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
        q_norm, k_norm = rest[4:] or (None, None)
        return qk_norm_rope_attention(
            qkv, q_norm, k_norm, 1e-6, cos, sin, k, v, *rest[:4], num_heads=6, scale=32**-0.5, window=window
        )

    angle = normal(3, 16, dtype=torch.float32)
    tables = torch.tensor([[2, 0, 5, 4], [3, 6, -1, -1], [-1, -1, -1, -1]], dtype=torch.int32)
    norms = (1 + normal(32) / 4, 1 + normal(32) / 4) if norm else ()
    return run, (
        normal(3, 10 * 32), angle.cos(), angle.sin(), *caches(), ints(4 * 8 + 2, 6 * 8, -1, dtype=torch.int64), tables,
        ints(0, 1, 2, 2), ints(27, 9, 0), *norms,
    )  # fmt: skip


def case_rope_store(norm: bool) -> tuple:
    def run(qkv: Tensor, cos: Tensor, sin: Tensor, k: Tensor, v: Tensor, slots: Tensor, *norms: Tensor) -> Tensor:
        q_norm, k_norm = norms or (None, None)
        return qk_norm_rope_store(qkv, q_norm, k_norm, 1e-6, cos, sin, k, v, slots, 6, 2)

    angle = normal(5, 16, dtype=torch.float32)
    norms = (1 + normal(32) / 4, 1 + normal(32) / 4) if norm else ()
    return run, (normal(5, 10 * 32), angle.cos(), angle.sin(), *caches(), ints(3, -1, 55, 8, -1), *norms)


def draw_inputs(rows: int = 3, vocabulary: int = 1501) -> tuple[Tensor, ...]:
    logits = normal(rows, vocabulary, dtype=torch.float32) * 2
    return logits, torch.tensor([0.0, 1.0, 0.7])[:rows], torch.tensor([1, -5, 2**62])[:rows], torch.tensor([0, 1, 70])


def case_threshold(by_mass: bool, probes: bool) -> tuple:
    logits = draw_inputs()[0]
    temperature = torch.tensor([1.0, 0.5, 1.3])
    if probes:
        return (lambda x, top, t, p: measure_above(x, top, t, p, by_mass, 1490)), (
            logits, logits.amax(-1), temperature, torch.tensor([[0.0, 1.0], [-1.0, 2.0], [0.5, 9.0]]),
        )  # fmt: skip
    return (lambda x, top, t, target: torch.stack([y.double() for y in reach(x, top, t, target, by_mass, 1490)])), (
        logits, logits.amax(-1), temperature, torch.tensor([5, 1, 900]),
    )  # fmt: skip


def cases(fast: str) -> dict[str, tuple[Callable, tuple]]:
    """Each op's calls: a function of tensors, and those tensors on the CPU."""
    found = {
        "store_kv": (store_kv, (normal(5, 2, 32), normal(5, 2, 32), *caches(), ints(3, -1, 55, 8, -1))),
        "copy_blocks": (copy_blocks, (*caches(), ints(0, -1, 6), ints(3, 2, 1))),
        "qk_norm_rope_store": case_rope_store(norm=True),
        "qk_norm_rope_store, no norm": case_rope_store(norm=False),
        "qk_norm_rope_attention": case_rope_attention(0, norm=True),
        "qk_norm_rope_attention, no norm, window": case_rope_attention(5, norm=False),
        "rms_norm": (lambda x, w: rms_norm(x, w, 1e-6), (normal(5, 72), normal(72))),
        "add_rms_norm": (lambda x, r, w: torch.stack(add_rms_norm(x, r, w, 1e-6)), (
            normal(5, 72), normal(5, 72), normal(72))),
        "linear_add_rms_norm, cuBLAS halves": case_linear_norm(130, 4096, 3080),
        "linear_add_rms_norm, tiled halves": case_linear_norm(70, 2056, 1000),
        "small_linear, gated, programs that stay": (lambda x, w: small_linear(x, w, gated=True), (
            normal(1030, 72), normal(3504, 72))),
        "silu_mul": (silu_mul, (normal(5, 94),)),
        "invariant_linear": (invariant_linear, (normal(5, 72), normal(46, 72))),
        "grouped_linear": (grouped_linear, (normal(11, 72), normal(4, 46, 72), ints(3, 3, 10, 11))),
        "grouped_outer": (grouped_outer, (normal(11, 46), normal(11, 72), ints(3, 3, 10, 11))),
        "mixed_keys": (mixed_keys, (torch.tensor([1, -5, 2**62]), torch.tensor([0, 1, 70]))),
        "sample_logits": (lambda *x: sample_logits(*x, 0, 1490), draw_inputs()),
        "decode_attention": case_decode_attention(0),
        "decode_attention, window": case_decode_attention(5),
    }  # fmt: skip
    for rows in (1, 3, 16, 17, 40, 70):  # by kernels for few rows, by tiles, by cuBLAS
        found[f"small_linear, {rows} rows"] = case_linear(rows, False)
        found[f"small_linear, gated, {rows} rows"] = case_linear(rows, True)
        found[f"norm_linear, {rows} rows"] = case_norm_linear(rows)
    for by_mass in (False, True):
        found[f"measure_above, {'mass' if by_mass else 'count'}"] = case_threshold(by_mass, True)
        found[f"reach, {'mass' if by_mass else 'count'}"] = case_threshold(by_mass, False)
    for count in (300, 450, 520):  # with two KV heads: pairs enough for larger tiles, and twice to run undivided
        contexts = *(1 + 11 * row % 28 for row in range(count)), 0
        found[f"paged_attention, triton, decode of {count}"] = case_attention(
            "triton", (1,) * count + (0,), contexts, 0
        )
    for backend in dict.fromkeys(("triton", "triton_invariant", fast)):
        for window in (0, 5):
            found[f"paged_attention, {backend}, decode, window {window}"] = case_attention(
                backend, (1, 1, 0), (27, 9, 0), window
            )
            found[f"paged_attention, {backend}, mixed, window {window}"] = case_attention(
                backend, (1, 11, 0), (17, 29, 0), window
            )
    return found


def difference(run: Callable, tensors: tuple, device: str) -> float:
    """The largest relative difference of what the op returns and what it writes, between the device and the CPU."""
    results = []
    for place in (device, "cpu"):
        given = [x.to(place, copy=True) for x in tensors]
        with torch.no_grad():
            out = run(*given)
        results.append([x.double().cpu() for x in ([] if out is None else [out]) + given])
    return max(float((a - b).norm() / (b.norm() + 1e-9)) for a, b in zip(*results, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of ops, comma-separated; all of their cases run")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    fast = default_backend(torch.device(args.device), DTYPE, 64, 128)
    wrong = 0
    for name, (run, tensors) in cases(fast).items():
        if args.only and name.split(",")[0] not in args.only.split(","):
            continue
        print(name, end=": ", flush=True)
        error = difference(run, tensors, args.device)
        if args.device == "cuda":
            torch.cuda.synchronize()
        wrong += not error < BOUND
        print(f"{error:.1e}{'' if error < BOUND else ' WRONG'}", flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
