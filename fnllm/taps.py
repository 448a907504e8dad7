"""Named places in the forward pass where activations are captured and edited.

Sites that are not used cost nothing. Sites, edit functions and shapes are fixed in a compiled step. Which requests are
edited, with which values, and which tokens are captured are tensors, so a mixed batch compiles once.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from fnllm.edits import Channel, column, name_of, values_for, width_given
from fnllm.tensor_parallel import TensorParallel
from fnllm_weights import ModelConfig, Shard, local_sizes

if TYPE_CHECKING:
    from fnllm.context import Context


class Choice(NamedTuple):
    """Which rows (or sequences of a batch) use one channel, and their values: one entry per row."""

    active: Bool[Tensor, " R"]
    values: tuple[Tensor, ...]  # each [R, *shape]; arbitrary for inactive rows


class Taps(NamedTuple):
    """What to capture and edit in one forward pass.

    `captured` is the one write-only collector of a forward pass: it is created for the pass, filled during it, and
    returned with its result. Nothing reads it while the pass runs.
    """

    capture: tuple[str, ...] = ()
    edits: tuple[Channel, ...] = ()
    choices: tuple[Choice, ...] = ()  # of each channel, by sequence of the batch
    tokens: Int[Tensor, " C"] | None = None  # which tokens of the batch to capture; None: all
    captured: dict[str, Tensor] | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing is captured or edited; checked first, since tracing a step pays for every line it runs."""
        return not self.capture and not self.edits

    def wants(self, site: str) -> bool:
        if self.idle:
            return False
        return site in self.capture or any(channel.site == site for channel in self.edits)

    def look_into(self, layer: int) -> bool:
        """Whether any site of a decoder layer is captured or edited."""
        if self.idle:
            return False
        sites = (*self.capture, *(channel.site for channel in self.edits))
        return any(site.startswith(f"layers.{layer}.") for site in sites)

    def __call__(self, site: str, x: Tensor, ctx: "Context") -> Tensor:
        for channel, choice in zip(self.edits, self.choices, strict=True):
            if channel.site == site:
                x = edited(x, channel, choice, ctx)
        if site in self.capture:
            assert self.captured is not None
            self.captured[site] = x if self.tokens is None else x[self.tokens]
        return x


def edited(x: Tensor, channel: Channel, choice: Choice, ctx: "Context") -> Tensor:
    """The activation with the channel's function applied to the tokens of the sequences that asked for it.

    Raises ValueError when the function gives another shape or dtype.
    """
    entry = ctx.batch.entry
    width = width_given(channel)
    if width is not None and width != tuple(x.shape[1:]):
        raise ValueError(
            f"the edit {name_of(channel.apply)} at {channel.site} has values for activations of shape {width}; a token "
            f"there has shape {tuple(x.shape[1:])}{part_of(channel.site, ctx)}"
        )
    # A copy, which costs a compiled step nothing where nobody writes to it: `x` is other sequences' too.
    y = channel.apply(x.clone(), ctx, *values_for(channel, choice.values, entry))
    if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype:
        found = f"{tuple(y.shape)} {y.dtype}" if isinstance(y, Tensor) else type(y).__name__
        raise ValueError(
            f"the edit {name_of(channel.apply)} at {channel.site} must return the shape and dtype it was given, "
            f"{tuple(x.shape)} {x.dtype}; found {found}"
        )
    return torch.where(column(choice.active[entry], x), y, x)


def part_of(site: str, ctx: "Context") -> str:
    """Words for an error where a rank sees only a part of the activation; none where it sees the whole."""
    if ctx.tp.size == 1 or site.rpartition(".")[2] not in ("q", "k", "v", "logits"):
        return ""
    return f", the part of one of {ctx.tp.size} ranks: use a fnllm.Edit whose function selects its part by ctx.tp.rank"


def whole_sites(captured: dict[str, Tensor], config: ModelConfig, tp: TensorParallel) -> dict[str, Tensor]:
    """Captured activations with the parts of all ranks put together: heads of q, k and v, the vocabulary of logits."""
    return {site: whole_site(site.rpartition(".")[2], x, config, tp) for site, x in captured.items()}


def whole_site(name: str, x: Tensor, config: ModelConfig, tp: TensorParallel) -> Tensor:
    """One captured activation, whole and without padding."""
    if name == "logits":
        return tp.all_gather(x, -1)[:, : config.vocab_size]
    if tp.size == 1 or name not in ("q", "k", "v"):
        return x
    everyone = tp.all_gather(x, 1)
    parts, known = [], 0
    for rank in range(tp.size):
        sizes = local_sizes(config, Shard(rank, tp.size))
        span = sizes.q_span if name == "q" else sizes.kv_span
        if span.stop > known:  # a KV head that several ranks hold is taken from the first
            parts.append(everyone[:, rank * span.rows : rank * span.rows + span.stop - span.start])
            known = span.stop
    return torch.cat(parts, 1)
