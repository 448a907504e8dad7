"""The GPU's path on a CPU: the fused kernels have plain forms there, so the path through the layers needs no GPU."""

import sys
from pathlib import Path

import pytest
import torch

import fnllm
import fnllm.layers
import fnllm.numerics

sys.path.append(str(Path(__file__).parents[2] / "distributed"))

import checks_open
from tiny_models import tiny

NAMES = ("qwen3-odd", "qwen2-window", "qwen3-moe-mixed", "llama-tiny")


@pytest.fixture
def device_path(monkeypatch):
    """Called, sends what follows through the functions that a GPU runs."""

    def on():
        chosen = fnllm.numerics.layers_for
        monkeypatch.setattr(fnllm.layers, "on_device", lambda x, ctx: ctx.cache is not None)
        monkeypatch.setattr(fnllm.numerics, "by_kernels", lambda x: x.dtype != torch.float64)
        monkeypatch.setattr("fnllm.machine.layers_for", lambda layers, numerics, on_gpu: chosen(layers, numerics, True))

    return on


@pytest.mark.parametrize("name", NAMES)
def test_captures_edits_swaps_and_states_are_those_of_the_plain_path(name, device_path):
    expected = checks_open.all_of(name)
    device_path()
    checks_open.expect(checks_open.all_of(name), expected, name)


@pytest.mark.parametrize("name", NAMES)
def test_swapped_norm_and_linear_meet_the_shapes_that_the_plain_path_gives(name, device_path):
    def norm(p, x, ctx):
        return fnllm.layers.norm(p, x, ctx) * 0.5

    def linear(p, x, ctx):
        return fnllm.layers.linear(p, x, ctx) * 1.5

    def tokens():
        params = fnllm.load(checks_open.ORACLE / name)
        layers = fnllm.Layers()._replace(norm=norm, linear=linear)
        outs = fnllm.generate(params, checks_open.PROMPTS, checks_open.GREEDY, layers=layers, **checks_open.SIZES)
        return [out.token_ids for out in outs]

    expected = tokens()
    device_path()
    assert tokens() == expected


@pytest.mark.parametrize("name", NAMES)
def test_invariant_numerics_capture_score_and_give_gradients(name, device_path):
    def found():
        params = fnllm.load(checks_open.ORACLE / name)
        options = dict(numerics="batch_invariant", **checks_open.SIZES)
        outs = fnllm.generate(params, checks_open.PROMPTS, checks_open.GREEDY, capture="layers.1.k", **options)
        leaf = params.tree["layers"][0]["qkv"].requires_grad_()
        scored = fnllm.score(params, [[*p, 3, 4] for p in checks_open.PROMPTS], numerics="batch_invariant")
        sum(x.sum() for x in scored).backward()
        return [[(out.token_ids, out.captured) for out in outs], [x.detach() for x in scored], leaf.grad]

    expected = found()
    device_path()
    checks_open.expect(found(), expected, name)


def test_a_bias_made_in_the_step_is_not_fetched_early(device_path, monkeypatch):
    params, product, asked = tiny(architectures=("LlamaForCausalLM",), mlp_bias=True), fnllm.layers.small_linear, []

    def small_linear(x, w, *, gated=False, fixed=False, **named):
        if gated:
            asked.append(fixed)
        return product(x, w, gated=gated, fixed=fixed, **named)

    def mlp(p, x, ctx):
        return fnllm.layers.mlp({**p, "gate_up_bias": p["gate_up_bias"] + 1}, x, ctx)

    device_path()
    monkeypatch.setattr(fnllm.layers, "small_linear", small_linear)
    for layers, fixed in ((fnllm.Layers(), True), (fnllm.Layers()._replace(mlp=mlp), False)):
        fnllm.generate(params, [[1, 2, 3]], fnllm.Sampling(temperature=0, max_tokens=2), layers=layers)
        assert set(asked) == {fixed}
        asked.clear()


@pytest.fixture
def attention_checked(monkeypatch):
    """The bounds that attention's plans were made for; each call of attention must come with its plan's own."""
    bounds = set()

    def plan(*args, max_context, window, max_seqlen_q, **named):
        bounds.add(max_context)
        return torch.tensor([max_context, window, max_seqlen_q])

    def checked(function):
        def run(*args, metadata, **named):
            asked = [named["max_context"], named["window"], named.get("max_seqlen_q", 1)]
            assert metadata.tolist() == asked, "kernels do not recognise another bound's plan, and read what it has not"
            return function(*args, metadata=None, **named)

        return run

    monkeypatch.setattr("fnllm.step.attention_metadata", plan)
    for name in ("paged_attention", "qk_norm_rope_attention"):
        monkeypatch.setattr(fnllm.layers, name, checked(getattr(fnllm.layers, name)))
    monkeypatch.setattr("fnllm.machine.backends_for", lambda *args: ("triton", "triton"))
    monkeypatch.setattr("fnllm.buckets.SHORT_CONTEXT", 12)
    return bounds


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["qwen3-odd", "qwen2-window"])
def test_attention_meets_the_plan_of_its_own_bound(name, fused, device_path, request):
    def tokens():
        params = fnllm.load(checks_open.ORACLE / name)
        outs = fnllm.generate(params, checks_open.PROMPTS, checks_open.GREEDY, **checks_open.SIZES)
        return [out.token_ids for out in outs]

    expected = tokens()
    bounds = request.getfixturevalue("attention_checked")
    if fused:
        device_path()
    assert tokens() == expected and bounds == {0, 12, 64}
