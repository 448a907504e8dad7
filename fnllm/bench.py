"""`fnllm bench`: how fast this machine runs a model (effect: loads, generates, prints)."""

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

from fnllm.engines import engine
from fnllm.generation import generate
from fnllm.loading import load
from fnllm.sampling import Sampling


class Speed(NamedTuple):
    """Results for one batch size: seconds until all first tokens, and tokens per second in prefill and decode."""

    batch: int
    first_token_s: float
    prefill_tok_s: float
    decode_tok_s: float


def main(argv: Sequence[str]) -> int:
    """Measure and print a table; `argv` are the command's arguments."""
    from fnllm.cli import Parser  # which runs this

    parser = Parser(prog="fnllm bench", description="Prefill and decode speed on this machine.")
    parser.add_argument("--model", help="folder or hub id; default: the small demo model")
    parser.add_argument("--batch", type=counts, default="1,8", help="batch sizes, comma-separated")
    parser.add_argument("--prompt-tokens", type=count, default=128)
    parser.add_argument("--new-tokens", type=count, default=64)
    parser.add_argument("--repeats", type=count, default=3, help="runs to take the median of")
    parser.add_argument("--dtype")
    parser.add_argument("--device")
    parser.add_argument("--compile", help="none, graphs, inductor or reduce-overhead")
    args = parser.parse_args(list(argv))
    if args.new_tokens < 2:
        parser.error("--new-tokens must be 2 or more: decoding is measured after the first token")
    params = load(args.model, dtype=args.dtype, device=args.device)
    options = dict(
        compile=args.compile,
        max_num_seqs=max(args.batch),
        max_model_len=args.prompt_tokens + args.new_tokens,
        prefix_cache=False,
    )
    engine(params, **options).prepare(Sampling(temperature=0.0))
    print(f"{params.config.architecture}, {params.tree['norm'].dtype}, on {params.tree['norm'].device}")
    print(f"{'batch':>6} {'first token ms':>15} {'prefill tok/s':>14} {'decode tok/s':>13}")
    for batch in args.batch:
        speed = measure(params, batch, args.prompt_tokens, args.new_tokens, args.repeats, options)
        print(f"{batch:6} {speed.first_token_s * 1e3:15.1f} {speed.prefill_tok_s:14,.0f} {speed.decode_tok_s:13,.0f}")
    return 0


def count(text: str) -> int:
    """An argument that counts something: 1 or more."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of 1 or more, found {text!r}")
    return int(text)


def counts(text: str) -> list[int]:
    """Counts with commas between them."""
    return [count(part) for part in text.split(",")]


def measure(params, batch: int, prompt_tokens: int, new_tokens: int, repeats: int, options: dict) -> Speed:
    """The speed at one batch size: random prompts, greedy, end tokens ignored, after one run that is not counted."""
    rng = random.Random(0)

    def seconds(count: int) -> float:
        prompts = [[rng.randrange(params.config.vocab_size) for _ in range(prompt_tokens)] for _ in range(batch)]
        began = time.perf_counter()
        generate(
            params, prompts, Sampling(temperature=0.0, max_tokens=count, ignore_eos=True), progress=False, **options
        )
        return time.perf_counter() - began

    seconds(new_tokens)
    first = statistics.median(seconds(1) for _ in range(repeats))
    total = statistics.median(seconds(new_tokens) for _ in range(repeats))
    return Speed(batch, first, batch * prompt_tokens / first, batch * (new_tokens - 1) / max(total - first, 1e-9))
