"""Reported faults of compiled and captured steps: traced on a CPU, compiled and in CUDA graphs where there is a GPU."""

import contextlib
import dataclasses
import re

import pytest
import torch
from tiny_models import GREEDY, ORACLE
from tracing import two_layers, without_code_generation

import fnllm

pytestmark = pytest.mark.compiled
SIZES = {"num_blocks": 60, "block_size": 4, "max_model_len": 64, "max_num_seqs": 4}
MODES = [("cpu", "inductor"), pytest.param(("cuda", "reduce-overhead"), marks=pytest.mark.gpu)]
PROMPT = [3, 14, 15, 92, 65]


@pytest.fixture(scope="module", params=MODES, ids=lambda mode: mode[0])
def compiled(request):
    """(params, engine options, what was reported) of one machine, compiled by a first call."""
    device, mode = request.param
    torch._dynamo.reset()
    # What Inductor makes of a graph matters to none of these.
    with without_code_generation() if device == "cpu" else contextlib.nullcontext():
        yield from machine(device, mode)


def machine(device, mode):
    params = two_layers(fnllm.load(ORACLE / "qwen3-tiny", device=device, dtype="float32"))
    options, lines = {**SIZES, "compile": mode}, []
    fnllm.engine(params, report=lines.append, **options)
    generate(params, 5, **options)
    yield params, options, lines


def generate(params, count, **options):
    sampling = dataclasses.replace(GREEDY, max_tokens=count)
    return fnllm.generate(params, [PROMPT], sampling, **options)[0]


def test_fault_68_outputs_of_a_step_outlive_the_next(compiled):
    params, options, _ = compiled
    kept = generate(params, 5, capture="logits", **options)
    eager = generate(params, 5, capture="logits", **{**options, "compile": "none"})
    assert kept.token_ids == eager.token_ids and kept.captured_at == eager.captured_at
    assert len({row.argmax().item() for row in kept.captured["logits"]}) > 2  # rows that differ, each step's own
    torch.testing.assert_close(kept.captured["logits"], eager.captured["logits"], rtol=1e-4, atol=1e-4)


def test_fault_69_growing_sequences_compile_and_capture_nothing_more(compiled):
    params, options, lines = compiled
    generate(params, 5, **options)
    traced, reported = torch._dynamo.utils.counters["stats"]["unique_graphs"], list(lines)
    out = generate(params, 40, **options)  # ten more blocks than the sequences before
    assert len(out.token_ids) == 40
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == traced
    assert lines == reported


def test_fault_69_batches_of_two_and_of_more_share_a_compiled_step(compiled):
    params, options, _ = compiled
    sampling = dataclasses.replace(GREEDY, max_tokens=4)
    counts = []
    for batch in (2, 3, 4, 2, 1):
        fnllm.generate(params, [PROMPT[: 2 + n % 3] for n in range(batch)], sampling, **options)
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts == counts[:1] * 5


def test_fault_70_a_layer_function_that_grows_its_result_is_refused(compiled):
    params, options, _ = compiled

    def growing(p, x, ctx):
        y = fnllm.layers.mlp(p, x, ctx)
        return torch.cat([y, y])

    with pytest.raises(ValueError, match=r"layers\.mlp.*growing"):
        generate(params, 3, layers=fnllm.Layers()._replace(mlp=growing), **options)
    assert len(generate(params, 3, **options).token_ids) == 3


def test_fault_72_what_is_compiled_is_told_with_its_seconds(compiled):
    _, options, lines = compiled
    word = "captured" if options["compile"] == "reduce-overhead" else "compiled"
    step = rf"{word} (prefill of \d+ tokens for \d+|decode of \d+) in \d+\.\d s"
    steps = [line for line in lines if re.fullmatch(step, line)]
    assert steps[0].startswith(f"{word} prefill of ") and steps[1].startswith(f"{word} decode of 1 in ")
