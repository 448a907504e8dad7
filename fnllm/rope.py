"""Rotary position embeddings: frequencies of every supported scaling, tables per token, rotation (pure, traceable).

The frequencies follow transformers operation by operation in float32 on the CPU, since one unit in the last place of a
frequency is a visible angle at position 100,000.
"""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from fnllm_weights import ModelConfig, RopeConfig


class Rope(NamedTuple):
    """Frequencies on the model's device; only tensors and None, so that a compiled step sees no Python numbers.

    A sequence longer than `switch_length` tokens uses `long_inv_freq` (longrope), or frequencies of a base that grows
    with its length (dynamic). Both are None in all other scalings.
    """

    inv_freq: Float32[Tensor, " half_D"]
    attention_factor: Float32[Tensor, ""]
    switch_length: Int[Tensor, ""]
    long_inv_freq: Float32[Tensor, " half_D"] | None = None
    # rope_theta, factor, factor - 1 and the original length, for dynamic
    growth: Float32[Tensor, " 4"] | None = None


def make_rope(config: ModelConfig, device: str | torch.device = "cpu") -> Rope:
    """The frequencies of a model, computed on the CPU and moved to `device`."""
    rope, dim = config.rope, config.head_dim
    theta, kind, exponents = rope.rope_theta, rope.rope_type, _exponents(dim)
    inv_freq = 1.0 / (theta**exponents)
    attention_factor, switch_length = 1.0, config.max_position_embeddings
    long_inv_freq, growth = None, None
    if kind == "linear":
        (factor,) = _given(rope, "factor")
        inv_freq = inv_freq / factor
    elif kind == "dynamic":
        (factor,) = _given(rope, "factor")
        growth = torch.tensor([theta, factor, factor - 1, switch_length], dtype=torch.float32, device=device)
    elif kind == "yarn":
        inv_freq, attention_factor = _yarn(rope, dim), _yarn_attention_factor(rope)
    elif kind == "llama3":
        inv_freq = _llama3(rope, inv_freq)
    elif kind == "longrope":
        short, long, switch_length = _given(rope, "short_factor", "long_factor", "original_max_position_embeddings")
        attention_factor = _longrope_attention_factor(rope)
        inv_freq = 1.0 / (torch.tensor(short, dtype=torch.float32, device="cpu") * theta**exponents)
        long_inv_freq = (1.0 / (torch.tensor(long, dtype=torch.float32, device="cpu") * theta**exponents)).to(device)
    return Rope(
        inv_freq=inv_freq.to(device),
        attention_factor=torch.tensor(attention_factor, dtype=torch.float32, device=device),
        switch_length=torch.tensor(switch_length, device=device),
        long_inv_freq=long_inv_freq,
        growth=growth,
    )


def context_limit(config: ModelConfig) -> int | None:
    """The number of positions that a model was made for; None for dynamic scaling, which extends with the length.

    It is `max_position_embeddings`, times the factor of linear and YaRN scalings unless the config includes it already.
    """
    rope, given = config.rope, config.max_position_embeddings
    if rope.rope_type == "dynamic":
        return None
    if rope.rope_type in ("linear", "yarn") and rope.factor is not None:
        return max(given, int((rope.original_max_position_embeddings or given) * rope.factor))
    return given


def longest_shared(config: ModelConfig) -> int | None:
    """Tokens of the longest prompt whose keys other prompts may share; None: no limit.

    Dynamic and longrope scalings give all keys of a longer prompt angles of its own length.
    """
    if config.rope.rope_type == "dynamic":
        return config.max_position_embeddings
    return config.rope.original_max_position_embeddings if config.rope.rope_type == "longrope" else None


def turned_otherwise(config: ModelConfig, one: int, other: int) -> bool:
    """Whether a key has other angles in prompts of these two lengths; see `longest_shared`.

    With dynamic scaling each length beyond that has angles of its own; longrope has one other set.
    """
    shared, (shorter, longer) = longest_shared(config), sorted((one, other))
    by_length = config.rope.rope_type == "dynamic"
    return shared is not None and shorter < longer and shared < longer and (by_length or shorter <= shared)


def rope_tables(
    rope: Rope, positions: Int[Tensor, " T"], lengths: Int[Tensor, " T"]
) -> tuple[Float32[Tensor, "T half_D"], Float32[Tensor, "T half_D"]]:
    """cos and sin of every token's angles, times the attention factor.

    lengths: tokens of the sequence each token belongs to, itself and later ones of the same prefill included; only
    dynamic and longrope look at it.
    """
    inv_freq: Tensor = rope.inv_freq
    if rope.long_inv_freq is not None:
        inv_freq = torch.where((lengths > rope.switch_length)[:, None], rope.long_inv_freq, inv_freq)
    elif rope.growth is not None:
        dim = 2 * inv_freq.shape[0]
        theta, factor, factor_less_one, original = rope.growth.unbind()
        stretched = torch.maximum(lengths, rope.switch_length).float()
        base = theta * (factor * stretched / original - factor_less_one) ** (dim / (dim - 2))
        grown = 1.0 / (base[:, None] ** _exponents(dim, inv_freq.device))
        inv_freq = torch.where((lengths > rope.switch_length)[:, None], grown, inv_freq)
    angles = positions[:, None].float() * inv_freq
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor


def apply_rope(
    x: Float[Tensor, "T N D"], cos: Float32[Tensor, "T half_D"], sin: Float32[Tensor, "T half_D"]
) -> Float[Tensor, "T N D"]:
    """Rotate the pairs (i, i + D/2) of every head, in float32 or wider; the result has x's dtype."""
    halves = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (2, -1))
    first_cos, second_cos = (halves * cos[:, None, None]).unbind(2)
    first_sin, second_sin = (halves * sin[:, None, None]).unbind(2)
    return torch.cat((first_cos - second_sin, second_cos + first_sin), dim=-1).to(x.dtype)


def _given(rope: RopeConfig, *names: str) -> list[Any]:
    """The values of settings that a scaling requires."""
    values = [getattr(rope, name) for name in names]
    if None in values:
        raise ValueError(f"rope scaling {rope.rope_type!r} needs {', '.join(names)}, found {values}")
    return values


def _exponents(dim: int, device: str | torch.device = "cpu") -> Float32[Tensor, " half_D"]:
    return torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim


def _yarn(rope: RopeConfig, dim: int) -> Float32[Tensor, " half_D"]:
    """YaRN (arXiv 2309.00071, section 3.2): low frequencies are interpolated, high ones kept, a ramp between."""

    factor, length = _given(rope, "factor", "original_max_position_embeddings")

    def turns_to_dim(turns: float) -> float:
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = turns_to_dim(rope.beta_fast or 32.0), turns_to_dim(rope.beta_slow or 1.0)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # no division by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    wavelengths = rope.rope_theta ** _exponents(dim)
    kept = 1 - ramp
    return 1.0 / (factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _yarn_attention_factor(rope: RopeConfig) -> float:
    (factor,) = _given(rope, "factor")

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def _longrope_attention_factor(rope: RopeConfig) -> float:
    """LongRoPE (arXiv 2402.13753): sqrt(1 + ln(factor) / ln(original length))."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    factor, original = _given(rope, "factor", "original_max_position_embeddings")
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _llama3(rope: RopeConfig, inv_freq: Float32[Tensor, " half_D"]) -> Float32[Tensor, " half_D"]:
    """Llama 3.1: wavelengths beyond the old context are stretched, short ones kept, a smooth passage between."""
    factor, low, high, length = _given(
        rope, "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
    )
    wavelengths = 2 * math.pi / inv_freq
    stretched = torch.where(wavelengths > length / low, inv_freq / factor, inv_freq)
    smooth = (length / wavelengths - low) / (high - low)
    smoothed = (1 - smooth) * stretched / factor + smooth * stretched
    between = (wavelengths >= length / high) & (wavelengths <= length / low)
    return torch.where(between, smoothed, stretched)
