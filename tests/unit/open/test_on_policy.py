"""Weights that change under the engine: at once, everywhere, without another step built or a copy made."""

import copy
import dataclasses
import functools
import types

import numpy as np
import pytest
import torch
from examples_of import example
from torch.utils._pytree import tree_map

import fnllm
from fnllm.held import Versions, held_by

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 33]
GREEDY = fnllm.Sampling(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
SMALL = {"num_blocks": 64, "block_size": 4}


def fresh(params):
    """The same weights as new tensors, without engines."""
    made = {}
    tree = tree_map(lambda x: made.setdefault(id(x), x.detach().clone()), params.tree)
    return params._replace(tree=tree, workspace={})


def run(params):
    return fnllm.generate(params, [PROMPT], GREEDY, **SMALL)[0]


def change(tree, layer=1):
    with torch.no_grad():
        tree["layers"][layer]["down"].mul_(-2).add_(0.05)


def test_fault_11_weights_written_in_place_take_effect_at_once(tiny):
    params, expected = fresh(tiny), fresh(tiny)
    change(expected.tree)
    before = run(params)
    (machine,) = params.workspace.values()
    built, address = len(machine.runners), params.tree["layers"][1]["down"].data_ptr()
    pool = machine.resident.cache.k[0].data_ptr()
    change(params.tree)
    after = run(params)
    assert after.cached_tokens == 0
    assert after.token_ids == run(expected).token_ids != before.token_ids
    close = [x.logprob for x in run(expected).logprobs]
    assert [x.logprob for x in after.logprobs] == pytest.approx(close, abs=1e-5)
    assert (len(machine.runners), params.tree["layers"][1]["down"].data_ptr()) == (built, address)
    assert list(params.workspace.values()) == [machine] and machine.resident.cache.k[0].data_ptr() == pool
    assert run(params).cached_tokens == 8  # nothing changed since


def test_fault_11_a_replaced_tree_takes_effect_at_once(tiny):
    params, other = fresh(tiny), fresh(tiny)
    change(other.tree, layer=0)
    before = run(params)
    (machine,) = params.workspace.values()
    built = len(machine.runners)
    swapped = params._replace(tree=other.tree)  # the same workspace
    assert run(swapped).token_ids == run(other).token_ids != before.token_ids
    assert run(params).token_ids == before.token_ids  # and back
    assert len(machine.runners) == built and list(params.workspace.values()) == [machine]


def through_data(params):
    params.tree["layers"][1]["down"].data.mul_(-2).add_(0.05)


def through_numpy(params):
    weight = params.tree["layers"][1]["down"].detach().numpy()
    weight *= -2
    weight += 0.05


def in_inference_mode(params):
    with torch.inference_mode():
        params.tree["layers"][1]["down"].mul_(-2).add_(0.05)


@pytest.mark.parametrize("write", [through_data, through_numpy, in_inference_mode])
def test_writes_that_pytorch_does_not_count_are_told(tiny, write):
    params, expected = fresh(tiny), fresh(tiny)
    if write is in_inference_mode:
        with torch.inference_mode():
            params = fresh(tiny)
    change(expected.tree)
    before = run(params)
    write(params)
    fnllm.weights_changed(params)
    after = run(params)
    assert after.cached_tokens == 0 and after.token_ids == run(expected).token_ids != before.token_ids
    assert run(params).cached_tokens == 8  # told once, it is over


def test_an_optimizer_step_counts_as_a_change(tiny):
    params = fresh(tiny)
    weight = params.tree["layers"][2]["qkv"].requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=50.0)
    before = run(params)
    fnllm.score(params, [PROMPT])[0].sum().backward()
    optimizer.step()
    after = run(params)
    assert after.cached_tokens == 0 and after.logprobs != before.logprobs
    scored = fnllm.score(params, [PROMPT + list(after.token_ids)])[0][8:]
    torch.testing.assert_close(scored.detach(), torch.tensor([x.logprob for x in after.logprobs]), atol=1e-4, rtol=1e-4)


class OneOfAnother(torch.optim.Optimizer):
    """An optimizer of somebody's own, who writes through `.data`."""

    def __init__(self, weights, lr):
        super().__init__(weights, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.data.sub_(group["lr"] * weight.grad)


OPTIMIZERS = [
    functools.partial(getattr(torch.optim, name), **how)
    for name in ("Adam", "AdamW", "SGD", "Adagrad")
    for how in ({}, {"foreach": True}, {"fused": True})
]


@pytest.mark.parametrize("make", [*OPTIMIZERS, OneOfAnother], ids=lambda make: str(getattr(make, "keywords", "own")))
@pytest.mark.parametrize("closure", [False, True])
def test_steps_of_all_optimizers_are_counted_as_writes(make, closure):
    """Those of kernels of their own too, whose writes PyTorch does not count."""
    weight, other = (torch.ones(3, requires_grad=True) for _ in range(2))
    optimizer = make([weight, other], lr=0.1)

    def loss():
        optimizer.zero_grad()
        (total := (weight * 2).sum()).backward()
        return total

    squares = other.square().sum()
    if not closure:
        loss()
    before = weight._version
    optimizer.step(loss) if closure and make is not OneOfAnother else (loss(), optimizer.step())
    assert weight._version > before and not torch.equal(weight.detach(), torch.ones(3))
    squares.backward()  # the other was not written, so that its graph is whole
    counted = weight._version
    optimizer.register_step_post_hook(lambda *args: optimizer.zero_grad())
    optimizer.step()
    assert weight._version > counted


@pytest.mark.parametrize("make", [m for m in OPTIMIZERS if "fused" in m.keywords], ids=lambda m: m.func.__name__)
def test_a_fused_step_counts_as_a_change(tiny, make):
    params = fresh(tiny)
    weight = params.tree["layers"][2]["qkv"].requires_grad_()
    optimizer = make([weight], lr=0.3)
    before = run(params)
    fnllm.score(params, [PROMPT])[0].sum().backward()
    optimizer.step()
    after = run(params)
    assert after.cached_tokens == 0 and after.logprobs != before.logprobs
    assert after.logprobs[0].logprob == pytest.approx(run(fresh(params)).logprobs[0].logprob, abs=1e-5)
    assert run(params).cached_tokens == 8


@pytest.mark.compiled
def test_a_compiled_fused_step_is_counted_too():
    weight = torch.ones(3, requires_grad=True)
    weight.grad = torch.ones(3)
    optimizer = torch.optim.AdamW([weight], lr=torch.tensor(0.1), fused=True)
    step = torch.compile(optimizer.step, backend="aot_eager")
    for _ in range(2):
        before = weight._version
        step()
        assert weight._version > before


class Adapter(torch.nn.Module):
    """The usual MLP and a correction of low rank."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a, self.b = (torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((2, 48), (48, 2)))

    def forward(self, p, x, ctx):
        return fnllm.Layers().mlp(p, x, ctx) + x @ self.a.T @ self.b.T


class Holder:
    """An object that is no module."""

    def __init__(self, adapters):
        self.adapters = adapters

    def mlp(self, p, x, ctx):
        return self.adapters[0](p, x, ctx)

    __call__ = mlp


ADAPTER = Adapter()


def by_name(p, x, ctx):
    return ADAPTER(p, x, ctx)


def by_default(p, x, ctx, adapter=ADAPTER):
    return adapter(p, x, ctx)


def by_inner_name(p, x, ctx):
    return sum([ADAPTER(p, x, ctx) for _ in range(1)])


class Naming:
    """An object that holds nothing itself."""

    def __call__(self, p, x, ctx):
        return ADAPTER(p, x, ctx)


class NamingModule(torch.nn.Module):
    def forward(self, p, x, ctx):
        return ADAPTER(p, x, ctx)


class Hiding(torch.nn.Module):
    """A module that keeps another where PyTorch does not look for parameters, in a module of its own."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Identity()
        self.inner.others = [ADAPTER]

    def forward(self, p, x, ctx):
        return self.inner.others[0](p, x, ctx)


@dataclasses.dataclass(frozen=True)
class Record:
    adapter: Adapter


HOLDER, NAMESPACE = Holder([ADAPTER]), types.SimpleNamespace(adapter=ADAPTER)


def by_closure(held):
    return lambda p, x, ctx: held.adapter(p, x, ctx)


@pytest.mark.parametrize(
    "mlp",
    [
        ADAPTER,
        Hiding(),
        lambda p, x, ctx: HOLDER(p, x, ctx),
        lambda p, x, ctx: NAMESPACE.adapter(p, x, ctx),
        by_closure(Record(ADAPTER)),
        by_name,
        by_inner_name,
        Naming(),
        NamingModule(),
        by_default,
        lambda p, x, ctx: by_name(p, x, ctx),
        functools.partial(by_default, adapter=ADAPTER),
        Holder([ADAPTER]).mlp,
        Holder([ADAPTER]),
    ],
    ids=[
        "a module",
        "a module's own attribute",
        "a global object",
        "a global namespace",
        "a dataclass",
        "a global",
        "a comprehension",
        "an object's global",
        "a module's global",
        "a default",
        "a function's function",
        "a partial",
        "a method",
        "an object",
    ],
)
def test_weights_that_a_swapped_function_holds_are_weights_too(tiny, mlp):
    params, layers = fresh(tiny), fnllm.Layers()._replace(mlp=mlp)

    def run(**options):
        return fnllm.generate(params, [PROMPT], GREEDY, layers=layers, **SMALL, **options)[0]

    before = run()
    assert run().cached_tokens == 8
    with torch.no_grad():
        ADAPTER.b.mul_(-1.5)
    after = run()
    assert after.cached_tokens == 0 and after.token_ids == run(prefix_cache=False).token_ids != before.token_ids
    assert run().cached_tokens == 8
    assert fnllm.generate(params, [PROMPT], GREEDY, **SMALL)[0].cached_tokens == 0  # the plain model's own prefixes
    with torch.no_grad():
        ADAPTER.b.mul_(2)
    assert fnllm.generate(params, [PROMPT], GREEDY, **SMALL)[0].cached_tokens == 8  # outlive that


class Scaled:
    """A callable that keeps all in slots, one of them empty."""

    __slots__ = ("by", "unset")

    def __init__(self, by):
        self.by = by

    def __call__(self, p, x, ctx):
        return self.by * fnllm.Layers().mlp(p, x, ctx)


class ScaledModule(torch.nn.Module):
    def __init__(self, by):
        super().__init__()
        self.by = by

    def forward(self, p, x, ctx):
        return self.by * fnllm.Layers().mlp(p, x, ctx) * (1 if self.training else 2)


class ScaledMore(Scaled):
    """One with a `__dict__` beside the slots of its base."""

    def method(self, p, x, ctx):
        return self(p, x, ctx)


BY: float | None = 1.0
SCALED, SETTINGS = Scaled(1.0), {"by": 1.0}


def by_global_number(p, x, ctx):
    return BY * fnllm.Layers().mlp(p, x, ctx)


def by_global_dict(p, x, ctx):
    return SETTINGS["by"] * fnllm.Layers().mlp(p, x, ctx)


def in_closure():
    by = 1.0

    def mlp(p, x, ctx):
        return by * fnllm.Layers().mlp(p, x, ctx)

    def change(to):
        nonlocal by
        by = to

    return mlp, change


def in_attribute(owner, mlp=None):
    return mlp or owner, lambda to: setattr(owner, "by", to)


def another_mode(module):
    return module, lambda to: module.train(to == 1)


SLOTS, NAMES = Scaled(1.0), types.SimpleNamespace(by=1.0)
HOLDERS = {
    "a global": (by_global_number, lambda to: globals().update(BY=to)),
    "a function's function": (lambda p, x, ctx: by_global_number(p, x, ctx), lambda to: globals().update(BY=to)),
    "a dict": (by_global_dict, lambda to: SETTINGS.update(by=to)),
    "a closure": in_closure(),
    "slots": in_attribute(SLOTS),
    "slots of a global": in_attribute(SCALED, lambda p, x, ctx: SCALED(p, x, ctx)),
    "slots of a base": in_attribute(more := ScaledMore(1.0), more.method),
    "a namespace": in_attribute(NAMES, lambda p, x, ctx: NAMES.by * fnllm.Layers().mlp(p, x, ctx)),
    "a module": in_attribute(ScaledModule(1.0)),
    "a module's mode": another_mode(ScaledModule(1.0)),
}


@pytest.mark.parametrize(("mlp", "change"), HOLDERS.values(), ids=HOLDERS)
def test_numbers_that_a_swapped_function_holds_are_weights_too(tiny, mlp, change):
    params, layers = fresh(tiny), fnllm.Layers()._replace(mlp=mlp)

    def run(**options):
        return fnllm.generate(params, [PROMPT], GREEDY, layers=layers, **SMALL, **options)[0]

    change(1.0)
    before = run()
    assert run().cached_tokens == 8
    (machine,) = params.workspace.values()
    for runner in machine.runners.values():
        runner.graphs["a bucket"] = "a graph"
    for to in (-2.0, 1.0):
        change(to)
        after = run()
        assert after.cached_tokens == 0 and not any(runner.graphs for runner in machine.runners.values())
        assert (after.logprobs == before.logprobs) == (to == 1.0)
        assert run().cached_tokens == 8
    fnllm.weights_changed(params)
    assert run().cached_tokens == 0


def test_functions_that_hold_numbers_share_what_they_compute_until_these_change(tiny):
    """Whatever runs beside them, and whichever engine sees the change first."""
    params, names = fresh(tiny), types.SimpleNamespace(by=2.0)
    edit = fnllm.Edit("layers.0.resid_post", lambda x, ctx: x * names.by)
    other = fnllm.Edit("layers.1.resid_post", lambda x, ctx: x + SLOTS.by)

    def run(*edits):
        return fnllm.generate(params, [PROMPT] * len(edits), GREEDY, edits=edits, **SMALL)

    assert [out.cached_tokens for out in run(None)] == [0]
    assert [out.cached_tokens for out in run([edit], None)] == [0, 8]
    assert [out.cached_tokens for out in run([edit], [other])] == [8, 0]
    (machine,) = params.workspace.values()
    for runner in machine.runners.values():
        runner.graphs["a bucket"] = "a graph"
    names.by = 3.0
    mixed = run([edit], [other, edit])
    assert [out.cached_tokens for out in mixed] == [0, 0]
    assert all(bool(runner.graphs) == (not spec.edits) for spec, runner in machine.runners.items())
    (again,) = run([edit])
    assert again.cached_tokens == 8 and again.token_ids == mixed[0].token_ids
    assert run(None)[0].cached_tokens == 8


def test_what_a_function_held_before_it_was_let_go_of_is_not_found_again():
    versions, x = Versions(), torch.zeros(2)
    assert versions.of("a", [x], [(int, 1)])[0] == versions.of("b", [x], [(int, 1)])[0] == versions.of(None, [])[0]
    before, _ = versions.of("a", [x], [(int, 1)])
    versions.keep(lambda key: key == "b")
    x += 1
    assert versions.of("a", [x], [(int, 1)])[0] > before and versions.of("b", [x], [(int, 1)])[0] > before


def test_tensors_in_slots_are_weights_too(tiny):
    params, scaled = fresh(tiny), Scaled(torch.tensor(1.0))
    layers = fnllm.Layers()._replace(mlp=scaled)
    before = fnllm.generate(params, [PROMPT], GREEDY, layers=layers, **SMALL)[0]
    scaled.by += 1
    after = fnllm.generate(params, [PROMPT], GREEDY, layers=layers, **SMALL)[0]
    assert after.cached_tokens == 0 and before.logprobs != after.logprobs


@pytest.mark.parametrize(
    ("one", "other"),
    [(0.0, -0.0), (1, True), (1, 1.0), (None, 0), (1.0, "1.0"), ([None, 2], [2, None]), ({"a": 1}, {"b": 1}),
     (torch.float16, torch.float32), (np.float32(1), 1.0)],
)  # fmt: skip
def test_other_constants_are_told_apart(one, other):
    def held(x):
        return held_by([functools.partial(print, x)]).constants

    assert held(one) != held(other) and held(one) == held(copy.deepcopy(one))
    nan = held(float("nan"))
    assert nan == held(float("nan"))  # another object


def test_graphs_are_dropped_that_hold_addresses_of_other_weights(tiny):
    params, adapter = fresh(tiny), Adapter()
    layers = fnllm.Layers()._replace(mlp=adapter)
    fnllm.generate(params, [PROMPT], GREEDY, layers=layers, **SMALL)
    fnllm.generate(params, [PROMPT], GREEDY, **SMALL)
    (machine,) = params.workspace.values()
    for runner in machine.runners.values():
        runner.graphs["a bucket"] = "a graph"
    with torch.no_grad():
        adapter.b.mul_(2)
    fnllm.generate(params, [PROMPT], GREEDY, layers=layers, **SMALL)
    assert all(runner.graphs for runner in machine.runners.values())  # written in place: the addresses are the same
    adapter.b = torch.nn.Parameter(2 * adapter.b.detach())
    fnllm.generate(params, [PROMPT], GREEDY, layers=layers, **SMALL)
    assert [bool(r.graphs) for spec, r in machine.runners.items()] == [
        spec.layers == fnllm.Layers() for spec in machine.runners
    ]


def test_a_weight_given_another_storage_is_noticed(tiny):
    params, expected = fresh(tiny), fresh(tiny)
    run(params)
    weight = params.tree["layers"][1]["down"]
    weight.data = -2 * weight.data + 0.05
    change(expected.tree)
    assert run(params).token_ids == run(expected).token_ids and run(params).cached_tokens == 8


def by_another_tensor(tree):
    tree["layers"][1]["down"] = -2 * tree["layers"][1]["down"] + 0.05


@pytest.mark.parametrize("write", [change, by_another_tensor])
def test_running_sequences_go_on_with_new_weights_and_the_keys_they_have(tiny, write):
    """As the last token does over a prompt that the older weights computed, whichever way the weights came."""
    params, old, new = fresh(tiny), fresh(tiny), fresh(tiny)
    engine = fnllm.engine(params, **SMALL)
    state, seq_id = fnllm.add(engine.init(), engine.request(PROMPT, GREEDY))
    state, _ = engine.step(state)
    write(params.tree)
    state, step = engine.step(state)
    found = step.results.logprob.item()
    keys = fnllm.generate(old, [PROMPT], GREEDY, capture=["*.k", "*.v"], **SMALL)[0]
    write(new.tree)
    given = [fnllm.patch(site, rows[: len(PROMPT)], 0) for site, rows in keys.captured.items()]
    tokens = [*PROMPT, keys.token_ids[0]]
    expected = fnllm.generate(new, [tokens], dataclasses.replace(GREEDY, max_tokens=1), edits=given, **SMALL)[0]
    assert found == pytest.approx(expected.logprobs[0].logprob, abs=1e-5)


@pytest.mark.parametrize("write", [change, by_another_tensor])
def test_no_prefix_is_found_that_a_sequence_made_while_a_weight_was_another_for_a_while(tiny, write):
    params = fresh(tiny)
    kept = params.tree["layers"][1]["down"], params.tree["layers"][1]["down"].clone()
    engine = fnllm.engine(params, **SMALL)
    state, seq_id = fnllm.add(engine.init(), engine.request(PROMPT, dataclasses.replace(GREEDY, max_tokens=12)))
    state, _ = engine.step(state)
    write(params.tree)
    for _ in range(8):
        state, _ = engine.step(state)
    params.tree["layers"][1]["down"] = kept[0].copy_(kept[1]) if write is change else kept[0]
    tokens = fnllm.tokens(state, seq_id)
    state, second = fnllm.add(state, engine.request(tokens, GREEDY))
    while (stepped := engine.step(state))[1] is not None:
        state = stepped[0]
    expected = fnllm.generate(fresh(tiny), [tokens], GREEDY, **SMALL)[0]
    assert fnllm.tokens(state, second)[len(tokens) :] == expected.token_ids


def test_weights_that_an_edit_holds_are_weights_too(tiny):
    params, by = fresh(tiny), torch.tensor(2.0)
    edit = fnllm.Edit("layers.0.resid_post", lambda x, ctx: x * by)
    before = fnllm.generate(params, [PROMPT], GREEDY, edits=edit, **SMALL)[0]
    by += 1
    after = fnllm.generate(params, [PROMPT], GREEDY, edits=edit, **SMALL)[0]
    assert after.cached_tokens == 0 and before.logprobs != after.logprobs


def test_the_example_learns(tiny):
    """Twelve rounds on the three-layer model: more of the tokens it draws lie in the upper half of the vocabulary."""
    policy = example("on_policy")
    params = fresh(tiny)
    history = policy.train(
        params,
        [PROMPT, PROMPT[:4]],
        lambda out: sum(i >= 80 for i in out.token_ids) / len(out.token_ids),
        rounds=12,
        samples=16,
        length=6,
        rate=1e-2,
        max_num_seqs=32,
        **SMALL,
    )
    assert sum(one.reward for one in history[-3:]) > sum(one.reward for one in history[:3]) + 0.45
    assert max(one.gap for one in history) < 1e-3
    (machine,) = params.workspace.values()
    assert len(machine.runners) == 1


def test_words_in_s():
    assert example("on_policy").words_in_s("She sees the sea, sea side 9") == 4 / 6
