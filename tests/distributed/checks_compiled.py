"""Checks of the compiled step on two ranks: it gives the results of one rank's eager step.

Through Inductor, as users run it, goes a step with captures, edits and other layers. The checkpoints that reach all of
the layers' code and the open step are traced in the same way, and the graph runs as torch's own operations: code
generation would take each rank half a minute of every checkpoint.
FNLLM_TEST_INDUCTOR sends more of it through Inductor: names of checkpoints, `open` for the open step and the crowded
pool, or `all`; `traced` traces every checkpoint.
"""

import contextlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

import fnllm

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import checks_equal
import checks_open
import tracing
from checks_equal import CHECKPOINTS, ORACLE, UNLIKE, cases_of, greedy, tight
from checks_exchanges import exchanges, expect_exact

WANTED = os.environ.get("FNLLM_TEST_INDUCTOR", "mixed").split(",")
INDUCTOR = [name for name in CHECKPOINTS if name in WANTED or "all" in WANTED]
TRACED = CHECKPOINTS if "traced" in WANTED else sorted({*UNLIKE, *INDUCTOR})
FIRST = INDUCTOR or ["qwen3-odd"]
PROMPTS = [[24, 3, 8, 5, 9, 11, 97], [97, 3, 8, 5, 9, 64, 2]]  # of one length and unlike: two kinds of step
SAMPLING = fnllm.Sampling(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
SIZES = {"num_blocks": 32, "max_num_seqs": 4, "block_size": 4, "max_chunk": 5}


def as_traced(unless: str = "") -> contextlib.AbstractContextManager:
    """The graph runs as it is; `unless` one of these or all was wanted through Inductor."""
    wanted = bool({*unless.split(), "all"} & {*WANTED})
    return contextlib.nullcontext() if wanted else tracing.without_code_generation()


def short(name: str, compile: str) -> list:
    """Two prompts in chunks, twice: the second time their first block is cached."""
    params = tracing.two_layers(fnllm.load(ORACLE / name))
    outs = [fnllm.generate(params, PROMPTS, SAMPLING, compile=compile, **SIZES) for _ in range(2)]
    return [(c.token_ids, c.cached_tokens, logprobs_of([c])) for some in outs for c in some]


def crowded(name: str, compile: str) -> list:
    """The checkpoint's own prompts in chunks, in a pool that holds hardly more than the longest, twice."""
    params = tracing.two_layers(fnllm.load(ORACLE / name))
    cases = cases_of(json.loads((ORACLE / name / "golden.json").read_text()))
    prompts, sampling = [case["prompt"] for case in cases], replace(greedy(), logprobs=2)
    outs = [fnllm.generate(params, prompts, sampling, compile=compile, **tight(cases)) for _ in range(2)]
    (machine,) = params.workspace.values()
    preemptions = machine.idle.scheduler.counters.preemptions
    return [*map(checks_equal.outcome, outs), preemptions, *map(logprobs_of, outs)]


def logprobs_of(completions: list[fnllm.Completion]) -> torch.Tensor:
    return torch.tensor([entry.logprob for c in completions for entry in c.logprobs])


def opened(compile: str, prefix_cache: bool) -> list:
    params = tracing.two_layers(fnllm.load(ORACLE / "qwen3-odd"))
    options = {"compile": compile, "prefix_cache": prefix_cache}
    return [checks_open.captured(params, **options), checks_open.states(params, **options)]


def mixed(compile: str) -> list:
    """Captures, edits and other layers in one step, of a checkpoint with windows and biases."""
    params = tracing.two_layers(fnllm.load(ORACLE / "qwen2-window"))
    edits = [fnllm.steer("layers.1.resid_post", checks_open.vector(params.config.hidden_size, 1))]
    outs = fnllm.generate(
        params, PROMPTS, SAMPLING, edits=[edits, None], capture=["layers.1.q", ("layers.1.v", "logits")],
        layers=checks_open.swapped(), compile=compile, **SIZES,
    )  # fmt: skip
    return [(c.token_ids, c.captured_at, c.captured) for c in outs]


def on_one_rank() -> dict:
    return {
        "short": {name: short(name, "none") for name in TRACED},
        "mixed": mixed("none"),
        "crowded": {name: crowded(name, "none") for name in ("qwen3-odd",)},
        "opened": opened("none", prefix_cache=True),
    }


def check_exchanges_through_inductor(expected: dict) -> None:
    expect_exact(torch.compile(exchanges, fullgraph=True, dynamic=True))


def check_fault_76_compiled_ranks_give_the_tokens_of_one_eager_rank(expected: dict) -> None:
    with as_traced(" ".join(INDUCTOR)):
        for name in FIRST:
            expect_chunks_and_cached(name, expected)


def check_captures_edits_and_swaps_in_one_step(expected: dict) -> None:
    # Through Inductor always: it once read a sum before the ranks had added to it, in this step and no simpler one.
    with as_traced("mixed open"):
        checks_open.expect(mixed("inductor"), expected["mixed"])


def check_the_other_checkpoints_in_chunks_and_over_cached_prefixes(expected: dict) -> None:
    with as_traced():
        for name in sorted({*TRACED} - {*FIRST}):
            expect_chunks_and_cached(name, expected)


def expect_chunks_and_cached(name: str, expected: dict) -> None:
    one = expected["short"][name]
    checks_open.expect(short(name, "inductor"), one, name)
    assert [cached for _, cached, _ in one] == [0, 0, 4, 4], name


def check_preemption_in_a_crowded_pool(expected: dict) -> None:
    with as_traced("open"):
        for name, one in expected["crowded"].items():
            checks_open.expect(crowded(name, "inductor"), one, name)
            assert one[2] > 0, name


def check_captures_edits_and_states_over_the_prefix_cache(expected: dict) -> None:
    with as_traced("open"):
        checks_open.expect(opened("inductor", prefix_cache=True), expected["opened"])
