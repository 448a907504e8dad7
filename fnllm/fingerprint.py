"""A number that is equal for equal values in different processes (pure), where `hash` and `repr` are not."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor


def fingerprint(value: Any) -> int:
    """A signed 64-bit number from a value's contents: numbers, text, containers, dataclasses and arrays.

    A function counts only by its name, and any other object by its type: what they hold may legitimately differ between
    ranks, such as a shard of a tensor.
    """
    digest = hashlib.blake2b(digest_size=8)
    _feed(digest, value)
    return int.from_bytes(digest.digest(), "little", signed=True)


def _feed(digest: Any, value: Any) -> None:
    """Add a value to the digest: its kind and length first and then its parts, so that different nestings differ."""
    if isinstance(value, str | bytes):
        data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        digest.update(f"{type(value).__name__} {len(data)} ".encode() + data)
    elif value is None or isinstance(value, bool | int | float | torch.dtype | torch.device):
        digest.update(f"{value!r} ".encode())
    elif isinstance(value, Tensor):  # its bytes: no Python step for each number of an edit's values
        flat = value.detach().cpu().contiguous().reshape(-1)
        _feed(digest, (str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()))
    elif isinstance(value, np.ndarray | np.generic):
        _feed(digest, (str(value.dtype), tuple(value.shape), value.tolist()))
    elif isinstance(value, list | tuple) and set(map(type, value)) == {int}:
        digest.update(f"ints {len(value)} {list(value)!r} ".encode())  # token ids: no Python step for each
    elif isinstance(value, Mapping):
        _feed(digest, ("mapping", *value.items()))
    elif isinstance(value, Set):
        _feed(digest, ("set", *sorted(map(fingerprint, value))))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        _feed(digest, (type(value).__qualname__, fields))
    elif isinstance(value, Sequence):
        digest.update(f"items {len(value)} ".encode())
        for item in value:
            _feed(digest, item)
    else:
        named = value if hasattr(value, "__qualname__") else type(value)
        digest.update(f"{getattr(named, '__module__', '')}.{named.__qualname__} ".encode())
