"""Times drawing a token on a GPU: python benchmarks/sampler.py --out sampler.json

Compares, at the vocabulary of Qwen3 and batches of 1, 32 and 256: the head alone (cuBLAS); noise and argmax by Inductor
and by `fnllm::sample_logits`, alone and behind the head; and the filters. Every kernel is first checked against its
reference. Times are medians of CUDA graph replays. Parts that the time limit leaves out are named.
"""

import argparse
import functools
import json
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "weights")]

from provenance import provenance  # noqa: E402
from timing import replay_seconds  # noqa: E402
from workloads import FLOPS_PER_S, READ_BYTES_PER_S  # noqa: E402

from fnllm.sampler import SamplerFeatures, default_rows, sample  # noqa: E402
from fnllm_kernels import sample_logits as kernels  # noqa: E402
from fnllm_kernels import threshold  # noqa: E402
from fnllm_kernels.order_keys import packed_ids  # noqa: E402

VOCAB = 151936
BATCHES = (1, 32, 256)
WIDTHS = (1024, 4096)


def median_us(fn) -> float:
    """Microseconds of one call of `fn`, captured in a CUDA graph and replayed."""
    return replay_seconds(fn) * 1e6


def rows_of(batch: int, **columns):
    rows = default_rows(batch, "cuda")
    filled = {k: torch.full_like(getattr(rows, k), v) for k, v in columns.items()}
    return rows._replace(seed=torch.arange(batch, device="cuda"), **filled)


def agreement(got, want) -> float:
    """Share of rows whose packed keys name the same id."""
    return (packed_ids(got) == packed_ids(want)).float().mean().item()


def draws(batch: int, report) -> None:
    """Noise and argmax over logits that the head has just written."""
    logits = torch.randn(batch, VOCAB, device="cuda").mul(3).bfloat16()
    positions = torch.arange(batch, device="cuda")
    for name, temperature in (("greedy", 0.0), ("temperature", 1.0)):
        rows = rows_of(batch, temperature=temperature)
        args = (logits, rows.temperature, rows.seed, positions, 0, VOCAB)
        same = agreement(kernels.launch_sample_logits(*args), kernels.sample_logits_reference(*args))
        us = median_us(lambda args=args: kernels.launch_sample_logits(*args))
        report("draw", f"{name}, kernel", batch, us, same=same, floor_us=logits.nbytes / READ_BYTES_PER_S * 1e6)
    report("draw", "torch argmax", batch, median_us(lambda: logits.argmax(-1)))


def compiled_draws(batch: int, report, features: SamplerFeatures, name: str, kernel: bool, **columns) -> None:
    logits = torch.randn(batch, VOCAB, device="cuda").mul(3).bfloat16()
    positions, rows = torch.arange(batch, device="cuda"), rows_of(batch, temperature=1.0, **columns)
    step = functools.partial(sample, features=features, vocab_limit=VOCAB, kernels=kernel)
    began = time.time()
    compiled = torch.compile(lambda z, r, p: step(z, r, p).ids, fullgraph=True, dynamic=batch > 1)
    got, want = compiled(logits, rows, positions), step(logits, rows, positions).ids
    same, compile_s = (got == want).float().mean().item(), time.time() - began
    report("compiled", name, batch, median_us(lambda: compiled(logits, rows, positions)), same=same, s=compile_s)


def heads(batch: int, width: int, report) -> None:
    """The head alone, and with the draw as a second kernel."""
    weight = torch.randn(VOCAB, width, device="cuda").mul(width**-0.5).bfloat16()
    hidden = torch.randn(batch, width, device="cuda").mul(3).bfloat16()
    positions, rows = torch.arange(batch, device="cuda"), rows_of(batch, temperature=1.0)
    row_args = (rows.temperature, rows.seed, positions, 0, VOCAB)
    floor = max(weight.nbytes / READ_BYTES_PER_S, 2 * batch * width * VOCAB / FLOPS_PER_S) * 1e6
    report("head", f"H={width} cuBLAS alone", batch, median_us(lambda: hidden @ weight.T), floor_us=floor)

    def two():
        return kernels.launch_sample_logits(hidden @ weight.T, *row_args)

    report("head", f"H={width} cuBLAS, then the draw kernel", batch, median_us(two))


def searches(batch: int, report) -> None:
    """The threshold search of top-k (counts) and top-p (masses), on bfloat16 and float32."""
    for dtype in (torch.bfloat16, torch.float32):
        logits = torch.randn(batch, VOCAB, device="cuda").mul(3).to(dtype)
        top, one = logits.float().amax(-1), torch.ones(batch, device="cuda")
        total = threshold.masses(logits.float(), top, one).long().sum(-1)
        for by_mass, target in ((False, torch.full_like(total, 50)), (True, total // 10 * 9)):
            args = (logits, top, one, target, by_mass, VOCAB)
            (got, above), (want, want_above) = threshold.launch_reach(*args), threshold.reach_reference(*args)
            same = (got == want).float().mean().item()
            off = ((above - want_above).abs().double() / want_above.clamp(min=1)).max().item()
            name = f"{'mass' if by_mass else 'count'} {str(dtype)[6:]}"
            us = median_us(lambda args=args: threshold.launch_reach(*args))
            report("search", name, batch, us, same=same, relative_error=off)
    report("search", "torch topk 128, float32", batch, median_us(lambda: torch.topk(logits, 128)))


def main(out: Path, seconds: float) -> None:
    began, results, skipped = time.time(), [], []

    def report(part: str, name: str, batch: int, us: float | None, **more) -> None:
        entry = {"part": part, "name": name, "batch": batch, "us": us, **more}
        results.append(entry)
        shown = "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in more.items())
        print(f"{part:9} B={batch:<4} {name:42} {'' if us is None else f'{us:9.1f} us'}  {shown}", flush=True)

    noise = SamplerFeatures(noise=True)
    filters = SamplerFeatures(noise=True, top_k=True, top_p=True, min_p=True)
    few = SamplerFeatures(noise=True, top_k=True, top_p=True, min_p=True, candidates=True)
    parts = [(f"draws {b}", functools.partial(draws, b, report)) for b in BATCHES]
    parts += [(f"heads {b} {h}", functools.partial(heads, b, h, report)) for h in WIDTHS for b in BATCHES]
    parts += [(f"searches {b}", functools.partial(searches, b, report)) for b in BATCHES]
    for batch in (256, 32, 1):
        for features, name, kernel, columns in (
            (noise, "temperature by Inductor", False, {}),
            (few, "top-k 20, top-p 0.95", True, {"top_k": 20, "top_p": 0.95}),
            (filters, "top-p 0.9", True, {"top_p": 0.9}),
        ):
            job = functools.partial(compiled_draws, batch, report, features, name, kernel, **columns)
            parts.append((f"{name} {batch}", job))
    for name, part in parts:
        if time.time() - began > seconds:
            skipped.append(name)
            continue
        try:
            part()
        except Exception as error:  # one failing part must not end the run
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            results.append({"part": name, "error": f"{type(error).__name__}: {str(error)[:300]}"})
        torch.cuda.empty_cache()
    print(f"skipped: {skipped}; {time.time() - began:.1f} s")
    out.write_text(json.dumps(dict(**provenance(), skipped=skipped, results=results), indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=34.0, help="start no further part after this long")
    args = parser.parse_args()
    main(args.out, args.seconds)
