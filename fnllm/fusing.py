"""Fusing a matrix product with the addition and norm after it, in the graph of a compiled step.

Layers and the sites between them stay unchanged: a product is fused only where the traced graph shows that nothing but
the norm after it uses the product.
"""

from torch import fx, ops

import fnllm_kernels.linear_add_norm  # noqa: F401  registers the operation that takes the others' place

PLAIN = (None, None, False, True)  # a product without bias, residual and gate, of a weight that the step does not write


def fuse_norms(graph: fx.Graph) -> None:
    """Replace each `add_rms_norm` that is the only user of a plain `small_linear` by `linear_add_rms_norm`.

    The graph is changed, as torch's passes do. It must be a functional one, so that a product may move to its norm.
    """
    for norm in graph.find_nodes(op="call_function", target=ops.fnllm.add_rms_norm.default):
        product = norm.args[0]
        if not isinstance(product, fx.Node) or not is_plain_product(product):
            continue
        if len(product.users) > 1 or norm.args.count(product) > 1:
            continue
        with graph.inserting_before(norm):
            args = (*product.args[:2], *norm.args[1:])
            fused = graph.call_function(ops.fnllm.linear_add_rms_norm.default, args)
        fused.meta = dict(norm.meta)
        first, second = product.meta.get("eager_input_vals"), fused.meta.pop("eager_input_vals", None)
        if first and second:  # by these Inductor hands an operation its tensors with the strides they had when traced
            fused.meta["eager_input_vals"] = ((*first[0][:2], *second[0][1:]), {})
        norm.replace_all_uses_with(fused)
        graph.erase_node(norm)
        graph.erase_node(product)


def is_plain_product(node: fx.Node) -> bool:
    """Whether a node is x @ w.T by `small_linear` and nothing more."""
    return node.target is ops.fnllm.small_linear.default and node.args[2:] == PLAIN
