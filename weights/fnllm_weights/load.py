"""Read safetensors straight into this rank's tree (effect: reads files, allocates on the device)."""

import json
import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .config import ModelConfig
from .hub import config_folder, weights_folder
from .params import Params, as_dtype, build_tree
from .plan import Copy, LoadPlan, TensorInfo, make_plan, parse_header
from .shard import Shard
from .tokenizer import load_tokenizer

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_HEADER = 100_000_000  # bytes; the limit of the format's own reader


class LoadReport(NamedTuple):
    """What a load read: bytes of weights, seconds of reading, and the bytes of each checkpoint tensor."""

    nbytes: int
    seconds: float
    tensors: dict[str, int]

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / 1e9 / max(self.seconds, 1e-9)

    def __str__(self) -> str:
        return f"{self.nbytes / 1e9:.2f} GB in {self.seconds:.2f} s ({self.gb_per_s:.1f} GB/s)"


def load(
    path_or_hub_id: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    revision: str | None = None,
    rank: int = 0,
    size: int = 1,
) -> Params:
    """Params of a local folder or hub id: the share of rank `rank` of `size`.

    device: a CUDA device if there is one, else the CPU. dtype: the checkpoint's on CUDA, float32 on the CPU.
    Raises ValueError that names the file, tensor or field, before anything is allocated.
    """
    return load_with_report(path_or_hub_id, dtype=dtype, device=device, revision=revision, rank=rank, size=size)[0]


def load_with_report(
    path_or_hub_id: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    revision: str | None = None,
    rank: int = 0,
    size: int = 1,
) -> tuple[Params, LoadReport]:
    """As `load`, with the report of what was read and how fast."""
    config = read_config(config_folder(path_or_hub_id, revision))
    folder, shard = weights_folder(path_or_hub_id, revision), Shard(rank, size)
    plan = make_plan(config, read_headers(folder), shard)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = as_dtype(dtype or (plan.dtype if device.type != "cpu" else "float32"))
    with ThreadPoolExecutor(1) as pool:
        tokenizer = pool.submit(load_tokenizer, folder)  # half a second for a large vocabulary: beside the weights
        tensors, report = execute(plan, folder, dtype, device)
        config = replace(config, dtype=plan.dtype)
        return Params(config, tokenizer.result(), build_tree(config, tensors), shard, {}), report


def read_config(folder: Path) -> ModelConfig:
    """ModelConfig from config.json and, if it is there, generation_config.json."""
    generation = folder / "generation_config.json"
    return ModelConfig.from_dict(
        read_json(folder / "config.json"), read_json(generation) if generation.exists() else None
    )


def read_json(file: Path) -> Any:
    """Parsed JSON; ValueError that names the file when it is missing or broken."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist; a checkpoint folder needs it") from None
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of the checkpoint, from the headers of its files; no weight is read."""
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{folder / INDEX} has no weight_map")
        files = sorted(set(weight_map.values()))
    elif (folder / SINGLE).exists():
        weight_map, files = {}, [SINGLE]
    else:
        raise ValueError(f"{folder} has no weights: expected {SINGLE} or {INDEX}")
    if absent := [file for file in files if not (folder / file).is_file()]:
        raise ValueError(f"{folder / INDEX} lists files that are not there: {', '.join(absent)}")
    found: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in _read_header(folder, file).items():
            if weight_map.get(name, file) == file:
                found[name] = info
    if lost := [f"{name} ({file})" for name, file in weight_map.items() if name not in found]:
        raise ValueError(f"{folder / INDEX} lists tensors that their files lack: {', '.join(lost[:5])}")
    return found


def _read_header(folder: Path, file: str) -> dict[str, TensorInfo]:
    path = folder / file
    with open(path, "rb") as stream:
        start = stream.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 2 <= length <= min(MAX_HEADER, path.stat().st_size - 8):
            raise ValueError(f"{path} is no safetensors file, or it is truncated")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise ValueError(f"{path} has a broken header: {error}") from None
    return parse_header(file, start, header, path.stat().st_size)


def execute(
    plan: LoadPlan, folder: Path, dtype: torch.dtype, device: torch.device
) -> tuple[dict[tuple, Tensor], LoadReport]:
    """Allocate the leaves and carry out the copies with parallel threads."""
    began = time.perf_counter()
    tensors = {leaf.path: torch.empty(leaf.shape, dtype=dtype, device=device) for leaf in plan.leaves}
    for leaf in plan.leaves:
        for box in leaf.padding:
            _view(tensors[leaf.path], box).zero_()
    handles = {file: _open(folder / file) for file in {copy.file for copy in plan.copies}}
    read: Counter[str] = Counter()

    def fill(copy: Copy) -> tuple[str, int]:
        part = _read(handles, copy)
        _view(tensors[copy.path], copy.dest).copy_(part)
        return copy.tensor, part.numel() * part.element_size()

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for tensor, nbytes in pool.map(fill, plan.copies):
            read[tensor] += nbytes
    return tensors, LoadReport(sum(read.values()), time.perf_counter() - began, dict(read))


def _open(file: Path):
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error


def _read(handles: dict, copy: Copy) -> Tensor:
    return handles[copy.file].get_slice(copy.tensor)[tuple(slice(*bounds) for bounds in copy.source)]


def _view(leaf: Tensor, box) -> Tensor:
    return leaf[tuple(slice(*bounds) for bounds in box)]
