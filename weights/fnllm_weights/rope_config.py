"""RopeConfig: rotary embedding settings, read from any of the spellings in published files (pure)."""

from dataclasses import dataclass
from typing import Any

from .architectures import ROPE_FIELDS
from .fields import is_number


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding settings, named as in transformers; None: not given, so the rule of the scaling applies."""

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


def read_rope(config: dict, max_positions: int) -> RopeConfig:
    """RopeConfig from rope_theta, rope_scaling and rope_parameters; ValueError names an entry that is unknown or wrong.

    max_positions: max_position_embeddings, the original length where none is given.
    """
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
        if not isinstance(value, list | tuple) or not all(is_number(v) and v > 0 for v in value):
            raise ValueError(f"rope {key} must be a list of positive numbers, found {value!r}")
        return tuple(float(v) for v in value)
    if key == "truncate":
        if not isinstance(value, bool):
            raise ValueError(f"rope truncate must be true or false, found {value!r}")
        return value
    # Zero stands for "not given" in these.
    may_be_zero = key in ("mscale", "mscale_all_dim", "beta_fast", "beta_slow")
    if not is_number(value) or value < 0 or (value == 0 and not may_be_zero):
        raise ValueError(f"rope {key} must be a positive number, found {value!r}")
    return int(value) if key == "original_max_position_embeddings" else float(value)
