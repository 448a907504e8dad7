"""The pass over a compiled step's graph: what it fuses, what it leaves alone, and that results are the same bits."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fnllm.fusing import fuse_norms

linear, add_norm = torch.ops.fnllm.small_linear, torch.ops.fnllm.add_rms_norm
FUSED = "fnllm.linear_add_rms_norm.default"


def product(x, w):
    return linear(x, w, None, None, False, True)


def inputs():
    """x [5, 6], w [8, 6], residual [5, 8], the norm's weight and a bias [8]."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator) for shape in ((5, 6), (8, 6), (5, 8), (8,), (8,))]


def passed(function, tensors):
    """(the graph's operations of ours before the pass, those after it, the graph)."""
    traced = make_fx(function, tracing_mode="symbolic")(*tensors)
    before = ours(traced)
    fuse_norms(traced.graph)
    traced.graph.lint()
    traced.recompile()
    return before, ours(traced), traced


def ours(traced):
    return [str(node.target) for node in traced.graph.nodes if str(node.target).startswith("fnllm.")]


def one(x, w, residual, weight, bias):
    return add_norm(product(x, w), residual, weight, 1e-5)


def behind_later_operands(x, w, residual, weight, bias):
    y = product(x, w)
    return add_norm(y, torch.cos(residual), weight * 2, 1e-5)


def only_the_sum(x, w, residual, weight, bias):
    return add_norm(product(x, w), residual, weight, 1e-5)[1] * 2


def two_in_a_row(x, w, residual, weight, bias):
    h, residual = add_norm(product(x, w), residual, weight, 1e-5)
    return add_norm(product(torch.relu(h[:, :6]), w), residual, bias, 1e-3)


@pytest.mark.parametrize(
    ("function", "count"), [(one, 1), (behind_later_operands, 1), (only_the_sum, 1), (two_in_a_row, 2)]
)
def test_a_product_that_its_norm_alone_uses_is_fused(function, count):
    tensors = inputs()
    before, after, traced = passed(function, tensors)
    assert len(before) == 2 * count and after == [FUSED] * count
    results, want = traced(*tensors), function(*tensors)
    assert torch.equal(results, want) if isinstance(want, torch.Tensor) else all(map(torch.equal, results, want))


def used_again(x, w, residual, weight, bias):
    y = product(x, w)
    return (*add_norm(y, residual, weight, 1e-5), y)


def its_own_residual(x, w, residual, weight, bias):
    y = product(x, w)
    return add_norm(y, y, weight, 1e-5)


def as_the_residual(x, w, residual, weight, bias):
    return add_norm(residual, product(x, w), weight, 1e-5)


def with_a_bias(x, w, residual, weight, bias):
    return add_norm(linear(x, w, bias, None, False, True), residual, weight, 1e-5)


def with_a_residual(x, w, residual, weight, bias):
    return add_norm(linear(x, w, None, residual, False, True), residual, weight, 1e-5)


def with_a_gate(x, w, residual, weight, bias):
    return add_norm(linear(x, w, None, None, True, True), residual[:, :4], weight[:4], 1e-5)


def with_something_between(x, w, residual, weight, bias):
    return add_norm(product(x, w) * 2, residual, weight, 1e-5)


def norm_of_tokens(x, w, residual, weight, bias):
    return add_norm(product(x, w)[1:], residual[1:], weight, 1e-5)


def of_a_weight_made_in_the_step(x, w, residual, weight, bias):
    return add_norm(linear(x, w, None, None, False, False), residual, weight, 1e-5)


def normed_before(x, w, residual, weight, bias):
    return add_norm(torch.ops.fnllm.norm_linear(x, weight[:6], 1e-5, w, None, False, True), residual, weight, 1e-5)


@pytest.mark.parametrize(
    "function",
    [used_again, its_own_residual, as_the_residual, with_a_bias, with_a_residual, with_a_gate, with_something_between,
     norm_of_tokens, of_a_weight_made_in_the_step, normed_before],
)  # fmt: skip
def test_anything_else_is_left_alone(function):
    before, after, _ = passed(function, inputs())
    assert len(before) == 2 and after == before


def test_the_compiler_knows_the_shapes_of_results_and_the_strides_of_operands():
    x, w, residual, weight, bias = inputs()
    _, _, traced = passed(one, [x.T.contiguous().T, w, residual, weight, bias])
    (fused,) = traced.graph.find_nodes(op="call_function", target=torch.ops.fnllm.linear_add_rms_norm.default)
    assert [tuple(result.shape) for result in fused.meta["val"]] == [(5, 8), (5, 8)]
    operands, named = fused.meta["eager_input_vals"]
    assert [tuple(a.stride()) for a in operands[:4]] == [(1, 5), (6, 1), (8, 1), (1,)] and named == {}


def test_strides_that_the_product_s_node_does_not_tell_are_not_guessed():
    """As where another pass made the node: the norm's own operands stand at other places."""
    x, w, residual, weight, bias = inputs()
    traced = make_fx(one, tracing_mode="symbolic")(x, w, residual, weight, bias)
    (node,) = traced.graph.find_nodes(op="call_function", target=linear.default)
    del node.meta["eager_input_vals"]
    fuse_norms(traced.graph)
    (fused,) = traced.graph.find_nodes(op="call_function", target=torch.ops.fnllm.linear_add_rms_norm.default)
    assert "eager_input_vals" not in fused.meta and len(fused.meta["val"]) == 2
