"""The machine behind the engines: what it finds again, what it builds anew, and whom it tells."""

import copy
import dataclasses
import gc
import itertools
import weakref

import numpy as np
import pytest
import torch
from tiny_models import GREEDY, tiny

import fnllm
import fnllm.built
import fnllm.machine
from fnllm.batch import StepInputs
from fnllm.buckets import HostInputs
from fnllm.compiled import Recorded, places
from fnllm.held import in_own_containers, same_tensors
from fnllm.sampler import SamplerFeatures

SMALL = {"max_model_len": 40, "max_num_seqs": 4, "block_size": 4, "num_blocks": 30}
PROMPT = [3, 1, 2, 4]
SHORT = dataclasses.replace(GREEDY, max_tokens=8)


class Adapter(torch.nn.Module):
    """The usual MLP and a multiple of its input."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, p, x, ctx):
        return fnllm.layers.mlp(p, x, ctx) + x * self.scale


def generate(params, **options):
    return fnllm.generate(params, PROMPT, SHORT, **{**SMALL, **options})[0]


@pytest.mark.parametrize("capture", [None, fnllm.Capture("final_norm", "prompt")], ids=["plain", "capture"])
def test_a_steady_decode_finds_its_step_without_making_a_spec(monkeypatch, capture):
    params, made = tiny(0)._replace(workspace={}), []
    usual = fnllm.machine.layers_for
    monkeypatch.setattr("fnllm.machine.layers_for", lambda *args, **named: made.append(None) or usual(*args, **named))
    generate(params, capture=capture)
    assert len(made) == (1 if capture is None else 2), "one for the steps that capture, one for those that do not"


@pytest.mark.parametrize("numerics", ["default", "batch_invariant"])
@pytest.mark.parametrize("told", [False, True])
def test_graphs_go_with_the_weights_whose_addresses_they_hold(monkeypatch, numerics, told):
    """Also for functions that the mode swaps on a GPU, and where `weights_changed` came before the next look."""
    usual = fnllm.machine.layers_for

    def on_gpu_if_asked(layers, mode, on_gpu=None):
        return usual(layers, mode, on_gpu is not None)

    monkeypatch.setattr("fnllm.machine.layers_for", on_gpu_if_asked)
    params, adapter = tiny(0)._replace(workspace={}), Adapter()
    swapped = {"layers": fnllm.Layers()._replace(mlp=adapter), "numerics": numerics}
    generate(params, **swapped)
    (machine,) = params.workspace.values()
    (runner,) = machine.runners.values()
    runner.graphs["a bucket"] = "a graph"
    adapter.scale = torch.nn.Parameter(torch.tensor(0.7))
    if told:
        fnllm.weights_changed(params)
    machine.version_of(params, fnllm.engine(params, **swapped, **SMALL).variant)
    assert not runner.graphs


def give_storage(tree):
    tree["layers"][1]["down"].data = tree["layers"][1]["down"].data.clone()


def give_tensor(tree):
    tree["layers"][1]["down"] = tree["layers"][1]["down"].clone()


def give_strides(tree):
    """The same memory, read otherwise."""
    weight = tree["layers"][1]["down"]
    tree["layers"][1]["down"] = weight.as_strided(weight.shape, (1, weight.shape[0]))


@pytest.mark.parametrize("move", [give_storage, give_tensor, give_strides])
def test_graphs_go_with_parameters_that_move_within_their_tree(move, unchecked):
    mine, others = (copy.deepcopy(tiny(0).tree) for _ in range(2))
    params = tiny(0)._replace(tree=mine, workspace={})
    generate(params)
    (machine,) = params.workspace.values()
    (runner,) = machine.runners.values()
    for name, tree in (("mine", mine), ("others", others)):
        runner.graphs[name] = Recorded(None, None, None, None, tree, places(tree))
    generate(params._replace(tree=others))
    generate(params)
    assert [*runner.graphs] == ["mine", "others"], "trees that take turns leave each other's graphs alone"
    move(mine)
    generate(params)
    assert [*runner.graphs] == ["others"]


def test_a_graph_does_not_serve_a_tree_that_reads_its_memory_otherwise():
    tree = copy.deepcopy(tiny(0).tree)
    other = {**tree, "layers": [dict(layer) for layer in tree["layers"]]}
    assert places(tree) == places(other)
    give_strides(other)
    assert places(tree) != places(other)


class Bias:
    """A logits_fn that favours a token."""

    def __init__(self, token):
        self.bias = torch.zeros(tiny(0).config.vocab_size)
        self.bias[token] = 1e4

    def __call__(self, logits, history):
        return logits + self.bias


@pytest.mark.parametrize("while_it_runs", [False, True])
def test_graphs_go_with_what_a_logits_fn_holds(while_it_runs):
    """Also where it changes under a request that runs; the next step draws by it."""
    params, function = tiny(0)._replace(workspace={}), Bias(5)
    engine = fnllm.engine(params, **SMALL)
    request = engine.request(PROMPT, dataclasses.replace(SHORT, logits_fn=function))
    state, one = fnllm.add(engine.init(), request)
    state, _ = engine.step(state)
    (runner,) = engine.machine.runners.values()
    runner.graphs["a bucket"] = "a graph"
    state, _ = engine.step(state)
    assert runner.graphs
    function.bias = Bias(7).bias
    if not while_it_runs:
        state, one = fnllm.add(fnllm.abort(state, one), request)
    state, _ = engine.step(state)
    assert not runner.graphs and fnllm.tokens(state, one)[-1] == 7


def test_a_logits_fn_may_look_at_the_last_token_of_every_row():
    """Beside a request that has none, and whose row nobody looks back to."""

    def unrepeated(logits, history):
        last = history.tokens.gather(1, (history.lengths - 1)[:, None]).long()
        return logits.scatter(1, last, -torch.inf)

    params = tiny(0)._replace(workspace={})
    own = dataclasses.replace(SHORT, logits_fn=unrepeated)
    (alone,) = fnllm.generate(params, [PROMPT], own, **SMALL)
    beside, plain = fnllm.generate(params, [PROMPT, [5, 6, 7]], [own, SHORT], **SMALL)
    assert beside.token_ids == alone.token_ids
    assert plain.token_ids == fnllm.generate(params, [[5, 6, 7]], SHORT, **SMALL)[0].token_ids


def test_what_was_filled_by_a_number_that_held_for_a_while_is_not_found_under_the_one_before():
    params, scale = tiny(0)._replace(workspace={}), [1.0]

    def mlp(p, x, ctx):
        return fnllm.layers.mlp(p, x, ctx) * scale[0]

    layers = fnllm.Layers()._replace(mlp=mlp)
    engine = fnllm.engine(params, layers=layers, **SMALL)
    state, one = fnllm.add(engine.init(), engine.request(PROMPT, dataclasses.replace(SHORT, max_tokens=20)))
    state, _ = engine.step(state)
    scale[0] = 3.0
    for _ in range(14):
        state, _ = engine.step(state)
    scale[0] = 1.0
    known = list(fnllm.tokens(state, one))
    state, other = fnllm.add(state, engine.request(known, SHORT))
    state, step = engine.step(state)
    assert not dict(step.events.cached).get(other), "blocks that the number 3 has filled"
    expected = fnllm.score(params, [[*known, fnllm.tokens(state, other)[-1]]], layers=layers, capture="logits")
    assert fnllm.tokens(state, other)[-1] == int(expected[0].captured["logits"][len(known) - 1].argmax())


def test_a_function_that_held_nothing_is_noticed_once_it_holds_something():
    params, adapters = tiny(0)._replace(workspace={}), {}

    def mlp(p, x, ctx):
        y = fnllm.layers.mlp(p, x, ctx)
        return y + adapters["all"] * x if "all" in adapters else y

    def run():
        layers, prompt = fnllm.Layers()._replace(mlp=mlp), [3, 1, 2, 4, 5, 6, 7, 8, 9]
        return fnllm.generate(params, [prompt], SHORT, layers=layers, **SMALL)[0]

    assert run().cached_tokens == 0 and run().cached_tokens == 8
    adapters["all"] = torch.tensor(2.0)
    assert run().cached_tokens == 0


def test_what_a_logits_fn_holds_is_looked_at_before_its_steps_are_prepared(monkeypatch):
    """Else the first request's look would be the first one, at which graphs go."""
    params, function = tiny(0)._replace(workspace={}), Bias(5)
    engine = fnllm.engine(params, **SMALL)
    sampling = dataclasses.replace(SHORT, logits_fn=function)
    engine.prepare(sampling)
    features = fnllm.sampler.rounded(fnllm.sampler.features_of([sampling], eos_token_ids=params.config.eos_token_ids))
    runner = engine.machine.runner(engine.variant, features, params.tree)
    runner.graphs["a bucket"] = "a graph"
    state, _ = fnllm.add(engine.init(), engine.request(PROMPT, sampling))
    engine.step(state)
    assert runner.graphs


def test_prepare_tries_functions_without_gradients(monkeypatch):
    params, seen = tiny(0)._replace(workspace={}), []
    engine = fnllm.engine(params, **SMALL)
    monkeypatch.setattr("fnllm.options.Settings.captured", True)
    monkeypatch.setattr("fnllm.machine.common_buckets", lambda settings: [])
    monkeypatch.setattr(fnllm.machine.Machine, "runner", lambda *args: seen.append(torch.is_grad_enabled()))
    engine.prepare(SHORT)
    assert seen == [False]


def begun(params, **options):
    """An engine whose one sequence has run a step, with that state."""
    engine = fnllm.engine(params, **SMALL, **options)
    state, seq_id = fnllm.add(engine.init(), engine.request(PROMPT, SHORT))
    return engine, engine.step(state)[0], seq_id


def test_a_graph_goes_before_the_step_that_would_read_a_replaced_parameter(unchecked):
    """No new sequence has to come; the step that follows runs as on a tree that had the tensor all along."""
    mine = copy.deepcopy(tiny(0).tree)
    params = tiny(0)._replace(tree=mine, workspace={})
    engine, state, _ = begun(params)
    (runner,) = engine.machine.runners.values()
    runner.graphs["a bucket"] = Recorded(None, None, None, None, mine, places(mine))
    state, _ = engine.step(state)
    assert runner.graphs
    give_tensor(mine)
    state, _ = engine.step(state)
    assert not runner.graphs


@pytest.mark.parametrize("new_sequence", [False, True])
def test_a_parameter_replaced_by_what_the_layers_do_not_read_is_refused_by_the_step(new_sequence):
    """One of another width may go through, and compute something; the state before it goes on with the right one."""
    mine = copy.deepcopy(tiny(0).tree)
    engine, state, seq_id = begun(tiny(0)._replace(tree=mine, workspace={}))
    if new_sequence:
        state, _ = fnllm.add(state, engine.request(PROMPT, SHORT))
    weight = mine["layers"][1]["post_norm"]
    mine["layers"][1]["post_norm"] = weight[:1]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"params.layers\[1\].post_norm: expected Float\[H\]"):
            engine.step(state)
    mine["layers"][1]["post_norm"] = weight
    state, step = engine.step(state)
    while step is not None:
        state, step = engine.step(state)
    assert fnllm.tokens(state, seq_id)[len(PROMPT) :] == generate(tiny(0)).token_ids


def test_a_parameter_replaced_between_preparing_and_the_first_step_is_noticed(unchecked):
    mine = copy.deepcopy(tiny(0).tree)
    params = tiny(0)._replace(tree=mine, workspace={})
    engine = fnllm.engine(params, **SMALL)
    engine.prepare(SHORT)
    runner = engine.machine.runner(engine.variant, SamplerFeatures(), mine)
    runner.graphs["a bucket"] = Recorded(None, None, None, None, mine, places(mine))
    give_tensor(mine)
    generate(params)
    assert not runner.graphs


def test_a_tensor_is_the_same_only_if_it_is_that_very_one():
    def equal():
        return {"a": [torch.ones(1), (torch.ones(3, 2), torch.zeros(()))], "b": torch.ones(2)}

    tree = equal()
    kept = in_own_containers(tree)
    assert same_tensors(tree, kept) and not same_tensors(equal(), kept) and not same_tensors(tree, None)
    for container, key in ((tree, "b"), (tree["a"], 0)):
        usual = container[key]
        for other in (usual.clone(), (usual,), torch.ones(7), usual.to("meta")):
            container[key] = other
            assert not same_tensors(tree, kept)
        container[key] = usual
        assert same_tensors(tree, kept)
    tree["c"] = tree["b"]
    assert not same_tensors(tree, kept)


def test_a_cache_goes_with_its_params_and_waits_for_no_collection():
    params = tiny(0)._replace(workspace={})
    generate(params)
    (machine,) = params.workspace.values()
    pool = weakref.ref(machine.resident.cache.k[0])
    was = gc.isenabled()
    gc.disable()
    try:
        del params, machine
        assert pool() is None
    finally:
        (gc.enable if was else gc.disable)()


def test_inputs_of_a_graph_that_were_sent_in_part_are_sent_again(unchecked):
    """As where an interrupt falls between two of them."""

    class Breaking:
        def copy_(self, new, non_blocking):
            raise KeyboardInterrupt

    params = tiny(0)._replace(workspace={})
    generate(params)
    ((runner,),) = (machine.runners.values() for machine in params.workspace.values())
    first, second = (HostInputs(np.array([n]), np.array([n > 0]), np.array([0, 1])) for n in range(2))
    inputs = StepInputs(torch.zeros(1, dtype=torch.int64), torch.zeros(1).bool(), torch.arange(2), None)
    graph = Recorded(None, inputs, None, None, params.tree, [])
    runner.refresh(graph, first)
    graph.inputs = inputs._replace(accept=Breaking())
    with pytest.raises(KeyboardInterrupt):
        runner.refresh(graph, second)
    graph.inputs = inputs
    runner.refresh(graph, first)
    assert inputs.row.tolist() == [0] and not inputs.accept.any()


@pytest.fixture
def each_step_compiled(monkeypatch):
    """Every step counts as one that had to be compiled, and none is."""
    monkeypatch.setattr("fnllm.compiled.graphs_traced", itertools.count().__next__)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


def test_each_engine_of_a_machine_tells_its_own_report(each_step_compiled):
    params, options = tiny(0)._replace(workspace={}), {**SMALL, "compile": "inductor"}
    told: dict[str, list[str]] = {"first": [], "second": []}
    engines = {name: fnllm.engine(params, report=lines.append, **options) for name, lines in told.items()}
    for name, other in (("first", "second"), ("second", "first")):
        told[other].clear()
        state, _ = fnllm.add(engines[name].init(), engines[name].request(PROMPT, SHORT))
        engines[name].step(state)
        assert [line.split(" in ")[0] for line in told[name]] == ["compiled prefill of 4 tokens for 1"]
        assert not told[other]


def test_generate_tells_the_report_that_was_given_last(each_step_compiled, capsys):
    params, lines, others = tiny(0)._replace(workspace={}), [], []
    generate(params, compile="inductor")
    fnllm.engine(params, report=others.append, **SMALL, compile="inductor")
    fnllm.engine(params, report=lines.append, **SMALL, compile="inductor")
    fnllm.engine(params, **SMALL, compile="inductor")
    generate(params, compile="inductor")
    assert len(lines) == 8 and not others


@pytest.mark.parametrize("kind", ["layer", "edit", "logits_fn"])
def test_functions_made_anew_for_each_call_do_not_pile_up(kind, monkeypatch):
    """As a lambda in a loop does: the steps of the last few are kept, and the plain ones."""
    monkeypatch.setattr(fnllm.built, "MOST_CHANGED", 3)
    params = tiny()._replace(workspace={})
    plain = generate(params)
    (machine,) = params.workspace.values()
    (usual,) = machine.runners.values()
    made = []

    def call(factor):
        held = torch.tensor(factor)
        if kind == "layer":
            changed = {"layers": fnllm.Layers()._replace(mlp=lambda p, x, ctx: held * fnllm.layers.mlp(p, x, ctx))}
        elif kind == "edit":
            changed = {"edits": fnllm.Edit("layers.0.mlp_out", lambda x, ctx: held * x)}
        else:
            changed = {"sampling": dataclasses.replace(SHORT, logits_fn=lambda logits, ids: held * logits)}
        found = fnllm.generate(params, PROMPT, **{"sampling": SHORT, **SMALL, **changed})[0]
        made.append(weakref.ref(list(machine.runners.values())[-1]))
        return found.token_ids

    first = [call(0.5 + i / 4) for i in range(7)]
    assert [one() is None for one in made] == 4 * [True] + 3 * [False]
    assert usual in machine.runners.values() and len(machine.runners) == 4
    assert len(machine.versions.seen) <= 5 and len(machine.built.tried) <= 7
    assert generate(params).token_ids == plain.token_ids
    assert call(0.5) == first[0] and len(machine.runners) == 4 and usual in machine.runners.values()


def test_functions_in_use_keep_their_steps(monkeypatch):
    monkeypatch.setattr(fnllm.built, "MOST_CHANGED", 2)
    params = tiny()._replace(workspace={})
    mine = fnllm.Layers()._replace(mlp=Adapter())
    generate(params, layers=mine)
    (machine,) = params.workspace.values()
    before = list(machine.runners.values())
    for _ in range(4):
        generate(params, layers=fnllm.Layers()._replace(mlp=Adapter()))
        generate(params, layers=mine)
    assert set(before) <= set(machine.runners.values()) and len(machine.runners) == 2 * len(before)
