"""Operations without a lowering: known to Inductor before it meets them, so that a deep graph compiles in its time."""

import pytest
import torch
from torch import library
from torch._inductor.utils import fresh_cache
from torch._library.utils import get_layout_constraint_tag

from fnllm.compiled import inductor_options
from fnllm.fallbacks import name_fallbacks

pytestmark = pytest.mark.compiled
DEPTH = 64  # written out with all that it was made of, the last product of a chain is 2^64 of the first


@pytest.fixture
def own():
    """Operations of this test's own, gone behind it."""
    with library._scoped_library("fnllm_test_fallbacks", "FRAGMENT") as own:
        yield own


def define(own, name, function):
    """An operation of two tensors that Inductor knows nothing of."""
    own.define(f"{name}(Tensor x, Tensor y) -> Tensor")
    own.impl(name, function, "CompositeExplicitAutograd")
    own._register_fake(name, lambda x, y: torch.empty_like(x))
    return getattr(torch.ops.fnllm_test_fallbacks, name).default


def test_a_deep_graph_whose_last_operation_is_a_new_one_compiles(own):
    """As in a decode step, the first that is compiled when a process begins by preparing: the draw is its last op.

    Without the pass, torch 2.11 does not end here.
    """
    middle, last = (define(own, name, lambda x, y: x * 0.5 + y * 0.25) for name in ("middle", "last"))

    def chain(x):
        for _ in range(DEPTH):
            x = middle(x, x)
        return last(x, x)

    x = torch.arange(4.0)
    with fresh_cache():
        compiled = torch.compile(chain, fullgraph=True, dynamic=False, options=inductor_options())
        torch.testing.assert_close(compiled(x), chain(x), rtol=0, atol=0)


def test_operations_inside_others_are_named_too_with_the_layout_that_their_tags_ask_for(own):
    from torch._inductor.lowering import _maybe_layout_constraints, constrain_to_fake_tensors, lowerings

    op, written = (define(own, name, torch.add) for name in ("plain", "written"))
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    # How a graph holds an operation that writes to its arguments until Inductor lowers it.
    outer = graph.call_function(torch.ops.higher_order.auto_functionalized_v2, (written,), {})
    graph.output((graph.call_function(op, (x, x)), graph.call_function(torch.ops.aten.relu.default, (x,)), outer))
    relu = lowerings[torch.ops.aten.relu.default]
    assert op not in lowerings and written not in lowerings
    name_fallbacks(graph)
    assert op in lowerings and written in lowerings and lowerings[torch.ops.aten.relu.default] is relu
    assert get_layout_constraint_tag(op) is torch.Tag.needs_exact_strides  # torch's default for such operations
    assert _maybe_layout_constraints[op] is constrain_to_fake_tensors
