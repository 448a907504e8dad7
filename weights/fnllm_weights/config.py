"""ModelConfig: what config.json and generation_config.json say, read once and checked (pure)."""

import math
from dataclasses import dataclass
from typing import Any

from .architectures import (
    ARCHITECTURES,
    COMMON_FIELDS,
    HARMLESS_FIELDS,
    ROPE_FIELDS,
    SPARSE_FIELDS,
    WINDOW_FIELDS,
    Architecture,
    find_architecture,
)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding settings; None where the file gives no value and the scaling has a rule of its own."""

    rope_theta: float = 10000.0
    rope_type: str = "default"
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder-only model; names as in config.json, one entry per layer where layers may differ."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 2048
    rope: RopeConfig = RopeConfig()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: tuple[int | None, ...] = ()
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    sparse_layers: tuple[bool, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = None
    generation_defaults: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self):
        # Direct construction may leave the per-layer tuples out: no window, no sparse layer.
        for name, empty in (("sliding_window", None), ("sparse_layers", False)):
            given = getattr(self, name)
            if not given:
                object.__setattr__(self, name, (empty,) * self.num_hidden_layers)
            elif len(given) != self.num_hidden_layers:
                raise ValueError(f"{name} has {len(given)} entries; num_hidden_layers={self.num_hidden_layers} needed")
        _check(self)

    @staticmethod
    def from_dict(config: dict, generation_config: dict | None = None) -> "ModelConfig":
        """ModelConfig from the parsed JSON files, in the spelling of transformers 4 or 5.

        Raises ValueError that names the field: unsupported architecture (checked first), quantised weights, a value
        out of range, or a field this reader does not know and that is switched on.
        """
        if not isinstance(config, dict):
            raise ValueError(f"config.json must hold one JSON object, found {type(config).__name__}")
        name, arch = find_architecture(config)
        if quantised := config.get("quantization_config"):
            method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
            raise ValueError(
                f"quantised checkpoints are not supported (quantization_config: {method}); use the unquantised weights"
            )
        _refuse_unknown(config, name, arch)
        hidden, heads = _int(config, "hidden_size"), _int(config, "num_attention_heads")
        layers = _int(config, "num_hidden_layers")
        max_positions = _int(config, "max_position_embeddings", arch.max_positions)
        generation = generation_config or {}
        if not isinstance(generation, dict):
            raise ValueError(f"generation_config.json must hold one JSON object, found {type(generation).__name__}")
        vocab_size = _int(config, "vocab_size")
        return ModelConfig(
            architecture=name,
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=_int(config, "intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=_int(config, "num_key_value_heads", heads),
            head_dim=_int(config, "head_dim", _default_head_dim(config, hidden, heads)),
            rms_norm_eps=_float(config, "rms_norm_eps", 1e-6),
            hidden_act=config.get("hidden_act") or "silu",
            tie_word_embeddings=_bool(config, "tie_word_embeddings"),
            max_position_embeddings=max_positions,
            rope=_rope(config, max_positions),
            qkv_bias=_flag(config, arch.qkv_bias),
            o_bias=_flag(config, arch.o_bias),
            mlp_bias=_flag(config, arch.mlp_bias),
            qk_norm=arch.qk_norm,
            sliding_window=_windows(config, arch, layers),
            bos_token_id=_first_id(config, generation, "bos_token_id"),
            # An id beyond the vocabulary can never be produced, and whoever masks it would write out of bounds.
            eos_token_ids=tuple(i for i in _all_ids(config, generation, "eos_token_id") if i < vocab_size),
            dtype=_dtype(config),
            generation_defaults=_generation_defaults(generation),
            **(_experts(config, layers) if arch.sparse else {}),
        )


def _refuse_unknown(config: dict, name: str, arch: Architecture) -> None:
    known = COMMON_FIELDS | WINDOW_FIELDS[arch.window] | (SPARSE_FIELDS if arch.sparse else frozenset())
    known = known | {flag for flag in (arch.qkv_bias, arch.o_bias, arch.mlp_bias) if isinstance(flag, str)}
    # layer_types is checked for every architecture, so that a list this reader would not follow is never ignored.
    known = known | HARMLESS_FIELDS | {"layer_types"}
    # Some files say in a field of their own what the architecture has anyway.
    restated = {"use_qk_norm": arch.qk_norm, "attention_bias": arch.qkv_bias, "qkv_bias": arch.qkv_bias}
    unknown = [
        f"{field}={value!r}"
        for field, value in config.items()
        if field not in known
        and not field.startswith("_")
        and value not in (None, False, "", [], {})
        and not (value is True and restated.get(field) is True)
    ]
    if unknown:
        raise ValueError(
            f"config.json of {name} has fields that may change what the model computes and that are not known here: "
            f"{', '.join(unknown)}; if they have no effect, remove them from config.json or set them to null"
        )


def _rope(config: dict, max_positions: int) -> RopeConfig:
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    for field, value in (("rope_parameters", new), ("rope_scaling", old)):
        if not isinstance(value, dict):
            raise ValueError(f"{field} must be a JSON object or null, found {value!r}")
    given: dict[str, Any] = {}
    # The same quantity may stand in several places: equal values are one, different ones have no right reading.
    places = [("", {"rope_theta": config.get("rope_theta")}), ("rope_scaling.", old), ("rope_parameters.", new)]
    places.append(("", {"partial_rotary_factor": config.get("partial_rotary_factor")}))
    places.append(("", {"original_max_position_embeddings": config.get("original_max_position_embeddings")}))
    for place, values in places:
        for key, value in values.items():
            key = "rope_type" if key == "type" else key
            if value is None:
                continue
            if given.setdefault(key, value) != value:
                raise ValueError(f"config.json gives two values for {key}: {given[key]!r} and {place}{key}={value!r}")
    kind = given.pop("rope_type", "default")
    if str(kind) not in ROPE_FIELDS:
        raise ValueError(f"rope_type={kind!r} is not supported; supported: {', '.join(ROPE_FIELDS)}")
    if given.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor other than 1.0 is not supported: the whole head is rotated")
    theta = given.pop("rope_theta", 10000.0)
    required, optional = ROPE_FIELDS[kind]
    given.pop("finetuned", None)  # a note in early yarn files
    if kind in ("default", "linear", "dynamic"):
        given.pop("original_max_position_embeddings", None)  # these scalings count from max_position_embeddings
    if unknown := sorted(given.keys() - required - optional):
        raise ValueError(
            f"rope scaling {kind!r} has no entry {', '.join(unknown)}; it reads {sorted(required | optional)}"
        )
    if kind in ("yarn", "longrope", "llama3"):
        original = given.setdefault("original_max_position_embeddings", max_positions)
        if kind != "llama3" and "factor" not in given:
            given["factor"] = max_positions / original
    if missing := sorted(required - given.keys()):
        raise ValueError(f"rope scaling {kind!r} needs {', '.join(missing)}, which config.json does not give")
    values = {key: _rope_value(key, value) for key, value in {"rope_theta": theta, **given}.items()}
    return RopeConfig(rope_type=kind, **values)


def _rope_value(key: str, value: Any) -> Any:
    if key in ("short_factor", "long_factor"):
        if not isinstance(value, list | tuple) or not all(_is_number(v) and v > 0 for v in value):
            raise ValueError(f"rope {key} must be a list of positive numbers, found {value!r}")
        return tuple(float(v) for v in value)
    if key == "truncate":
        if not isinstance(value, bool):
            raise ValueError(f"rope truncate must be true or false, found {value!r}")
        return value
    # Zero stands for "not given" in these.
    may_be_zero = key in ("mscale", "mscale_all_dim", "beta_fast", "beta_slow")
    if not _is_number(value) or value < 0 or (value == 0 and not may_be_zero):
        raise ValueError(f"rope {key} must be a positive number, found {value!r}")
    return int(value) if key == "original_max_position_embeddings" else float(value)


def _windows(config: dict, arch: Architecture, layers: int) -> tuple[int | None, ...]:
    switched_off = arch.window in ("layers", "switched") and not _bool(config, "use_sliding_window")
    window = None if arch.window == "none" or switched_off else _window_size(config)
    if arch.window == "layers":
        first = _int(config, "max_window_layers", 28, low=0)
        uses = [index >= first for index in range(layers)]
    else:
        uses = [True] * layers
    if (types := config.get("layer_types")) is not None:
        if (
            not isinstance(types, list | tuple)
            or len(types) != layers
            or not set(types) <= {"full_attention", "sliding_attention"}
        ):
            raise ValueError(
                f"layer_types must have one of full_attention, sliding_attention for each of {layers} layers, "
                f"found {types!r}"
            )
        named = [kind == "sliding_attention" for kind in types]
        if arch.window == "layers":
            uses = named
        if any(named) and window is None or (arch.window != "layers" and window and not all(named)):
            raise ValueError(
                f"layer_types={types!r} does not agree with sliding_window={config.get('sliding_window')!r}, "
                f"use_sliding_window={config.get('use_sliding_window')!r}"
            )
    return tuple(window if use else None for use in uses)


def _window_size(config: dict) -> int | None:
    # A missing field means 4096 in every architecture that has a window; null means none.
    return None if config.get("sliding_window", 4096) is None else _int(config, "sliding_window", 4096)


def _experts(config: dict, layers: int) -> dict[str, Any]:
    if "num_experts" in config and config.get("num_local_experts", config["num_experts"]) != config["num_experts"]:
        raise ValueError(
            f"num_experts={config['num_experts']} and num_local_experts={config['num_local_experts']} differ"
        )
    experts = _int(config, "num_experts", config.get("num_local_experts", 128))
    step = _int(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list | tuple):
        raise ValueError(f"mlp_only_layers must be a list of layer numbers, found {dense!r}")
    return {
        "num_experts": experts,
        "num_experts_per_tok": _int(config, "num_experts_per_tok", 8),
        "moe_intermediate_size": _int(config, "moe_intermediate_size", 768),
        "norm_topk_prob": _bool(config, "norm_topk_prob"),
        "sparse_layers": tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
    }


def _default_head_dim(config: dict, hidden: int, heads: int) -> int:
    if config.get("head_dim") is None and hidden % heads:
        raise ValueError(f"head_dim is missing and hidden_size={hidden} is no multiple of num_attention_heads={heads}")
    return hidden // heads


def _check(config: ModelConfig) -> None:
    if config.architecture not in ARCHITECTURES:
        raise ValueError(f"architecture {config.architecture} is not supported; supported: {', '.join(ARCHITECTURES)}")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads={config.num_attention_heads} is no multiple of "
            f"num_key_value_heads={config.num_key_value_heads}"
        )
    if config.head_dim % 2:
        raise ValueError(f"head_dim={config.head_dim} is odd; rotary embeddings need an even one")
    if config.hidden_act not in ("silu", "swish"):
        raise ValueError(f"hidden_act={config.hidden_act!r} is not supported; supported: silu")
    if config.num_experts and not 1 <= config.num_experts_per_tok <= config.num_experts:
        raise ValueError(
            f"num_experts_per_tok={config.num_experts_per_tok} must lie between 1 and num_experts={config.num_experts}"
        )
    rope = config.rope
    if rope.rope_type == "dynamic" and config.head_dim < 4:
        raise ValueError(f"rope scaling 'dynamic' needs head_dim of at least 4, found {config.head_dim}")
    if rope.rope_type == "llama3" and (rope.high_freq_factor or 0) <= (rope.low_freq_factor or 0):
        raise ValueError(
            f"rope high_freq_factor={rope.high_freq_factor} must be above low_freq_factor={rope.low_freq_factor}"
        )
    for name in ("short_factor", "long_factor"):
        factors = getattr(rope, name)
        if factors is not None and len(factors) != config.head_dim // 2:
            raise ValueError(f"rope {name} has {len(factors)} numbers; head_dim={config.head_dim} needs half as many")


def _flag(config: dict, decided_by: bool | str) -> bool:
    return _bool(config, decided_by) if isinstance(decided_by, str) else decided_by


def _bool(config: dict, field: str) -> bool:
    value = config.get(field)
    if value not in (None, True, False):
        raise ValueError(f"{field} must be true or false, found {value!r}")
    return bool(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _int(config: dict, field: str, default: int | None = None, low: int = 1) -> int:
    value = config.get(field)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"config.json lacks {field}")
    if not _is_number(value) or value != int(value) or value < low:
        raise ValueError(f"{field} must be a whole number of at least {low}, found {value!r}")
    return int(value)


def _float(config: dict, field: str, default: float) -> float:
    value = config.get(field)
    value = default if value is None else value
    if not _is_number(value) or value <= 0:
        raise ValueError(f"{field} must be a positive number, found {value!r}")
    return float(value)


def _all_ids(config: dict, generation: dict, field: str) -> tuple[int, ...]:
    ids: list[int] = []
    for source in (config, generation):
        value = source.get(field)
        for one in value if isinstance(value, list | tuple) else [] if value is None else [value]:
            if not _is_number(one) or one != int(one):
                raise ValueError(f"{field} must be a token id or a list of them, found {value!r}")
            # Some files write -1 for "none".
            if one >= 0 and int(one) not in ids:
                ids.append(int(one))
    return tuple(ids)


def _first_id(config: dict, generation: dict, field: str) -> int | None:
    return next(iter(_all_ids(config, generation, field)), None)


def _dtype(config: dict) -> str | None:
    value = config.get("dtype", config.get("torch_dtype"))
    if value is None or value == "auto":
        return None
    name = str(value).removeprefix("torch.")
    if name not in ("float32", "float16", "bfloat16"):
        raise ValueError(f"dtype={value!r} is not supported; supported: float32, float16, bfloat16")
    return name


def _generation_defaults(generation: dict) -> tuple[tuple[str, Any], ...]:
    names = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
    return tuple((name, generation[name]) for name in names if generation.get(name) is not None)
