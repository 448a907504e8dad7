"""Reading safetensors directly into this rank's tree (effect: reads files, allocates on the device)."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .config import ModelConfig
from .hub import config_folder, weights_folder
from .params import Params, as_dtype, build_tree
from .plan import TensorInfo, make_plan, parse_header
from .read import LoadReport, execute
from .shard import Shard
from .tokenizer import load_tokenizer

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_HEADER = 100_000_000  # bytes; the limit of the format's own reader


def load(
    path_or_hub_id: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    revision: str | None = None,
    rank: int = 0,
    size: int = 1,
) -> Params:
    """Load the shard of rank `rank` of `size` from a local folder or hub id.

    - `dtype`: None is the checkpoint's dtype on CUDA and float32 on the CPU.
    - `device`: None is a CUDA device if there is one, otherwise the CPU.
    - `revision`: a branch, tag or commit on the hub.

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
    """Like `load`, with a report of the bytes read and the time it took."""
    read_config(config_folder(path_or_hub_id, revision))  # refuses the model before its weights are fetched
    folder, shard = weights_folder(path_or_hub_id, revision), Shard(rank, size)
    config = read_config(folder)
    plan = make_plan(config, read_headers(folder), shard)
    device = _device(device)
    dtype = as_dtype(dtype or (plan.dtype if device.type != "cpu" else "float32"))
    with ThreadPoolExecutor(1) as pool:
        tokenizer = pool.submit(load_tokenizer, folder)  # half a second for a large vocabulary: beside the weights
        tensors, report = execute(plan, folder, dtype, device)
        config = replace(config, dtype=plan.dtype)
        return Params(config, tokenizer.result(), build_tree(config, tensors), shard, {}), report


def _device(device: str | torch.device | None) -> torch.device:
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and device.index is None:
        # The current device belongs to a thread, and other threads will do the reading.
        return torch.device("cuda", torch.cuda.current_device())
    return device


def read_config(folder: Path) -> ModelConfig:
    """ModelConfig from config.json and, if it is there, generation_config.json."""
    generation = folder / "generation_config.json"
    return ModelConfig.from_dict(
        read_json(folder / "config.json"), read_json(generation) if generation.exists() else None
    )


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file; ValueError that names the file when it is missing, broken or no object."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist; a checkpoint folder needs it") from None
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} must hold one JSON object, found {type(found).__name__}")
    return found


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of the checkpoint, from the headers of its files; no weight is read."""
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{folder / INDEX} has no weight_map")
        if strange := [file for file in weight_map.values() if not isinstance(file, str)]:
            raise ValueError(f"{folder / INDEX}: weight_map must give each tensor a file name, found {strange[0]!r}")
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
            if name in found and name not in weight_map:
                raise ValueError(f"{name} is in {found[name].file} and in {file}, and {folder / INDEX} names neither")
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
    return parse_header(file, header, path.stat().st_size - 8 - length)
