"""Named places in the forward pass where activations are captured and edited."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from fnllm_weights import ModelConfig
from jaxtyping import Int
from torch import Tensor

from fnllm.batch import Batch

LAYER_SITES = ("resid_pre", "q", "k", "v", "attn_out", "resid_mid", "mlp_out", "resid_post")
FINAL_SITES = ("final_norm", "logits")


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


def check_sites(config: ModelConfig, sites: Iterable[str]) -> None:
    """Raise ValueError for a site that this model does not have."""
    known = {f"layers.{i}.{name}" for i in range(config.num_hidden_layers) for name in LAYER_SITES} | set(FINAL_SITES)
    for site in sites:
        if site not in known:
            raise ValueError(
                f"unknown site {site!r}; sites are layers.<0 to {config.num_hidden_layers - 1}>.<{'|'.join(LAYER_SITES)}>, "
                f"{' and '.join(FINAL_SITES)}"
            )
