"""What a swapped function holds: a change is noticed at the next call, and nothing else counts as a change."""

import collections
import dataclasses
import enum
import functools
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_models import tiny as small_model
from torch import library, nn

import fnllm
from fnllm.held import LARGEST, MOST, Versions, held_by

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 33]
GREEDY = fnllm.Sampling(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
USUAL = fnllm.Layers()


def by_attribute(p, x, ctx):
    return by_attribute.scale * USUAL.mlp(p, x, ctx)


def by_tensor_attribute(p, x, ctx):
    return by_tensor_attribute.scale * USUAL.mlp(p, x, ctx)


by_attribute.scale = 1.0
by_tensor_attribute.scale = torch.tensor(1.0)


class Settings:
    scale = 1.0


def by_class(p, x, ctx):
    return Settings.scale * USUAL.mlp(p, x, ctx)


class OfClass:
    scale = 1.0

    def __call__(self, p, x, ctx):
        return self.scale * USUAL.mlp(p, x, ctx)


class TensorOfClass(OfClass):
    scale = torch.tensor(1.0)


class ByProperty:
    def __call__(self, p, x, ctx):
        return self.scale * USUAL.mlp(p, x, ctx)

    @property
    def scale(self):
        return IN_PROPERTY


class Static:
    scale = 1.0

    @staticmethod
    def mlp(p, x, ctx):
        return Static.scale * USUAL.mlp(p, x, ctx)

    @classmethod
    def mlp_of_class(cls, p, x, ctx):
        return cls.scale * USUAL.mlp(p, x, ctx)


class Bound:
    scale = 1.0

    def mlp(self, p, x, ctx):
        return self.scale * USUAL.mlp(p, x, ctx)


OFF, FROZEN, QUEUE, RANGE, SLICE = set(), frozenset(), collections.deque([1.0]), range(0), slice(0, 0)
VIEWED = {"by": 1.0}
VIEW = types.MappingProxyType(VIEWED)


def by_set(p, x, ctx):
    return USUAL.mlp(p, x, ctx) * (ctx.layer not in OFF)


def by_frozenset(p, x, ctx):
    return USUAL.mlp(p, x, ctx) * (ctx.layer not in FROZEN)


def by_deque(p, x, ctx):
    return USUAL.mlp(p, x, ctx) * QUEUE[0]


def by_view(p, x, ctx):
    return USUAL.mlp(p, x, ctx) * VIEW["by"]


def by_range(p, x, ctx):
    return USUAL.mlp(p, x, ctx) * (ctx.layer not in RANGE)


def by_slice(p, x, ctx):
    y = USUAL.mlp(p, x, ctx).clone()
    y[:, SLICE] = 0
    return y


class Mode(enum.Enum):
    PLAIN = 1
    MORE = 2


MODE = Mode.PLAIN


def by_enum(p, x, ctx):
    return USUAL.mlp(p, x, ctx) * (1 if MODE is Mode.PLAIN else 3)


def helper(x):
    return x * 2


def by_helper(p, x, ctx):
    return helper(USUAL.mlp(p, x, ctx))


def coded(x):
    return x * 2


def by_coded(p, x, ctx):
    return coded(USUAL.mlp(p, x, ctx))


@torch.no_grad()
def decorated(x):
    return x * IN_DECORATED


def by_decorated(p, x, ctx):
    return decorated(USUAL.mlp(p, x, ctx))


ACT, ACTS = torch.relu, {"act": F.silu}


def by_builtin(p, x, ctx):
    return ACT(USUAL.mlp(p, x, ctx))


def by_function_in_a_dict(p, x, ctx):
    return ACTS["act"](USUAL.mlp(p, x, ctx))


class Plain(nn.Module):
    def forward(self, p, x, ctx):
        return USUAL.mlp(p, x, ctx)


class Inner(nn.Module):
    def forward(self, x):
        return x * IN_CHILD


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, p, x, ctx):
        return self.inner(USUAL.mlp(p, x, ctx))


class ByMethod(nn.Module):
    def forward(self, p, x, ctx):
        return self.scaled(USUAL.mlp(p, x, ctx))

    def scaled(self, x):
        return x * IN_METHOD


class CallsMethod:
    def __call__(self, p, x, ctx):
        return self.scaled(USUAL.mlp(p, x, ctx))

    def scaled(self, x):
        return x * IN_CALLED


IN_CHILD = IN_METHOD = IN_CALLED = IN_PROPERTY = IN_DECORATED = 1.0
ADAPTERS = [torch.full((), 1.0), torch.full((), 3.0)]
ORDER = [ADAPTERS[1], *ADAPTERS]


def by_order(p, x, ctx):
    return USUAL.mlp(p, x, ctx) * ORDER[ctx.layer]


def rebind(**names):
    return lambda: globals().update(names)


HOOKED, NESTED, REPLACED, BOUND = Plain(), Outer(), Plain(), Bound()
ACTIVATED = nn.Sequential(nn.Sigmoid())
HELD = {
    "a function's attribute": (by_attribute, lambda: setattr(by_attribute, "scale", 3.0)),
    "a tensor as a function's attribute": (by_tensor_attribute, lambda: by_tensor_attribute.scale.fill_(3)),
    "a class as a namespace": (by_class, lambda: setattr(Settings, "scale", 3.0)),
    "a class's attribute": (OfClass(), lambda: setattr(OfClass, "scale", 3.0)),
    "a class's tensor": (TensorOfClass(), lambda: TensorOfClass.scale.fill_(3)),
    "a property's global": (ByProperty(), rebind(IN_PROPERTY=3.0)),
    "a static method's class": (Static.mlp, lambda: setattr(Static, "scale", 3.0)),
    "a class method's class": (Static.mlp_of_class, lambda: setattr(Static, "scale", 5.0)),
    "the object of a bound method": (BOUND.mlp, lambda: setattr(BOUND, "scale", 3.0)),
    "a set": (by_set, lambda: OFF.add(0)),
    "a frozenset": (by_frozenset, rebind(FROZEN=frozenset({0}))),
    "a deque": (by_deque, lambda: QUEUE.appendleft(3.0)),
    "a view of a dict": (by_view, lambda: VIEWED.update(by=3.0)),
    "a range": (by_range, rebind(RANGE=range(2))),
    "a slice": (by_slice, rebind(SLICE=slice(0, 24))),
    "an enum's member": (by_enum, rebind(MODE=Mode.MORE)),
    "a helper defined again": (by_helper, rebind(helper=lambda x: x * 3)),
    "a helper's code, as a reload gives it": (by_coded, lambda: setattr(coded, "__code__", (lambda x: x * 3).__code__)),
    "a decorated helper's global": (by_decorated, rebind(IN_DECORATED=3.0)),
    "a builtin function": (by_builtin, rebind(ACT=torch.tanh)),
    "a function in a dict": (by_function_in_a_dict, lambda: ACTS.update(act=F.gelu)),
    "a module's hook": (HOOKED, lambda: HOOKED.register_forward_hook(lambda module, args, out: out * 3)),
    "a child's hook": (NESTED, lambda: NESTED.inner.register_forward_pre_hook(lambda module, args: (args[0] * 3,))),
    "a module's forward": (REPLACED, lambda: setattr(REPLACED, "forward", lambda p, x, ctx: x * 3)),
    "a module's child": (
        lambda p, x, ctx: ACTIVATED(USUAL.mlp(p, x, ctx)),
        lambda: ACTIVATED.__setitem__(0, nn.Tanh()),
    ),
    "a global of a child's forward": (Outer(), rebind(IN_CHILD=3.0)),
    "a global of a module's method": (ByMethod(), rebind(IN_METHOD=3.0)),
    "a global of an object's method": (CallsMethod(), rebind(IN_CALLED=3.0)),
    "one tensor of a list in another's place": (by_order, lambda: ORDER.__setitem__(0, ADAPTERS[0])),
}


@pytest.mark.parametrize(("mlp", "change"), HELD.values(), ids=HELD)
def test_a_change_of_what_a_swapped_function_holds_is_noticed(tiny, mlp, change):
    params, layers = tiny._replace(workspace={}), USUAL._replace(mlp=mlp)

    def run(params):
        return fnllm.generate(params, [PROMPT], GREEDY, layers=layers, num_blocks=64, block_size=4)[0]

    before = run(params)
    assert run(params).cached_tokens == 8, "nothing changed"
    change()
    after, expected = run(params), run(tiny._replace(workspace={}))
    assert after.cached_tokens == 0
    close = [x.logprob for x in expected.logprobs]
    assert [x.logprob for x in after.logprobs] == pytest.approx(close, abs=1e-5)
    assert [x.logprob for x in before.logprobs] != pytest.approx(close, abs=1e-3), "this change must show"
    assert run(params).cached_tokens == 8


@library.custom_op("fnllm_tests::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


@halved.register_fake
def _(x):
    return torch.empty_like(x)


CACHED = 1.0


@functools.lru_cache
def cached(layer):
    return CACHED


def by_library_objects(p, x, ctx):
    return halved(USUAL.mlp(p, x, ctx)) * cached(ctx.layer)


def test_what_a_library_s_objects_note_as_they_are_called_is_no_change(tiny):
    """An op its implementations, a cache its entries; what a cached function reads is looked at."""
    params, layers = tiny._replace(workspace={}), USUAL._replace(mlp=by_library_objects)
    runs = [fnllm.generate(params, [PROMPT], GREEDY, layers=layers, num_blocks=64, block_size=4)[0] for _ in range(3)]
    assert [run.cached_tokens for run in runs] == [0, 8, 8]
    assert (float, "1.0") in held_by([by_library_objects]).constants


def told_apart(one, other):
    """Whether a function that holds one is told from the same function with the other in its place."""
    return held_by([functools.partial(print, one)]).constants != held_by([functools.partial(print, other)]).constants


ONE, SECOND = [1], [1]


@pytest.mark.parametrize(
    ("one", "other"),
    [([[1], [2]], [[1, 2], []]), ([1], (1,)), ({1}, [1]), (range(2), slice(2)), (functools, types), (int, float),
     ([ONE, SECOND, ONE], [ONE, SECOND, SECOND]), (object(), object()), (torch.relu, torch.tanh),
     (np.zeros(2), np.zeros(2)), (np.float16(0.0), np.float16(-0.0)), (np.datetime64(1, "D"), np.datetime64(1, "s"))],
)  # fmt: skip
def test_things_are_told_apart_by_kind_identity_and_nesting(one, other):
    assert told_apart(one, other) and not told_apart(one, one)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.complex64, lambda x: np.datetime64("NaT")])
def test_a_nan_of_numpy_equals_itself_between_looks(kind):
    versions = Versions()
    numbers = {versions.of("a", *held_by([functools.partial(print, kind(np.nan))]))[0] for _ in range(3)}
    assert len(numbers) == 1


def test_an_object_that_counts_by_identity_is_kept_so_that_none_gets_its_identity():
    versions = Versions()
    numbers = {versions.of("a", *held_by([functools.partial(print, object())]))[0] for _ in range(20)}
    assert len(numbers) == 20


def test_a_look_is_bounded():
    """Beyond the bounds one container is told from another, but not from itself before a change."""
    nested, long = [[0] * 300 for _ in range(2000)], [0] * (LARGEST + 1)
    assert len(held_by([functools.partial(print, nested)]).constants) < MOST + 2 * LARGEST
    assert told_apart(nested, [list(x) for x in nested]) and told_apart(long, list(long))
    before = held_by([functools.partial(print, nested, long)]).constants
    nested[-1].append(1)
    long.append(1)
    assert held_by([functools.partial(print, nested, long)]).constants == before
    nested[0].append(1)
    assert held_by([functools.partial(print, nested, long)]).constants != before


def test_the_nearest_things_are_found_within_the_bound():
    """A tensor beside a long list, whichever of the two comes first."""
    long, x = [[0] * 300 for _ in range(2000)], torch.zeros(2)
    for order in ((long, [x]), ([x], long)):
        assert held_by([functools.partial(print, *order)]).leaves == [x]


def test_nothing_of_torch_or_of_installed_packages_is_walked():
    """A swapped function that calls much of torch finds what it closes over, and little else."""

    def mlp(p, x, ctx, norm=nn.LayerNorm(4)):  # noqa: B008
        return F.scaled_dot_product_attention(norm(F.silu(x)), torch.utils.checkpoint.checkpoint(nn.Linear, x), x)

    held = held_by([mlp])
    assert [id(x) for x in held.leaves] == [id(mlp.__defaults__[0].weight), id(mlp.__defaults__[0].bias)]
    assert len(held.constants) < 40
    assert types.CodeType not in dict(held_by([F.silu, functools.wraps, pytest.importorskip]).constants)


@dataclasses.dataclass(frozen=True)
class Plus:
    """Serves as an edit, a logits_fn and a feed-forward; equality asks the tensor, hashing its identity."""

    shift: torch.Tensor

    def __call__(self, *args):
        x = args[1] if len(args) == 3 else args[0]
        return x + self.shift.to(x.dtype)


def test_functions_that_compare_by_their_tensors_are_told_apart():
    params = small_model(21)._replace(workspace={})
    prompts, options = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], {"block_size": 2, "num_blocks": 40}
    greedy = fnllm.Sampling(temperature=0, max_tokens=5)
    narrow, wide = ([Plus(k * torch.arange(float(width))) for k in (0, 1, -1)] for width in (24, 41))

    def asked(kind, plus):
        if kind == "layers":
            return {"sampling": greedy, "layers": fnllm.Layers()._replace(mlp=plus)}
        if kind == "edits":
            return {"sampling": greedy, "edits": fnllm.Edit("layers.0.resid_post", plus)}
        return {"sampling": dataclasses.replace(greedy, logits_fn=plus)}

    for kind, functions in (("layers", narrow), ("edits", narrow), ("logits_fn", wide)):
        for plus in functions * 2:
            alone = fnllm.generate(params._replace(workspace={}), prompts, **asked(kind, plus), **options)
            found = fnllm.generate(params, prompts, **asked(kind, plus), **options)
            assert [one.token_ids for one in found] == [one.token_ids for one in alone], kind
    edits = [[fnllm.Edit("layers.0.resid_post", plus)] for plus in narrow[:2]]
    settings = [dataclasses.replace(greedy, logits_fn=plus) for plus in wide[:2]]
    for _ in range(2):  # the second finds prefixes
        for together in ({"sampling": greedy, "edits": edits}, {"sampling": settings}):
            first, second = fnllm.generate(params, prompts, **together, **options)
            assert first.token_ids != second.token_ids
    engines = [fnllm.engine(params, layers=fnllm.Layers()._replace(mlp=plus), **options) for plus in narrow[:2]]
    state, _ = fnllm.add(engines[0].init(), engines[0].request(prompts[0], greedy))
    with pytest.raises(ValueError, match="belongs to an engine with other layers"):
        engines[1].step(state)
