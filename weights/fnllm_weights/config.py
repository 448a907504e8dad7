"""ModelConfig: the settings of config.json and generation_config.json, read once and checked (pure)."""

from dataclasses import dataclass
from typing import Any

from .architectures import (
    ARCHITECTURES,
    COMMON_FIELDS,
    HARMLESS_FIELDS,
    SPARSE_FIELDS,
    WINDOW_FIELDS,
    Architecture,
    find_architecture,
)
from .fields import first_id, read_bool, read_dtype, read_flag, read_float, read_ids, read_int
from .rope_config import RopeConfig, read_rope


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The config of a decoder-only model; names as in config.json, with one entry per layer where layers may differ.

    Raises ValueError that names the field, for values that contradict each other or are not supported.
    """

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
                raise ValueError(
                    f"{name} has {len(given)} entries; num_hidden_layers={self.num_hidden_layers} needed, or () for "
                    f"{empty} in every layer"
                )
        _check(self)

    @staticmethod
    def from_dict(config: dict, generation_config: dict | None = None) -> "ModelConfig":
        """A ModelConfig from the parsed JSON files, in the spelling of transformers 4 or 5.

        Raises ValueError that names the field: an unsupported architecture (checked first), quantised weights, a value
        out of range, or a field that is set and not known here.
        """
        name, arch = find_architecture(config)
        if quantised := config.get("quantization_config"):
            method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
            raise ValueError(
                f"quantised checkpoints are not supported (quantization_config: {method}); use the unquantised weights"
            )
        _refuse_unknown(config, name, arch)
        hidden, heads = read_int(config, "hidden_size"), read_int(config, "num_attention_heads")
        layers = read_int(config, "num_hidden_layers")
        max_positions = read_int(config, "max_position_embeddings", arch.max_positions)
        generation = generation_config or {}
        vocab_size = read_int(config, "vocab_size")
        return ModelConfig(
            architecture=name,
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=read_int(config, "intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=read_int(config, "num_key_value_heads", heads),
            head_dim=read_int(config, "head_dim", _default_head_dim(config, hidden, heads)),
            rms_norm_eps=read_float(config, "rms_norm_eps", 1e-6),
            hidden_act=config.get("hidden_act") or "silu",
            tie_word_embeddings=read_bool(config, "tie_word_embeddings"),
            max_position_embeddings=max_positions,
            rope=read_rope(config, max_positions),
            qkv_bias=read_flag(config, arch.qkv_bias),
            o_bias=read_flag(config, arch.o_bias),
            mlp_bias=read_flag(config, arch.mlp_bias),
            qk_norm=arch.qk_norm,
            sliding_window=_windows(config, arch, layers),
            bos_token_id=first_id(config, generation, "bos_token_id"),
            # An id beyond the vocabulary can never be produced, and whoever masks it would write out of bounds.
            eos_token_ids=tuple(i for i in read_ids(config, generation, "eos_token_id") if i < vocab_size),
            dtype=read_dtype(config),
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


def _windows(config: dict, arch: Architecture, layers: int) -> tuple[int | None, ...]:
    switched_off = arch.window in ("layers", "switched") and not read_bool(config, "use_sliding_window")
    window = None if arch.window == "none" or switched_off else _window_size(config)
    if arch.window == "layers":
        first = read_int(config, "max_window_layers", 28, low=0)
        uses = [index >= first for index in range(layers)]
    else:
        uses = [True] * layers
    if (types := config.get("layer_types")) is not None:
        if (
            not isinstance(types, list | tuple)
            or len(types) != layers
            or not all(kind in ("full_attention", "sliding_attention") for kind in types)
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
    return None if config.get("sliding_window", 4096) is None else read_int(config, "sliding_window", 4096)


def _experts(config: dict, layers: int) -> dict[str, Any]:
    if "num_experts" in config and config.get("num_local_experts", config["num_experts"]) != config["num_experts"]:
        raise ValueError(
            f"num_experts={config['num_experts']} and num_local_experts={config['num_local_experts']} differ"
        )
    experts = read_int(config, "num_experts", config.get("num_local_experts", 128))
    step = read_int(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list | tuple):
        raise ValueError(f"mlp_only_layers must be a list of layer numbers, found {dense!r}")
    return {
        "num_experts": experts,
        "num_experts_per_tok": read_int(config, "num_experts_per_tok", 8),
        "moe_intermediate_size": read_int(config, "moe_intermediate_size", 768),
        "norm_topk_prob": read_bool(config, "norm_topk_prob"),
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


def _generation_defaults(generation: dict) -> tuple[tuple[str, Any], ...]:
    names = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
    return tuple((name, generation[name]) for name in names if generation.get(name) is not None)
