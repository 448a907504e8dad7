"""The sampling settings of the rows, as tensors with one entry per row."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fnllm.sampler.features import SamplerFeatures, stop_ids

NO_ID = -1
LARGE = 1e30


class SamplerRows(NamedTuple):
    """Per-row settings; a row's neutral values are those of `default_rows`."""

    temperature: Float[Tensor, " R"]  # 0: the largest logit
    top_k: Int[Tensor, " R"]  # 0: off
    top_p: Float[Tensor, " R"]  # 1: off
    min_p: Float[Tensor, " R"]  # 0: off
    repetition_penalty: Float[Tensor, " R"]  # 1: off
    presence_penalty: Float[Tensor, " R"]  # 0: off
    frequency_penalty: Float[Tensor, " R"]  # 0: off
    seed: Int[Tensor, " R"]  # int64
    min_position: Int[Tensor, " R"]  # stop_ids are not drawn at positions below this
    stop_ids: Int[Tensor, "R E"]  # padded with -1
    bias_ids: Int[Tensor, "R K"]  # padded with -1
    bias_values: Float[Tensor, "R K"]
    logits_fn: Int[Tensor, " R"]  # index into SamplerFeatures.logits_fns; -1: none


def default_rows(
    n: int,
    device: torch.device | str = "cpu",
    *,
    features: SamplerFeatures = SamplerFeatures(),  # noqa: B008  a value
) -> SamplerRows:
    """`n` greedy rows with everything off, in the widths of `features`."""

    def full(value: int | float, dtype: torch.dtype, *width: int) -> Tensor:
        return torch.full((n, *width), value, dtype=dtype, device=device)

    return SamplerRows(
        temperature=full(0.0, torch.float32),
        top_k=full(0, torch.int32),
        top_p=full(1.0, torch.float32),
        min_p=full(0.0, torch.float32),
        repetition_penalty=full(1.0, torch.float32),
        presence_penalty=full(0.0, torch.float32),
        frequency_penalty=full(0.0, torch.float32),
        seed=full(0, torch.int64),
        min_position=full(0, torch.int64),
        stop_ids=full(NO_ID, torch.int64, features.stops),
        bias_ids=full(NO_ID, torch.int64, features.bias),
        bias_values=full(0.0, torch.float32, features.bias),
        logits_fn=full(NO_ID, torch.int32),
    )


def rows_from_sampling(
    samplings: Sequence[Any],
    *,
    features: SamplerFeatures,
    prompt_lengths: Sequence[int] | None = None,
    seeds: Sequence[int] | None = None,
    eos_token_ids: Sequence[int] = (),
) -> SamplerRows:
    """Rows (on the CPU) for objects with the fields of `Sampling`.

    `seeds` replaces the samplings' own; without it a row whose seed is None gets 0. `prompt_lengths` (tokens) turn
    `min_tokens` into a position. `features` must serve every row: see `features_of`.

    Raises:
        ValueError: if the lengths differ, or a row needs a wider table or a function that `features` lacks.
    """
    n = len(samplings)
    prompt_lengths = [0] * n if prompt_lengths is None else prompt_lengths
    seeds = [s.seed or 0 for s in samplings] if seeds is None else seeds
    for name, values in (("prompt_lengths", prompt_lengths), ("seeds", seeds)):
        if len(values) != n:
            raise ValueError(f"{name} holds {len(values)} values for {n} samplings; give one per sampling")
    stops = [stop_ids(s, eos_token_ids) for s in samplings]
    biases = [dict(s.logit_bias) for s in samplings]
    values = [[bounded(value) for value in b.values()] for b in biases]
    fns = [NO_ID if s.logits_fn is None else _index(features.logits_fns, s.logits_fn) for s in samplings]

    def column(values: list, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device="cpu")

    return SamplerRows(
        temperature=column([bounded(s.temperature) for s in samplings], torch.float32),
        top_k=column([min(s.top_k, 2**31 - 1) for s in samplings], torch.int32),
        top_p=column([s.top_p for s in samplings], torch.float32),
        min_p=column([s.min_p for s in samplings], torch.float32),
        repetition_penalty=column([max(bounded(s.repetition_penalty), 1 / LARGE) for s in samplings], torch.float32),
        presence_penalty=column([bounded(s.presence_penalty) for s in samplings], torch.float32),
        frequency_penalty=column([bounded(s.frequency_penalty) for s in samplings], torch.float32),
        seed=column([signed_64(seed) for seed in seeds], torch.int64),
        min_position=column(
            [min(p + s.min_tokens, 2**63 - 1) for p, s in zip(prompt_lengths, samplings, strict=True)], torch.int64
        ),
        stop_ids=_padded(stops, features.stops, NO_ID, torch.int64, "stops"),
        bias_ids=_padded([list(b) for b in biases], features.bias, NO_ID, torch.int64, "bias"),
        bias_values=_padded(values, features.bias, 0.0, torch.float32, "bias"),
        logits_fn=column(fns, torch.int32),
    )


def bounded(value: int | float) -> int | float:
    """A setting so far within float32 that what is computed with it is finite; -inf, which forbids, stays."""
    return value if value == -math.inf else min(max(value, -LARGE), LARGE)


def take_rows(rows: SamplerRows, index: Int[Tensor, " B"], features: SamplerFeatures | None = None) -> SamplerRows:
    """The rows of `index`, in its order; with `features` only the settings that they read, the others as they are."""
    unread: set[str] = set()
    if features is not None:
        used = {  # besides seed and temperature
            "top_k": features.top_k,
            "top_p": features.top_p,
            "min_p": features.min_p,
            "repetition_penalty": features.penalties,
            "presence_penalty": features.penalties,
            "frequency_penalty": features.penalties,
            "min_position": features.stops > 0,
            "stop_ids": features.stops > 0,
            "bias_ids": features.bias > 0,
            "bias_values": features.bias > 0,
            "logits_fn": bool(features.logits_fns),
        }
        needs_all = features.top_k or features.top_p or features.min_p
        unread = {name for name, read in used.items() if not read and not needs_all}
    return SamplerRows(*(x if name in unread else x[index] for name, x in zip(rows._fields, rows, strict=True)))


def widen_rows(rows: SamplerRows, features: SamplerFeatures) -> SamplerRows:
    """`rows` with its tables widened to those of wider `features`; the new entries are padding."""

    def widen(table: Tensor, width: int, fill: int | float) -> Tensor:
        return torch.nn.functional.pad(table, (0, width - table.shape[1]), value=fill)

    return rows._replace(
        stop_ids=widen(rows.stop_ids, features.stops, NO_ID),
        bias_ids=widen(rows.bias_ids, features.bias, NO_ID),
        bias_values=widen(rows.bias_values, features.bias, 0.0),
    )


def child_seed(seed: int, index: int) -> int:
    """The seed of sample `index` of a request with n > 1, as a signed 64-bit integer; sample 0 keeps the request's.

    The steps between children are those of a Weyl sequence, so that close seeds do not share children.
    """
    return signed_64(seed + index * 0x9E3779B97F4A7C15)


def prompt_seed(seed: int, index: int) -> int:
    """The seed of prompt `index` of a call, whose first prompt keeps the call's; calls with close seeds share none."""
    return signed_64(seed + index * 0xD1B54A32D192ED03)


def signed_64(value: int) -> int:
    """The integer in [-2**63, 2**63) that equals `value` modulo 2**64."""
    return (value + 2**63) % 2**64 - 2**63


def _index(fns: tuple, fn: Any) -> int:
    places = {one: place for place, one in enumerate(fns)}  # by hash, since == may ask tensors that they hold
    if fn not in places:
        raise ValueError(f"logits_fn {fn!r} is not among features.logits_fns; use features_of")
    return places[fn]


def _padded(lists: list, width: int, fill: int | float, dtype: torch.dtype, name: str) -> Tensor:
    longest = max((len(values) for values in lists), default=0)
    if longest > width:
        raise ValueError(f"a row needs {longest} entries of features.{name}={width}; use features_of")
    table = [list(values) + [fill] * (width - len(values)) for values in lists]
    return torch.tensor(table, dtype=dtype, device="cpu").reshape(len(lists), width)
