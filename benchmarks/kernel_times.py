"""Time of each kernel on this GPU, beside the lower bound from its bytes or its arithmetic.

    python benchmarks/kernel_times.py --out DIR [--only decode prefill small tilings]

A call is timed inside a captured graph, over as many copies of its inputs as fill the L2 cache several times, so caches
and activations come from memory as they do in a step. A case that fails is reported and the rest go on.
"""

import argparse
import importlib.util
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from provenance import provenance
from timing import replay_seconds
from torch import Tensor
from workloads import FLOPS_PER_S, READ_BYTES_PER_S

from fnllm_kernels.attention import attention_metadata, paged_attention
from fnllm_kernels.attention_triton import triton_metadata
from fnllm_kernels.attention_triton_decode import decode_attention
from fnllm_kernels.attention_triton_plan import DecodeTiling, decode_plan
from fnllm_kernels.norm import add_rms_norm, rms_norm
from fnllm_kernels.qk_norm_rope_store import qk_norm_rope_store
from fnllm_kernels.silu_mul import silu_mul

COLD_BYTES = 200e6  # inputs a graph goes through, several times the L2 cache

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, MLP = 16, 8, 128, 1024, 3072  # the shape of Qwen3-0.6B


class Case(NamedTuple):
    """One row of the table: `build()` makes one set of inputs and returns a call over it."""

    name: str
    build: Callable[[], Callable[[], object]]
    bytes_moved: float
    flops: float = 0.0


def time_us(case: Case) -> float:
    """Median microseconds per call, from replays of a graph that calls once on each of many input sets."""
    sets = int(min(256, max(2, -(-COLD_BYTES // case.bytes_moved))))
    calls = [case.build() for _ in range(sets)]

    def run() -> None:
        for call in calls:
            call()

    return replay_seconds(run) * 1e6 / sets


def normal(*size: int) -> Tensor:
    return torch.randn(size, device="cuda", dtype=torch.bfloat16)


def attention_tensors(batch: int, queries: int, context: int, block_size: int) -> dict[str, Tensor]:
    """Random inputs of one layer, blocks scattered over the pool."""
    blocks = -(-context // block_size)
    shape = batch * blocks, block_size, KV_HEADS, HEAD_DIM
    return {
        "q": normal(batch * queries, HEADS, HEAD_DIM),
        "k_cache": normal(*shape),
        "v_cache": normal(*shape),
        "block_tables": torch.randperm(batch * blocks, device="cuda").int().view(batch, blocks),
        "cu_seqlens_q": torch.arange(0, batch * queries + 1, queries, device="cuda").int(),
        "context_lens": torch.full((batch,), context, device="cuda").int(),
    }


def attention_case(backend: str, batch: int, queries: int, context: int, block_size: int) -> Case:
    def build():
        inputs = attention_tensors(batch, queries, context, block_size)
        metadata = attention_metadata(
            inputs["context_lens"], inputs["cu_seqlens_q"], num_tokens=batch * queries, num_heads=HEADS,
            num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=block_size, max_blocks=-(-context // block_size),
            max_seqlen_q=queries, dtype=torch.bfloat16, backend=backend,
        )  # fmt: skip
        return lambda: paged_attention(
            **inputs, max_seqlen_q=queries, scale=HEAD_DIM**-0.5, backend=backend, metadata=metadata
        )

    moved = batch * (context * KV_HEADS + queries * HEADS) * HEAD_DIM * 2 * 2
    seen = queries * (2 * context - queries + 1) / 2
    name = f"{'decode' if queries == 1 else 'prefill'} {backend} {batch}x{context} page {block_size}"
    return Case(name, build, moved, 4.0 * batch * seen * HEADS * HEAD_DIM)


def backends() -> list[str]:
    found = [("fa3", "flash_attn_interface"), ("fa2", "flash_attn")]
    return ["triton"] + [name for name, module in found if importlib.util.find_spec(module)]


def decode_cases() -> Iterator[Case]:
    for batch, context, backend in itertools.product((1, 32, 256), (165, 1024, 4096), backends()):
        yield attention_case(backend, batch, 1, context, 256)
    for backend, (batch, context) in itertools.product(backends()[:2], ((1, 1024), (256, 165), (256, 1024))):
        yield attention_case(backend, batch, 1, context, 16)


def prefill_cases() -> Iterator[Case]:
    for backend in (*backends(), "triton_invariant"):
        yield attention_case(backend, 4, 4096, 4096, 256)
    for backend in backends()[:2]:
        yield attention_case(backend, 1, 1024, 1024, 16)


def tiling_case(batch: int, context: int, tiling: DecodeTiling, direct: bool) -> Case:
    def build():
        inputs = attention_tensors(batch, 1, context, 256)
        plan = decode_plan(inputs["context_lens"], inputs["cu_seqlens_q"], KV_HEADS, 0, tiling, direct)
        return lambda: decode_attention(*inputs.values(), HEAD_DIM**-0.5, 0, plan, tiling, direct)

    fields = f"keys {tiling.keys} warps {tiling.warps} stages {tiling.stages}"
    divided = f"chunk {tiling.least_chunk} programs {tiling.programs}"
    name = f"tiling {batch}x{context} {fields} {'direct' if direct else divided}"
    return Case(name, build, batch * (context * KV_HEADS + HEADS) * HEAD_DIM * 2 * 2)


def tilings_cases() -> Iterator[Case]:
    """Candidates for `decode_tiling`: many sequences undivided, fewer divided."""
    for keys, warps, stages in itertools.product((16, 32, 64), (1, 2, 4), (2, 3, 4)):
        if warps * 16 <= keys * 2:
            for context in (165, 1024):
                yield tiling_case(256, context, DecodeTiling(keys, warps, stages, 64, 4), True)
    for tiling in itertools.product((32, 64), (2, 4), (2, 3), (64, 128), (2, 4)):
        for batch, context in ((1, 165), (1, 1024), (1, 4096), (32, 1024), (96, 800)):
            yield tiling_case(batch, context, DecodeTiling(*tiling), False)


def small_cases() -> Iterator[Case]:
    def norm(tokens: int):
        x, weight = normal(tokens, HIDDEN), normal(HIDDEN)
        return lambda: rms_norm(x, weight, 1e-6)

    def add_norm(tokens: int):
        x, residual, weight = normal(tokens, HIDDEN), normal(tokens, HIDDEN), normal(HIDDEN)
        return lambda: add_rms_norm(x, residual, weight, 1e-6)

    def gate(tokens: int):
        gate_up = normal(tokens, 2 * MLP)
        return lambda: silu_mul(gate_up)

    def rope_store(tokens: int):
        qkv, weight = normal(tokens, qkv_width), normal(HEAD_DIM)
        cos = torch.rand(tokens, HEAD_DIM // 2, device="cuda")
        caches = normal(tokens, 16, KV_HEADS, HEAD_DIM), normal(tokens, 16, KV_HEADS, HEAD_DIM)
        slots = torch.arange(tokens, device="cuda").int() * 16 + 3
        return lambda: qk_norm_rope_store(qkv, weight, weight, 1e-6, cos, cos, *caches, slots, HEADS, KV_HEADS)

    def decode_division(batch: int):
        lengths, cu = torch.full((batch,), 1000, device="cuda").int(), torch.arange(batch + 1, device="cuda").int()
        return lambda: triton_metadata(lengths, cu, KV_HEADS, HEAD_DIM, torch.bfloat16, 0, 1024)

    qkv_width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    for tokens in (1, 32, 256, 4096):
        yield Case(f"rms_norm {tokens}", lambda t=tokens: norm(t), 2 * tokens * HIDDEN * 2)
        yield Case(f"add_rms_norm {tokens}", lambda t=tokens: add_norm(t), 2 * tokens * HIDDEN * 4)
        yield Case(f"silu_mul {tokens}", lambda t=tokens: gate(t), 2 * tokens * MLP * 3)
        yield Case(f"qk_norm_rope_store {tokens}", lambda t=tokens: rope_store(t), 2 * tokens * qkv_width * 2)
    for batch in (1, 256):
        yield Case(f"decode plan {batch}", lambda b=batch: decode_division(b), 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    groups = {"decode": decode_cases, "prefill": prefill_cases, "small": small_cases, "tilings": tilings_cases}
    parser.add_argument("--out", type=Path, required=True, help="folder for kernels.json")
    parser.add_argument("--only", nargs="+", default=["decode", "prefill", "small"], choices=list(groups))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: the kernels are timed on a GPU")
    rows = []
    for case in itertools.chain.from_iterable(groups[name]() for name in options.only):
        floor = max(case.bytes_moved / READ_BYTES_PER_S, case.flops / FLOPS_PER_S) * 1e6
        try:
            took = time_us(case)
        except Exception as error:  # the table names what failed and goes on
            rows.append({"name": case.name, "error": f"{type(error).__name__}: {error}"})
            print(f"{case.name:56} FAILED {type(error).__name__}: {str(error)[:160]}", flush=True)
            continue
        rows.append({"name": case.name, "us": took, "floor_us": floor, "bytes": case.bytes_moved, "flops": case.flops})
        print(f"{case.name:56} {took:9.2f} us  floor {floor:9.2f}  x{took / floor:6.2f}", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "kernels.json").write_text(json.dumps(dict(**provenance(), rows=rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
