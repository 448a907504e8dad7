"""Helpers that keep tests of compiled steps short: fewer layers, and graphs that run as torch's own operations."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from fnllm_weights import Params


@contextlib.contextmanager
def without_code_generation() -> Iterator[None]:
    """Steps are traced as always. Generating code takes seconds of every graph, and what is traced shows without."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", traced_by("eager"))
        yield


def traced_by(backend: Any) -> Callable:
    """torch.compile with a backend of its own, which knows none of Inductor's options."""
    real = torch.compile

    def compile(function: Callable, *, options: dict | None = None, **settings: Any) -> Callable:
        return real(function, **{**settings, "backend": backend})

    return compile


def two_layers(params: Params) -> Params:
    """The first two layers: the oracles have a layer of each of their kinds among them, and more take longer alone."""
    return first_layers(params, 2)


def first_layers(params: Params, count: int) -> Params:
    whole = params.config
    config = replace(
        whole,
        num_hidden_layers=count,
        sliding_window=whole.sliding_window[:count],
        sparse_layers=whole.sparse_layers[:count],
    )
    return params._replace(config=config, tree={**params.tree, "layers": params.tree["layers"][:count]})
