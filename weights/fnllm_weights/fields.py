"""Reading single fields of the JSON files: each value checked, each error naming its field (pure)."""

import math
from typing import Any


def read_flag(config: dict, decided_by: bool | str) -> bool:
    """What an architecture fixes, or what the config field that decides says."""
    return read_bool(config, decided_by) if isinstance(decided_by, str) else decided_by


def read_bool(config: dict, field: str) -> bool:
    """True or false; missing and null are false."""
    value = config.get(field)
    if value not in (None, True, False):
        raise ValueError(f"{field} must be true or false, found {value!r}")
    return bool(value)


def is_number(value: Any) -> bool:
    """A finite int or float, which a bool is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def read_int(config: dict, field: str, default: int | None = None, low: int = 1) -> int:
    """A whole number of at least `low`; the default stands for missing and null, without one the field is required."""
    value = config.get(field)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"config.json lacks {field}")
    if not is_number(value) or value != int(value) or value < low:
        raise ValueError(f"{field} must be a whole number of at least {low}, found {value!r}")
    return int(value)


def read_float(config: dict, field: str, default: float) -> float:
    """A positive number; the default stands for missing and null."""
    value = config.get(field)
    value = default if value is None else value
    if not is_number(value) or value <= 0:
        raise ValueError(f"{field} must be a positive number, found {value!r}")
    return float(value)


def read_ids(config: dict, generation: dict, field: str) -> tuple[int, ...]:
    """The token ids of both files under this name, one or a list in each, united in order."""
    ids: list[int] = []
    for source in (config, generation):
        value = source.get(field)
        for one in value if isinstance(value, list | tuple) else [] if value is None else [value]:
            if not is_number(one) or one != int(one):
                raise ValueError(f"{field} must be a token id or a list of them, found {value!r}")
            # Some files write -1 for "none".
            if one >= 0 and int(one) not in ids:
                ids.append(int(one))
    return tuple(ids)


def first_id(config: dict, generation: dict, field: str) -> int | None:
    """The first of `read_ids`, None if there is none."""
    return next(iter(read_ids(config, generation, field)), None)


def read_dtype(config: dict) -> str | None:
    """The dtype in the new or old spelling; None if the config does not give it."""
    value = config.get("dtype") or config.get("torch_dtype")
    if value is None or value == "auto":
        return None
    name = str(value).removeprefix("torch.")
    if name not in ("float32", "float16", "bfloat16"):
        raise ValueError(f"dtype={value!r} is not supported; supported: float32, float16, bfloat16")
    return name
