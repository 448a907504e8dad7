"""Which activations of a request to capture: sites, positions and the memory they need, known beforehand (pure)."""

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int

from fnllm.scheduler import Plan
from fnllm_weights import ModelConfig

LAYER_SITES = ("resid_pre", "q", "k", "v", "attn_out", "resid_mid", "mlp_out", "resid_post")
FINAL_SITES = ("final_norm", "logits")
POSITIONS = ("all", "prompt", "output", "last")


@dataclass(frozen=True)
class Capture:
    """Activations of a request to return: at `sites`, for the tokens at `positions`.

    A site may contain `*` for every layer. Positions are "all", "prompt", "output" (the new tokens), "last" (the
    prompt's last token, whose logits give the first new token), or integers; negative ones count from the end of the
    prompt. The last new token is never fed to the model, so it has no activations. Raises TypeError or ValueError for
    other sites or positions.
    """

    sites: Any  # one name or several; stored as a tuple
    positions: Any = "all"

    def __post_init__(self) -> None:
        if isinstance(self.sites, Mapping) or not isinstance(self.sites, Iterable):
            raise TypeError(f"sites must be a name or several, as in 'layers.3.resid_post'; found {self.sites!r}")
        object.__setattr__(self, "sites", (self.sites,) if isinstance(self.sites, str) else tuple(self.sites))
        if isinstance(self.positions, str):
            if self.positions not in POSITIONS:
                raise ValueError(
                    f"positions must be one of {', '.join(POSITIONS)}, or integers; found {self.positions!r}"
                )
            return
        several = isinstance(self.positions, Iterable) and getattr(self.positions, "ndim", 1) > 0  # an argmax is one
        many = tuple(self.positions) if several else (self.positions,)
        try:
            if any(isinstance(p, bool) or getattr(p, "dtype", None) == torch.bool for p in many):
                raise TypeError  # True would count as 1, and a mask as positions 0 and 1
            numbers = tuple(operator.index(p) for p in many)
        except TypeError:
            raise TypeError(
                f"positions must be one of {', '.join(POSITIONS)}, or integers; found {self.positions!r}"
            ) from None
        object.__setattr__(self, "positions", numbers)


NOTHING = Capture(())


class CapturedRows(NamedTuple):
    """Rows of a step's captured activations that belong to one sequence."""

    seq_id: int
    positions: Int[np.ndarray, " n"]
    first: int  # row of the first; the others follow


def as_capture(capture: Any) -> Capture:
    """A Capture from what callers may write: None, one, a site, or several sites."""
    if capture is None:
        return NOTHING
    return capture if isinstance(capture, Capture) else Capture(capture)


def captures_of_each(capture: Any, count: int) -> list[Capture]:
    """Each of `count` prompts' capture: the same for all, or a list with a Capture or None for each.

    Raises ValueError when the list's length is another.
    """
    if capture is None or isinstance(capture, (str, Capture)):
        return [as_capture(capture)] * count
    if isinstance(capture, Mapping) or not isinstance(capture, Iterable):
        raise TypeError(
            f"capture must be sites, a fnllm.Capture(sites, positions), or a list with one for each prompt; "
            f"found {capture!r}"
        )
    given = list(capture)
    if all(isinstance(site, str) for site in given):
        return [Capture(given)] * count
    if len(given) != count:
        raise ValueError(
            f"{count} prompts and {len(given)} captures; give sites for all prompts, or a Capture for each"
        )
    return [as_capture(one) for one in given]


def expand(config: ModelConfig, capture: Capture) -> Capture:
    """The capture with its patterns replaced by sites. Raises ValueError for a site that this model does not have."""
    if not capture.sites:
        return capture
    known = [f"layers.{i}.{name}" for i in range(config.num_hidden_layers) for name in LAYER_SITES] + list(FINAL_SITES)
    sites: dict[str, None] = {}
    for pattern in capture.sites:
        found = [site for site in known if fnmatchcase(site, pattern)] if isinstance(pattern, str) else []
        if not found:
            raise ValueError(
                f"unknown site {pattern!r}; sites are layers.<0 to {config.num_hidden_layers - 1}>."
                f"<{'|'.join(LAYER_SITES)}>, {' and '.join(FINAL_SITES)}; * stands for every layer"
            )
        sites.update(dict.fromkeys(found))
    return Capture(tuple(sites), capture.positions)


def wanted(capture: Capture, prompt_length: int, start: int, stop: int) -> Int[np.ndarray, " n"]:
    """The positions to capture among [start, stop), rising.

    >>> wanted(Capture("logits", "output"), 4, 2, 6).tolist(), wanted(Capture("logits", (-1, 0)), 4, 0, 6).tolist()
    ([4, 5], [0, 3])
    """
    if not capture.sites:
        return np.arange(0)
    kind = capture.positions
    if isinstance(kind, str):
        low = {"output": prompt_length, "last": prompt_length - 1}.get(kind, 0)
        high = {"prompt": prompt_length, "last": prompt_length}.get(kind, stop)
        return np.arange(max(start, low), max(start, low, min(stop, high)))
    places = {p if p >= 0 else p + prompt_length for p in kind}
    return np.array(sorted(p for p in places if start <= p < stop), dtype=int)


def needs_whole_prompt(capture: Capture, prompt_length: int) -> bool:
    """Whether a token is captured that a prefix hit would skip: any of the prompt but the last, which always runs."""
    return bool(capture.sites) and len(wanted(capture, prompt_length, 0, prompt_length - 1)) > 0


def captured_rows(
    capture_of: Callable[[int], tuple[Capture, int]], plan: Plan
) -> tuple[Int[np.ndarray, " C"], tuple[CapturedRows, ...]]:
    """Which tokens of a plan's batch to capture, and whose they are. `capture_of` gives (capture, prompt length)."""
    tokens, owners, count = [np.arange(0)], [], 0
    first = np.cumsum(plan.query_lens) - plan.query_lens
    for seq_id, start, length, at in zip(
        plan.seq_ids.tolist(), plan.starts.tolist(), plan.query_lens.tolist(), first.tolist(), strict=True
    ):
        positions = wanted(*capture_of(seq_id), start, start + length)
        if len(positions):
            owners.append(CapturedRows(seq_id, positions, count))
            tokens.append(positions - start + at)
            count += len(positions)
    return np.concatenate(tokens).astype(np.int64), tuple(owners)


def site_shape(config: ModelConfig, site: str) -> tuple[int, ...]:
    """The shape of one token's activations at a site."""
    name = site.rpartition(".")[2]
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "v": config.num_key_value_heads}
    if name in heads:
        return heads[name], config.head_dim
    return (config.vocab_size if name == "logits" else config.hidden_size,)


def capture_bytes(
    config: ModelConfig, capture: Any, *, prompt_tokens: int, new_tokens: int = 0, dtype: torch.dtype = torch.float32
) -> int:
    """An upper bound, in bytes on the model's device, for the captured activations of one request.

    It is exact for a request that generates all `new_tokens`. `capture` is as in `generate` for one prompt; `dtype` is
    the model's. Raises ValueError for a site that the model does not have.
    """
    found = expand(config, as_capture(capture))
    read = prompt_tokens + max(0, new_tokens - 1)
    width = sum(math.prod(site_shape(config, site)) for site in found.sites)
    return len(wanted(found, prompt_tokens, 0, read)) * width * dtype.itemsize


def union_of_sites(captures: Iterable[Capture]) -> tuple[str, ...]:
    """All sites that any of the captures names, in order of first mention."""
    return tuple(dict.fromkeys(site for capture in captures for site in capture.sites))
