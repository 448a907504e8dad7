"""Operations that Inductor calls unchanged, registered before it finds them in a graph (effect)."""

from torch import fx
from torch._ops import OpOverload


def name_fallbacks(graph: fx.Graph) -> None:
    """Register for each operation of a graph without a lowering that it is called as it is, as Inductor would itself.

    Until torch 2.12 Inductor writes the arguments of such an operation out at its first sight, for a log whether it is
    kept or not, with all that they were made of, and what is used twice twice: 2^n times the first layer's for the head
    of n layers with a residual stream (pytorch's issue 139501). That never ends.
    """
    from torch._inductor.decomposition import decompositions
    from torch._inductor.lowering import FALLBACK_ALLOW_LIST, lowerings, make_fallback, tag_to_layout_constraint
    from torch._library.utils import get_layout_constraint_tag

    named = {x for node in graph.nodes for x in (node.target, *node.args) if isinstance(x, OpOverload)}
    for op in named - lowerings.keys() - decompositions.keys():
        if op.name().split(".")[0] not in FALLBACK_ALLOW_LIST:
            make_fallback(op, layout_constraint=tag_to_layout_constraint(get_layout_constraint_tag(op)), warn=False)
