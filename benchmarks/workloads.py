"""The workloads W1 to W5, the model shapes, and the least time each needs on a machine with measured limits."""

import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

VOCAB = 151936
SHAPES = {
    "0.6b": dict(
        hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        intermediate_size=3072, tie_word_embeddings=True,
    ),
    "8b": dict(
        hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        intermediate_size=12288, tie_word_embeddings=False,
    ),
}  # fmt: skip
READ_BYTES_PER_S, FLOPS_PER_S = 4.24e12, 776e12  # one H200: a reduction over 2 GiB; bf16 product of 8192^3
BATCHES = (1, 8, 32, 64, 128, 256)

Generate = Callable[[list[list[int]], list[int]], Any]  # (prompts, new tokens of each) -> anything, when all is done


def config_dict(size: str) -> dict:
    """The config.json of a Qwen3 checkpoint of this shape."""
    return dict(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", attention_bias=False, bos_token_id=151643,
        eos_token_id=151645, hidden_act="silu", max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1000000,
        torch_dtype="bfloat16", vocab_size=VOCAB, **SHAPES[size],
    )  # fmt: skip


class Cost(NamedTuple):
    """Parameters and bytes of a shape."""

    block_params: int
    head_params: int
    cache_bytes: int  # of one token
    pair_flops: int  # attention arithmetic of one query-key pair, all layers

    @property
    def weight_bytes(self) -> int:
        return 2 * (self.block_params + self.head_params)


def cost(size: str) -> Cost:
    s = SHAPES[size]
    h, d, n, k, layers = (
        s[f] for f in ("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    )
    layer = h * d * (2 * n + 2 * k) + 3 * h * s["intermediate_size"] + 2 * h + 2 * d
    return Cost(layers * layer + h, VOCAB * h, 4 * layers * k * d, 4 * layers * n * d)


def decode_floor(size: str, batch: int, context: float) -> float:
    """Least seconds of a decode step: weights once and every sequence's cache once, or the arithmetic."""
    c = cost(size)
    weights = max(c.weight_bytes / READ_BYTES_PER_S, 2 * batch * (c.block_params + c.head_params) / FLOPS_PER_S)
    return weights + batch * context * c.cache_bytes / READ_BYTES_PER_S


def prefill_floor(size: str, lengths: list[int], cached: int = 0) -> float:
    """Least seconds to compute prompts of these lengths, `cached` tokens of each being there."""
    c, total = cost(size), 0.0
    for length in lengths:
        new = length - cached
        total += 2 * c.block_params * new + 2 * c.head_params + c.pair_flops * (new * length - new * (new - 1) / 2)
    return total / FLOPS_PER_S


def headline(seed: int) -> tuple[list[list[int]], list[int]]:
    """W1: 256 requests, inputs and outputs of 100 to 1024 tokens (nano-vLLM's own benchmark, same numbers)."""
    random.seed(seed)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    return prompts, [random.randint(100, 1024) for _ in range(256)]


def headline_floor(size: str, seed: int) -> float:
    prompts, lens = headline(seed)
    total = prefill_floor(size, [len(p) for p in prompts])
    for step in range(1, max(lens)):
        live = [len(p) + step for p, n in zip(prompts, lens, strict=True) if n > step]
        total += decode_floor(size, len(live), sum(live) / len(live))
    return total


class Prompts:
    """Random token ids, never the same twice, so that no prefix cache hits by chance."""

    def __init__(self, seed: int = 1234):
        self.rng = random.Random(seed)

    def make(self, count: int, length: int) -> list[list[int]]:
        return [[self.rng.randint(0, 150000) for _ in range(length)] for _ in range(count)]


def timed(generate: Generate, prompts: list[list[int]], lens: list[int]) -> float:
    began = time.perf_counter()
    generate(prompts, lens)
    return time.perf_counter() - began


def measure(generate: Generate, size: str, which: str) -> Iterator[dict]:
    """Rows of one workload: seconds, the rate that it is about, and the floor's rate."""
    source = Prompts(1234 + int(which[1:]))  # no workload meets the prompts of another in a cache
    if which == "W1":
        prompts, lens = headline(0)
        seconds = timed(generate, prompts, lens)
        yield dict(seconds=seconds, tok_s=sum(lens) / seconds, floor_tok_s=sum(lens) / headline_floor(size, 0))
    elif which == "W2":
        first = statistics.median(timed(generate, source.make(1, 128), [1]) for _ in range(5))
        runs = [timed(generate, source.make(1, 128), [512]) for _ in range(3)]
        rate = 511 / (statistics.median(runs) - first)
        yield dict(first_token_ms=first * 1e3, runs=runs, tok_s=rate, floor_tok_s=1 / decode_floor(size, 1, 384))
    elif which == "W3":
        for batch in BATCHES:
            timed(generate, source.make(batch, 128), [8] * batch)
            first = min(timed(generate, source.make(batch, 128), [1] * batch) for _ in range(2))
            step = (timed(generate, source.make(batch, 128), [256] * batch) - first) / 255
            floor = decode_floor(size, batch, 256)
            yield dict(batch=batch, step_ms=step * 1e3, tok_s=batch / step, floor_tok_s=batch / floor)
    elif which == "W4":
        for case, count, length in (("16x4096", 16, 4096), ("1x32768", 1, 32768)):
            seconds = min(timed(generate, source.make(count, length), [1] * count) for _ in range(3))
            floor = prefill_floor(size, [length] * count)
            yield dict(case=case, seconds=seconds, tok_s=count * length / seconds, floor_tok_s=count * length / floor)
        runs = [timed(generate, source.make(1, 1024), [1]) for _ in range(7)]
        floor = prefill_floor(size, [1024]) * 1e3
        yield dict(case="first token of 1024", ms=statistics.median(runs) * 1e3, runs=runs, floor_ms=floor)
    else:
        shared = source.make(1, 2048)[0]
        timed(generate, [shared + source.make(1, 64)[0]], [32])
        seconds = min(timed(generate, [shared + own for own in source.make(64, 64)], [32] * 64) for _ in range(3))
        floor = prefill_floor(size, [2112] * 64, 2048) + sum(decode_floor(size, 64, 2112 + n) for n in range(1, 32))
        yield dict(case="shared prefix", ms=seconds * 1e3, floor_ms=floor * 1e3)
