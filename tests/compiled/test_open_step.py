"""The open step under torch.compile: what is traced, how often, and that values are the eager ones."""

from dataclasses import replace

import pytest
import torch
import torch._dynamo.testing
from examples_of import EXAMPLES, example
from tracing import first_layers, traced_by, two_layers

import fnllm
from fnllm.buckets import common_buckets, padding
from fnllm.layers import attend, attention, mlp
from fnllm.sampler import SamplerFeatures

pytestmark = pytest.mark.compiled
ORACLE = EXAMPLES.parent / "tests" / "oracle"
PROMPTS = [[3, 14, 15, 92, 65, 35, 89, 79, 33], [8, 9, 79], [31, 41, 59, 26, 53]]
GREEDY = fnllm.Sampling(temperature=0, max_tokens=6, ignore_eos=True)
SMALL = {"num_blocks": 64, "block_size": 4}
SITE = "layers.1.resid_post"


@pytest.fixture
def params():
    torch.set_num_threads(1)
    torch._dynamo.reset()
    return two_layers(fnllm.load(ORACLE / "qwen3-tiny", device="cpu"))


@pytest.fixture
def single(params):
    """One layer, for what does not ask how layers follow one another."""
    return first_layers(params, 1)


@pytest.fixture
def counter(monkeypatch):
    """Steps are traced as always and run without Inductor; `counter.frame_count` is how many graphs were made."""
    counter = torch._dynamo.testing.CompileCounter()
    monkeypatch.setattr(torch, "compile", traced_by(counter))
    return counter


def vector(seed):
    return 3 * torch.randn(48, generator=torch.Generator().manual_seed(seed))


def call(params, edits=(), capture=None, **options):
    return fnllm.generate(params, PROMPTS, GREEDY, edits=edits, capture=capture, **{**SMALL, **options})


def test_other_values_and_other_requests_trace_nothing_more(params, counter):
    options = {"compile": "inductor", "prefix_cache": False}
    capture = [fnllm.Capture(SITE, "prompt"), None, None]
    first = call(params, [None, [fnllm.steer(SITE, vector(1))], None], capture, **options)
    made = counter.frame_count
    again = call(params, [[fnllm.steer(SITE, vector(2))], None, None], capture, **options)
    assert counter.frame_count == made > 0
    eager = call(params, [None, [fnllm.steer(SITE, vector(1))], None], capture, prefix_cache=False)
    assert [out.token_ids for out in first] == [out.token_ids for out in eager]
    assert again[1].token_ids != first[1].token_ids
    torch.testing.assert_close(first[0].captured[SITE], eager[0].captured[SITE], rtol=1e-4, atol=1e-4)


def without_three(logits, history):
    return logits.index_fill(-1, torch.tensor([3], device=logits.device), -torch.inf)


def halved(logits, history):
    return logits / 2


def test_a_permutation_of_requests_traces_nothing_more(single, counter):
    options = {"compile": "inductor", "prefix_cache": False}
    requests = [[fnllm.steer("layers.0.resid_post", vector(1))], [fnllm.ablate("layers.0.mlp_out", vector(2))], None]
    call(single, requests, **options)
    made = counter.frame_count
    call(single, [requests[1], None, requests[0]], **options)
    assert counter.frame_count == made > 0
    sampling = [replace(GREEDY, logits_fn=function) for function in (without_three, halved, None)]
    fnllm.generate(single, PROMPTS, sampling, **SMALL, **options)
    made = counter.frame_count
    fnllm.generate(single, PROMPTS, [sampling[1], sampling[2], sampling[0]], **SMALL, **options)
    assert counter.frame_count == made


def test_weights_written_in_place_trace_nothing_more(single, counter):
    counts = []
    for _ in range(3):
        call(single, compile="inductor")
        counts.append(counter.frame_count)
        with torch.no_grad():
            single.tree["layers"][0]["down"].mul_(1.1)
    assert counts[0] > 0 and counts == counts[:1] * 3


def test_all_sizes_of_steps_with_prefill_are_one_graph(params, counter):
    engine = fnllm.engine(params, compile="inductor", max_num_seqs=20, max_num_batched_tokens=3000, **SMALL)
    machine, counts = engine.machine, []
    runner = machine.runner(engine.variant, SamplerFeatures(), params.tree)
    with torch.no_grad():
        for bucket in common_buckets(machine.settings):
            if bucket.tokens is not None:
                inputs = padding(bucket.entries, bucket.tokens, None, scratch_row=20)
                runner(params.tree, inputs, max_context=bucket.max_context, as_graph=True, report=[].append)
                counts.append(counter.frame_count)
    assert len(counts) == 11 and set(counts) == {1}


def test_weights_of_a_second_model_have_fixed_sizes(monkeypatch):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch, "compile", traced_by(counter))
    for name in ("qwen3-odd", "qwen3-tiny"):  # of widths 36 and 48
        call(first_layers(fnllm.load(ORACLE / name, device="cpu"), 1), compile="inductor")
    for graph in counter.graphs:
        inputs = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
        widths = [x.shape for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point()]
        assert widths and all(isinstance(size, int) for shape in widths for size in shape)


@pytest.mark.parametrize("kind", ["layer", "logits_fn"])
def test_a_function_may_hold_more_numbers_one_after_the_other_than_are_traced_for_one_step(single, counter, kind):
    held = [1.0]

    def scaled(p, x, ctx):
        return mlp(p, x, ctx) * held[0]

    def leaning(logits, history):
        return logits + held[0] * torch.arange(logits.shape[1])

    def tokens(**options):
        layers = fnllm.Layers()._replace(mlp=scaled) if kind == "layer" else None
        sampling = GREEDY if kind == "layer" else replace(GREEDY, logits_fn=leaning)
        several = [PROMPTS, *([prompt] for prompt in PROMPTS[:2]), [[7]]]  # one entry of several tokens, and of one
        calls = [fnllm.generate(single, prompts, sampling, layers=layers, **SMALL, **options) for prompts in several]
        return [[out.token_ids for out in outs] for outs in calls]

    with torch._dynamo.config.patch(recompile_limit=4):
        for number in range(4):
            held[0] = 0.3 * number
            assert tokens(compile="inductor") == tokens(), number


def test_a_swap_costs_one_step_more_and_leaves_the_plain_one_alone(single, counter):
    swaps = example("swap_layers")
    options = {"compile": "inductor", "prefix_cache": False}
    call(single, **options)
    plain = counter.frame_count
    layers = fnllm.Layers()._replace(mlp=swaps.relu2_mlp)
    call(single, layers=layers, **options)
    swapped = counter.frame_count
    assert plain < swapped
    call(single, **options)
    call(single, layers=layers, **options)
    assert counter.frame_count == swapped


@pytest.mark.parametrize("name", ["a window with sinks", "a sampler of one's own"])
def test_swap_examples_trace_whole(single, counter, name):
    layers = example("swap_layers").SWAPS[name]
    compiled = call(single, compile="inductor", layers=layers)
    assert [out.token_ids for out in compiled] == [out.token_ids for out in call(single, layers=layers)]


def test_int8_weights_trace_whole(single, counter):
    swaps = example("swap_layers")
    quantised, layers = swaps.quantised(single), fnllm.Layers()._replace(linear=swaps.int8_linear)
    compiled = call(quantised, compile="inductor", layers=layers)
    assert [out.token_ids for out in compiled] == [out.token_ids for out in call(quantised, layers=layers)]


def item_mlp(p, x, ctx):
    return x if x.sum().item() > 0 else -x


def test_a_function_that_cannot_be_traced_is_named(params):
    layers = fnllm.Layers()._replace(mlp=item_mlp)
    with pytest.raises(
        TypeError, match=r"layers\.mlp \(item_mlp\) cannot be traced by torch\.compile: .*compile='none'"
    ):
        call(params, compile="inductor", layers=layers)
    assert call(params, layers=layers)[0].finish_reason == "length"  # eager, it runs


def read_history(logits, history):
    """Cuts a tensor at a number on the device, of which Dynamo's own error escapes unwrapped."""
    read = [tokens[:length].tolist() for tokens, length in zip(history.tokens, history.lengths, strict=True)]
    return logits - len(read)


def test_a_logits_fn_that_cannot_be_traced_is_named(params):
    with pytest.raises(TypeError, match=r"logits_fn \(read_history\) cannot be traced by torch\.compile: "):
        fnllm.generate(params, PROMPTS, replace(GREEDY, logits_fn=read_history), **SMALL, compile="inductor")


def test_functions_that_tell_layers_apart_pass_the_trial(counter):
    """In a step the layer's index is a constant, so there are as many traces as layers and none of a changing index."""
    torch._dynamo.reset()
    whole = fnllm.load(ORACLE / "qwen3-tiny", device="cpu")
    count = 10  # more than torch.compile makes of one function by itself
    config = whole.config
    many = replace(
        config,
        num_hidden_layers=count,
        sliding_window=config.sliding_window[:1] * count,
        sparse_layers=config.sparse_layers[:1] * count,
    )
    params = whole._replace(config=many, tree={**whole.tree, "layers": whole.tree["layers"][:1] * count})
    by_name = {f"layers.{index}": torch.full((48,), 0.1 * index) for index in range(count)}
    in_place = torch.nn.ModuleList(torch.nn.Linear(48, 48) for _ in range(count)).requires_grad_(False)

    def looked_up(p, x, ctx):
        return in_place[ctx.layer](mlp(p, x, ctx)) + by_name[f"layers.{ctx.layer}"]

    layers = fnllm.Layers()._replace(mlp=looked_up)
    compiled, eager = call(params, layers=layers, compile="inductor"), call(params, layers=layers)
    assert [out.token_ids for out in compiled] == [out.token_ids for out in eager]


@pytest.mark.parametrize("name", ["attend", "attention"])
def test_a_function_around_the_usual_one_passes_the_trial(params, counter, name):
    """The eager step's plan of attention is no input of a trace, nor are the watchers of edits."""
    layers = fnllm.Layers()._replace(**{name: {"attend": half_attend, "attention": half_attention}[name]})
    edits = fnllm.Edit("layers.1.q", doubled)
    compiled, eager = (call(params, edits, layers=layers, **options) for options in ({"compile": "inductor"}, {}))
    assert [out.token_ids for out in compiled] == [out.token_ids for out in eager]


def half_attend(q, k, v, ctx):
    return 0.5 * attend(q, k, v, ctx)


def half_attention(p, x, ctx):
    return 0.5 * attention(p, x, ctx)


def doubled(x, ctx):
    return 2 * x


def item_edit(x, ctx):
    return x if x.sum().item() > 0 else -x


def test_an_edit_that_cannot_be_traced_is_named(params):
    edits = fnllm.Edit(SITE, item_edit)
    with pytest.raises(TypeError, match=r"the edit at layers\.1\.resid_post \(item_edit\) cannot be traced by torch"):
        call(params, edits, compile="inductor")
    assert call(params, edits)[0].finish_reason == "length"


def item_edit_in_decode(x, ctx):
    return x if ctx.batch.max_seqlen > 1 or x.sum().item() > 0 else -x


def test_an_edit_that_cannot_be_traced_in_decode_is_named(params):
    with pytest.raises(TypeError, match=r"\(item_edit_in_decode\) cannot be traced by torch"):
        call(params, fnllm.Edit(SITE, item_edit_in_decode), compile="inductor")


@pytest.mark.slow
def test_edits_and_captures_through_inductor():
    torch._dynamo.reset()
    params = two_layers(fnllm.load(ORACLE / "qwen3-moe-mixed", device="cpu"))  # one dense, one of experts
    assert [sorted(layer.keys() & {"down", "router"}) for layer in params.tree["layers"]] == [["down"], ["router"]]
    edits = [[fnllm.steer(SITE, vector(1))], None, [fnllm.ablate("layers.0.resid_mid", vector(2))]]
    capture = [None, fnllm.Capture(("layers.*.resid_post", "layers.0.q", "logits")), fnllm.Capture(SITE, "output")]
    compiled, eager = call(params, edits, capture, compile="inductor"), call(params, edits, capture)
    for a, b in zip(compiled, eager, strict=True):
        assert a.token_ids == b.token_ids and a.captured_at == b.captured_at
        for site, x in a.captured.items():
            torch.testing.assert_close(x, b.captured[site], rtol=1e-4, atol=1e-4)
