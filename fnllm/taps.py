"""Named places in the forward pass where activations are captured and edited."""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Int
from torch import Tensor

from fnllm.batch import Batch


class Edit(NamedTuple):
    """A pure function applied to the activation at a site: `apply(x, batch) -> x` of the same shape and dtype."""

    site: str
    apply: Callable[[Tensor, Batch], Tensor]


class Taps(NamedTuple):
    """What to capture and edit in one forward pass.

    `captured` is the one write-only collector of a forward pass: created for it, filled in it, and returned beside its
    result. Nothing reads it while the pass runs.
    """

    capture: tuple[str, ...] = ()
    edits: tuple[Edit, ...] = ()
    tokens: Int[Tensor, " C"] | None = None  # which tokens of the batch to capture; None: all
    captured: dict[str, Tensor] | None = None

    def wants(self, site: str) -> bool:
        return site in self.capture or any(edit.site == site for edit in self.edits)

    def __call__(self, site: str, x: Tensor, batch: Batch) -> Tensor:
        for edit in self.edits:
            if edit.site == site:
                x = edit.apply(x, batch)
        if site in self.capture:
            assert self.captured is not None
            self.captured[site] = x if self.tokens is None else x[self.tokens]
        return x


def no_taps() -> Taps:
    """Taps that see and change nothing."""
    return Taps()
