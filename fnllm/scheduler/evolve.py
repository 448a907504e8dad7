"""A fast `dataclasses.replace` for values that change several times per step."""

from typing import Any, TypeVar

Value = TypeVar("Value")


def evolve(value: Value, **changes: Any) -> Value:
    """A copy of a frozen dataclass (without slots or `__post_init__`) with other fields, much faster than `replace`.

    >>> from dataclasses import dataclass
    >>> Point = dataclass(frozen=True)(type("Point", (), {"__annotations__": {"x": int, "y": int}}))
    >>> evolve(Point(1, 2), y=3).y
    3
    """
    new, old = object.__new__(type(value)), value.__dict__
    fields = new.__dict__
    fields |= old
    fields |= changes
    if len(fields) != len(old):
        unknown = sorted(changes.keys() - old.keys())
        raise TypeError(f"{type(value).__name__} has no field {', '.join(unknown)}")
    return new
