"""Weights and numbers that swapped functions and edits hold beside the tree: they count as weights too."""

import copy
import dataclasses
import functools
import types

import numpy as np
import pytest
import torch
from tiny_models import fresh

import fnllm
from fnllm.held import Versions, held_by

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 33]
GREEDY = fnllm.Sampling(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
SMALL = {"num_blocks": 64, "block_size": 4}


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
