"""Operations that Inductor calls unchanged, registered before it finds them in a graph (effect)."""

from torch import fx
from torch._ops import OpOverload


def name_fallbacks(graph: fx.Graph) -> None:
    """Register each operation of a graph that has no lowering as one to call unchanged, as Inductor would do itself.

    When torch 2.11's Inductor first meets such an operation, it formats the arguments for a log message, whether the
    log is on or not. The text of an argument contains that of everything it was computed from, and a value that is used
    twice is written twice: with a residual stream the text doubles with every half of a layer, so that formatting the
    arguments of a model's last operation does not end (PyTorch issue 139501).
    """
    from torch._inductor.decomposition import decompositions
    from torch._inductor.lowering import FALLBACK_ALLOW_LIST, lowerings, make_fallback, tag_to_layout_constraint
    from torch._library.utils import get_layout_constraint_tag

    named = {x for node in graph.nodes for x in (node.target, *node.args) if isinstance(x, OpOverload)}
    for op in named - lowerings.keys() - decompositions.keys():
        if op.name().split(".")[0] not in FALLBACK_ALLOW_LIST:
            make_fallback(op, layout_constraint=tag_to_layout_constraint(get_layout_constraint_tag(op)), warn=False)
