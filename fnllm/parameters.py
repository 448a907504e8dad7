"""Checking a caller's parameters against what the layer functions will read, before anything runs."""

import os
from collections.abc import Mapping
from typing import Any

from fnllm.layers import Layers, check_layers
from fnllm.sampling import kind
from fnllm_weights import ModelConfig, Params, Shard, check_tree

# Leaves that a function takes out of its layer's dict. One of the caller's own may do without them, or read others.
TAKEN: Mapping[str, tuple[str, ...]] = {
    "attention": ("qkv", "qkv_bias", "q_norm", "k_norm", "o", "o_bias"),
    "mlp": ("gate_up", "gate_up_bias", "down", "down_bias"),
    "moe": ("experts_gate_up", "experts_down"),
}
# Leaves that a function is handed. One of the caller's own may read them in another form, such as a tuple of tensors.
HANDED: Mapping[str, tuple[str, ...]] = {
    "embed": ("embed",),
    "norm": ("input_norm", "post_norm", "q_norm", "k_norm"),
    "linear": ("qkv", "o", "gate_up", "down", "router", "experts_gate_up", "experts_down", "lm_head"),
    "moe": ("router",),
    "lm_head": ("lm_head",),
}


def check_model(params: Any, layers: Any) -> Layers:
    """The layer functions to use (None: the defaults), after a check that the parameters fit them.

    Raises TypeError unless `params` is a `Params` and `layers` a `Layers`, and ValueError that names a leaf of the tree
    that is missing, has another shape or dtype, or is read by nothing.
    """
    check_params_given(params)
    layers = check_layers(layers, params.config)
    own = layers.swapped()
    taken = {leaf for name in own for leaf in TAKEN.get(name, ())}
    handed = {leaf for name in own for leaf in HANDED.get(name, ())}
    check_tree(params, optional=taken, of_any_form=taken | handed, more=any(name in TAKEN for name in own))
    return layers


def check_params_given(params: Any) -> None:
    """Raise TypeError unless `params` is what `load` returns, and not, say, the path of a checkpoint."""
    if not isinstance(params, Params):
        advice = f"; load it first: fnllm.load({str(params)!r})" if isinstance(params, (str, os.PathLike)) else ""
        raise TypeError(f"params must be what fnllm.load returns, found {kind(params)}{advice}")
    for name, wanted in (("config", ModelConfig), ("shard", Shard)):
        if not isinstance(getattr(params, name), wanted):
            raise TypeError(f"params.{name} must be a {wanted.__name__}, found {kind(getattr(params, name))}")
