"""fnllm: an LLM inference engine of pure functions over parameter pytrees.

Names are loaded at first use, so that `fnllm --help` and light imports do not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fnllm.capture import Capture, capture_bytes
    from fnllm.completion import Chunk, Completion
    from fnllm.edits import Edit, ablate, patch, steer
    from fnllm.engines import Engine, engine, weights_changed
    from fnllm.generation import generate, stream
    from fnllm.layers import Layers
    from fnllm.loading import load
    from fnllm.log import Event, apply, event, replay
    from fnllm.model import forward
    from fnllm.options import EngineOptions
    from fnllm.sampling import Sampling
    from fnllm.scoring import Scored, score
    from fnllm.state import State, abort, add, append, finish, fork, show, tokens, truncate
    from fnllm.tensor_parallel import TensorParallel, simulate
    from fnllm_weights import ModelConfig, Params, save

_HOMES = {
    "fnllm_weights": ("ModelConfig", "Params", "save"),
    "fnllm.completion": ("Chunk", "Completion"),
    "fnllm.engines": ("Engine", "engine", "weights_changed"),
    "fnllm.generation": ("generate", "stream"),
    "fnllm.layers": ("Layers",),
    "fnllm.loading": ("load",),
    "fnllm.model": ("forward",),
    "fnllm.options": ("EngineOptions",),
    "fnllm.log": ("Event", "apply", "event", "replay"),
    "fnllm.sampling": ("Sampling",),
    "fnllm.scoring": ("Scored", "score"),
    "fnllm.state": ("State", "abort", "add", "append", "finish", "fork", "show", "tokens", "truncate"),
    "fnllm.capture": ("Capture", "capture_bytes"),
    "fnllm.edits": ("Edit", "ablate", "patch", "steer"),
    "fnllm.tensor_parallel": ("TensorParallel", "simulate"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Capture",
    "Chunk",
    "Completion",
    "Edit",
    "Engine",
    "EngineOptions",
    "Event",
    "Layers",
    "ModelConfig",
    "Params",
    "Sampling",
    "Scored",
    "State",
    "TensorParallel",
    "ablate",
    "abort",
    "add",
    "append",
    "apply",
    "capture_bytes",
    "engine",
    "event",
    "finish",
    "fork",
    "forward",
    "generate",
    "load",
    "patch",
    "replay",
    "save",
    "score",
    "show",
    "simulate",
    "steer",
    "stream",
    "tokens",
    "truncate",
    "weights_changed",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'fnllm' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
