"""Write Params as a Hugging Face folder (effect: writes files)."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from .architectures import ARCHITECTURES
from .config import ModelConfig
from .params import DTYPES, Params, as_dtype, check_params
from .shard import index_of, leaves

MAX_FILE = 5_000_000_000  # bytes of weights per file, the size published checkpoints use


def save(
    params: Params, folder: str | Path, *, dtype: str | torch.dtype | None = None, max_file_bytes: int = MAX_FILE
) -> None:
    """Write a Hugging Face folder: config.json, generation_config.json, weights and, if there is one, the tokenizer.

    - `dtype`: None is the dtype that the checkpoint was stored in, or the tensors' dtype if that would lose bits, so
      that loaded weights are written back bit for bit.
    - `max_file_bytes`: most bytes of weights in one file.

    Raises ValueError for the shard of one of several ranks, for a tree that `check_params` refuses, and for a config
    that config.json cannot express.
    """
    if params.shard.size != 1:
        raise ValueError(
            f"params hold only rank {params.shard.rank} of {params.shard.size}; save needs the whole model (size=1)"
        )
    check_params(params)
    folder = Path(folder)
    stored = as_dtype(dtype) if dtype is not None else _stored_dtype(params)
    # No config.json that loads says float64, which the weights' own headers do.
    named = torch.float32 if stored == torch.float64 else stored
    name = next(key for key, value in DTYPES.items() if value == named)
    config, generation = config_dict(params.config, name), generation_dict(params.config)
    if ModelConfig.from_dict(config, generation) != replace(params.config, dtype=name):
        raise ValueError(
            f"a config.json of {params.config.architecture} cannot express this config: settings that the architecture "
            "fixes were changed, such as qk_norm or a window"
        )
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation)
    if params.tokenizer is not None:
        from .tokenizer import save_tokenizer  # here: parameters alone need no tokenizers library

        save_tokenizer(params.tokenizer, folder)
    _save_weights(checkpoint_tensors(params), folder, stored, max_file_bytes)


def checkpoint_tensors(params: Params) -> dict[str, Tensor]:
    """Views of the tree under their checkpoint names and shapes; a tied head is left out."""
    table = leaves(params.config, params.shard)
    tree: Any = params.tree
    found = {}
    for leaf in table:
        value = tree
        for key in leaf.path:
            value = value[key]
        for piece in leaf.pieces:
            found[piece.tensor] = value[index_of(piece.dest)].reshape(piece.shape)
    return found


def _stored_dtype(params: Params) -> torch.dtype:
    own = params.tree["embed"].dtype
    wanted = as_dtype(params.config.dtype) if params.config.dtype else own
    if wanted == own or all(torch.equal(t.to(wanted).to(own), t) for t in checkpoint_tensors(params).values()):
        return wanted
    return own


def _save_weights(tensors: dict[str, Tensor], folder: Path, dtype: torch.dtype, max_file_bytes: int) -> None:
    groups: list[list[str]] = [[]]
    used = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * dtype.itemsize
        if groups[-1] and used + nbytes > max_file_bytes:
            groups, used = [*groups, []], 0
        groups[-1].append(name)
        used += nbytes
    weight_map = {}
    for number, names in enumerate(groups, 1):
        file = "model.safetensors" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        # Clones: the format refuses views that share memory.
        part = {name: tensors[name].detach().to("cpu", dtype, copy=True).contiguous() for name in names}
        save_file(part, folder / file, metadata={"format": "pt"})
        # safetensors lets the owner alone read what it writes: give it the mode of the files beside it.
        (folder / file).chmod((folder / "config.json").stat().st_mode & 0o777)
        weight_map.update(dict.fromkeys(names, file))
    # What an earlier checkpoint left in the folder would be read in place of these files.
    (folder / ("model.safetensors.index.json" if len(groups) == 1 else "model.safetensors")).unlink(missing_ok=True)
    if len(groups) > 1:
        total = sum(tensor.numel() for tensor in tensors.values()) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(folder / "model.safetensors.index.json", index)


def config_dict(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """config.json in the spelling that transformers 4 and 5 both read."""
    arch, rope = ARCHITECTURES[config.architecture], config.rope
    found: dict[str, Any] = {
        "architectures": [config.architecture],
        "model_type": arch.model_type,
        "torch_dtype": dtype,
        "rope_theta": rope.rope_theta,
        "rope_scaling": None,
    }
    same = """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
    head_dim rms_norm_eps hidden_act tie_word_embeddings max_position_embeddings bos_token_id"""
    found |= {name: getattr(config, name) for name in same.split()}
    found["eos_token_id"] = _ids(config)
    if rope.rope_type != "default":
        fields = {name: value for name, value in vars(rope).items() if value is not None and name != "rope_theta"}
        if rope.truncate:
            del fields["truncate"]  # true is what a reader takes anyway
        found["rope_scaling"] = {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}
    for flag, value in ((arch.qkv_bias, config.qkv_bias), (arch.mlp_bias, config.mlp_bias)):
        if isinstance(flag, str):
            found[flag] = value
    found |= _window_dict(config, arch.window)
    if arch.sparse:
        names = "num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob"
        found |= {name: getattr(config, name) for name in names.split()}
        dense = [index for index, sparse in enumerate(config.sparse_layers) if not sparse]
        found |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}
    return found


def _window_dict(config: ModelConfig, kind: str) -> dict[str, Any]:
    if kind == "none":
        return {}
    windows = {window for window in config.sliding_window if window is not None}
    found: dict[str, Any] = {"sliding_window": next(iter(windows), None)}
    if kind != "all":
        found["use_sliding_window"] = bool(windows)
    if kind == "layers":
        names = ("full_attention", "sliding_attention")
        found["layer_types"] = [names[window is not None] for window in config.sliding_window]
        # Readers that know no layer_types take the layers from here on.
        full = [index for index, window in enumerate(config.sliding_window) if window is None]
        found["max_window_layers"] = full[-1] + 1 if full else 0
    return found


def _ids(config: ModelConfig) -> int | list[int] | None:
    ids = list(config.eos_token_ids)
    return ids[0] if len(ids) == 1 else ids or None


def generation_dict(config: ModelConfig) -> dict[str, Any]:
    """generation_config.json: token ids and the sampling defaults that were found."""
    ids = {"bos_token_id": config.bos_token_id, "eos_token_id": _ids(config)}
    return {name: value for name, value in {**ids, **dict(config.generation_defaults)}.items() if value is not None}


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
