"""Random requests against engines for minutes on end: `python benchmarks/soak.py --minutes 10 --out soak.json`.

Three engines take turns: a plain one and one with edits, which share a machine and so write over each other's blocks,
and one on a machine of its own with other options. Requests of every kind come and are aborted, forked, cut, continued
and gone back to (soak_moves.py); between them whole calls of `generate` run, and weights change in place. Each token is
checked against a forward pass in float32 on the CPU (soak_reference.py), the scheduler's invariants after random moves,
and at the end that all blocks are free, that memory does not grow and that no step was compiled or captured twice.

Equal seeds make the same moves; `--seed S --moves M+1` with the same options goes again to a fault at move M.
"""

import argparse
import json
import resource
import statistics
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from provenance import provenance, random_params
from soak_moves import Player, Source, widest
from soak_reference import TOLERANCE, Drawn, Turn, Verdict, judge, reference_of

import fnllm
from fnllm.compiled import graphs_traced
from fnllm.options import TRACED_MODES
from fnllm.sampler import child_seed
from fnllm_weights.params import walk

SIZES = {  # options of the shared machine and of the other one; tokens of a prompt, new tokens
    "tiny": (
        dict(block_size=4, num_blocks=26, max_num_seqs=6, max_num_batched_tokens=24, max_model_len=72),
        dict(block_size=8, num_blocks=9, max_num_seqs=3, max_num_batched_tokens=48, max_model_len=64,
             prefix_cache=False, chunked_prefill=False),
        24, 20,
    ),
    "small": (
        dict(num_blocks=24, max_num_seqs=24, max_num_batched_tokens=512, max_model_len=1024),
        dict(block_size=16, num_blocks=96, max_num_seqs=12, max_num_batched_tokens=768, max_model_len=1024,
             prefix_cache=False, max_chunk=200),
        400, 120,
    ),
}  # fmt: skip
JUDGED_AT_ONCE = 2000  # tokens handed in before the reference runs
SHOWN = 20  # faults kept in the results
SAMPLE_EVERY = 50  # moves between two looks at the memory
HOST_GROWTH, DEVICE_GROWTH = 64e6, 16e6  # bytes that do not count
PER_GRAPH = 32e6  # bytes that a newly met bucket may take


class Soak:
    """The run: engines, players, what is handed in to be checked and what came of it."""

    def __init__(self, params: fnllm.Params, s: SimpleNamespace):
        self.params, self.s, self.rng = params, s, Random(s.seed)
        self.tolerance = s.tolerance or TOLERANCE[params.tree["norm"].dtype]
        shared, other, longest, most = SIZES[s.size]
        self.options = dict(shared, compile=s.compile)
        layers, width = params.config.num_hidden_layers, params.config.hidden_size
        vector = torch.randn(2, width, generator=torch.Generator().manual_seed(s.seed))
        self.edits = (  # before the last layer, so that they change what the cache holds
            fnllm.steer(f"layers.{(layers - 1) // 2}.resid_post", vector[0], 0.5, start=3),
            fnllm.ablate("layers.0.attn_out", vector[1]),
        )
        self.reports: list[str] = []
        self.source = Source(self.rng, params.config.vocab_size, longest, most, s.few)
        engines = {
            "plain": fnllm.engine(params, report=self.reports.append, **self.options),
            "edited": fnllm.engine(params, report=self.reports.append, edits=self.edits, **self.options),
            "other": fnllm.engine(params, report=self.reports.append, **other, compile=s.compile),
        }
        self.players = [Player(name, one, self.source, self.hand_in) for name, one in engines.items()]
        self.handed_in: list[Turn] = []
        self.verdict, self.faults, self.counts = Verdict(), 0, Counter()
        self.memory: list[tuple[int, int, int]] = []
        self.reference = reference_of(params)

    def hand_in(self, turn: Turn) -> None:
        self.handed_in.append(turn)

    def check(self) -> None:
        """Judge what was handed in."""
        found = judge(self.reference, self.handed_in, self.tolerance)
        self.counts["turns checked"] += len(self.handed_in)
        self.handed_in = []
        self.faults += len(found.faults)
        self.verdict = Verdict(
            self.verdict.tokens + found.tokens,
            self.verdict.excused + found.excused,
            max(self.verdict.largest_logprob_error, found.largest_logprob_error),
            (*self.verdict.faults, *found.faults)[:SHOWN],
        )

    def run(self) -> dict:
        """All moves; the result without where it comes from."""
        for player in self.players:  # the tables of stop ids and biases get their final width
            player.at = -1
            player.request(self.source.prompt(), replace(widest(self.source.sampling()), n=1))
            player.drain()
        began, move, player, stay = time.perf_counter(), 0, self.players[0], 0
        while move < self.s.moves if self.s.moves else time.perf_counter() - began < 60 * self.s.minutes:
            if stay == 0:
                player, stay = self.rng.choice(self.players), self.rng.randrange(1, 120)
                self.interlude(move)
            player.move(move)
            move, stay = move + 1, stay - 1
            if sum(len(turn.tokens) for turn in self.handed_in) > JUDGED_AT_ONCE:
                self.check()
            if move % SAMPLE_EVERY == 0:
                self.memory.append((resident_bytes(), self.device_bytes(), len(self.captures())))
        problems = [problem for one in self.players for problem in one.finish()]
        self.check()
        return self.result(problems, move, time.perf_counter() - began)

    def interlude(self, move: int) -> None:
        """Now and then, between two players' turns: a call of `generate`, or other weights."""
        chance = self.rng.random()
        if chance < 0.15:
            self.call(move)
        elif chance < 0.25:
            self.change_weights()

    def call(self, move: int) -> None:
        """`generate` on the shared machine, whose blocks it writes over."""
        prompts = [self.source.prompt() for _ in range(self.rng.randrange(1, 4))]
        settings = [replace(self.source.sampling(), stop_token_ids=[7, 11, 13, 17]) for _ in prompts]
        done = iter(fnllm.generate(self.params, prompts, settings, progress=False, **self.options))
        capacity = self.options["max_model_len"]
        for prompt, setting in zip(prompts, settings, strict=True):
            for sample in range(setting.n):
                one = next(done)
                drawn = tuple(
                    Drawn(place, entry.id, entry.logprob, entry.top)
                    for place, entry in enumerate(one.logprobs or (), len(prompt))
                )
                self.hand_in(Turn(
                    (*prompt, *one.token_ids), len(prompt), len(prompt), setting.max_tokens, capacity, setting,
                    child_seed(setting.seed, sample), drawn=drawn, ended=(one.finish_reason, one.stop_reason),
                    label=dict(move=move, player="generate"),
                ))  # fmt: skip
                self.counts["calls' requests"] += 1

    def change_weights(self) -> None:
        """Other weights in the same tensors, once everything that was begun with the old ones is done."""
        for player in self.players:
            player.drain()
            player.kept.clear()
        self.check()
        name = self.rng.choice(("down", "o"))
        leaf = self.rng.choice([leaf for path, leaf in walk(self.params.tree) if path[-1] == name])
        with torch.no_grad():
            leaf.copy_(leaf.roll(1, 0))
        self.reference = reference_of(self.params)
        self.counts["weights changed"] += 1

    def captures(self) -> list[str]:
        return [line for line in self.reports if line.startswith("captured ")]

    def device_bytes(self) -> int:
        return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0

    def result(self, problems: list[str], moves: int, seconds: float) -> dict:
        """Counts, faults and figures, and whether all is well."""
        machines = {id(one.engine.machine): one.engine.machine for one in self.players}.values()
        runners = [runner for machine in machines for runner in machine.runners.values()]
        graphs, functions = (sum(len(getattr(r, name)) for r in runners) for name in ("graphs", "compiled"))
        again = dict(captured=len(self.captures()) - graphs)
        if self.s.compile in TRACED_MODES:
            again["compiled"] = graphs_traced() - functions
        memory, grown = growth(self.memory)
        counts = sum((one.counts for one in self.players), self.counts)
        if any(again.values()) and self.params.tree["norm"].is_cuda:  # sizes are padded to buckets there alone
            problems.append(f"compiled or captured twice: {again}")
        problems += [f"{name} memory grew: {memory}" for name in grown]
        return dict(
            ok=not (self.faults or problems),
            faults=self.faults,
            problems=problems,
            shown_faults=self.verdict.faults,
            moves=moves,
            seconds=round(seconds, 1),
            tokens_checked=self.verdict.tokens,
            tokens_excused=self.verdict.excused,
            largest_logprob_error=self.verdict.largest_logprob_error,
            tolerance=self.tolerance,
            counts=dict(sorted(counts.items())),
            steps_built=len(runners),
            graphs=graphs,
            functions=functions,
            built_again=again,
            memory=memory,
        )


def resident_bytes() -> int:
    """The host's memory that this process has now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def growth(samples: list[tuple[int, int, int]]) -> tuple[dict, list[str]]:
    """Means of the first and the last quarter, the first tenth left out, and which memory grew beyond what may be."""
    samples = samples[len(samples) // 10 :]
    quarter = len(samples) // 4
    if not quarter:
        return {}, []
    parts = [[statistics.fmean(column) for column in zip(*part, strict=True)]
             for part in (samples[:quarter], samples[-quarter:])]  # fmt: skip
    (host, device, graphs), (host_after, device_after, graphs_after) = parts
    allowed = PER_GRAPH * (graphs_after - graphs)
    grown = []
    if host_after - host > HOST_GROWTH + allowed:
        grown.append("host")
    if device_after - device > DEVICE_GROWTH + allowed:
        grown.append("device")
    figures = dict(host=(host, host_after), device=(device, device_after), graphs=(graphs, graphs_after))
    return {f"{name}_first_and_last_quarter": pair for name, pair in figures.items()}, grown


def soak(**settings: Any) -> dict:
    """A run on new random weights; the settings are those of the command line."""
    s = SimpleNamespace(**settings)
    params = random_params(s.size, dtype=s.dtype, device=s.device, lively=True)
    return Soak(params, s).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--moves", type=int, default=0, help="make so many moves in place of minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", choices=list(SIZES), default="small" if on_gpu else "tiny")
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16" if on_gpu else "float32")
    parser.add_argument("--compile", default="graphs" if on_gpu else "none", help="the engines' compile mode")
    parser.add_argument(
        "--few", action=argparse.BooleanOptionalAction, default=on_gpu,
        help="few kinds of requests, so that few steps are compiled (default: on a GPU)",
    )  # fmt: skip
    parser.add_argument("--tolerance", type=float, help="of a logit; default: by the dtype")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    result = dict(**provenance(), settings=settings, **soak(**settings))
    text = json.dumps(result, indent=1)
    if args.out:
        args.out.write_text(text + "\n")
    print(text)
    sys.exit(not result["ok"])


if __name__ == "__main__":
    main()
