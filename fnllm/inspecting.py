"""Describing a checkpoint from its config and the headers of its files; no weight is read (effect: reads files)."""

import math
from collections import Counter
from collections.abc import Mapping

import torch

from fnllm.cache import block_bytes
from fnllm_weights import ModelConfig, local_sizes, make_plan
from fnllm_weights.hub import config_folder
from fnllm_weights.load import read_config, read_headers
from fnllm_weights.plan import TensorInfo
from fnllm_weights.shard import Shard, leaves
from fnllm_weights.tokenizer import Tokenizer, load_tokenizer

BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1}


def describe(path: str) -> str:
    """A report on a checkpoint folder or hub id; ValueError that names what is missing or not supported."""
    folder = config_folder(path, None)
    config = read_config(folder)
    has_weights = any(folder.glob("*.safetensors*"))  # of a hub id the config alone may be here
    headers = read_headers(folder) if has_weights else {}
    if has_weights:
        make_plan(config, headers, Shard(0, 1))  # says so if a tensor is missing or has another shape
    return report(path, config, headers, load_tokenizer(folder))


def report(path: str, config: ModelConfig, headers: Mapping[str, TensorInfo], tokenizer: Tokenizer | None) -> str:
    """The report's text."""
    kv_bytes = block_bytes(config, local_sizes(config), 1, torch.bfloat16)  # of a token
    rows = [
        ("model", f"{path} ({config.architecture})"),
        ("parameters", f"{parameter_count(config):,}{', head tied to the embedding' * config.tie_word_embeddings}"),
        ("layers", f"{config.num_hidden_layers} of hidden size {config.hidden_size}, MLP {config.intermediate_size}"),
        (
            "attention",
            f"{config.num_attention_heads} query heads, {config.num_key_value_heads} KV heads, size "
            f"{config.head_dim}{windows(config)}",
        ),
        (
            "positions",
            f"{config.max_position_embeddings:,}, RoPE {config.rope.rope_type}, theta {config.rope.rope_theta:g}",
        ),
        ("vocabulary", vocabulary(config, tokenizer)),
        (
            "KV cache",
            f"{kv_bytes / 1024:,.1f} KiB per token in 16 bits, "
            f"{kv_bytes * config.max_position_embeddings / 2**30:.2f} GiB for a full sequence",
        ),
        ("weights", weights(headers)),
        ("defaults", ", ".join(f"{name} {value}" for name, value in config.generation_defaults) or "none"),
    ]
    if config.num_experts:
        experts = (
            f"{config.num_experts}, {config.num_experts_per_tok} per token, width "
            f"{config.moe_intermediate_size}, in {sum(config.sparse_layers)} layers"
        )
        rows.insert(4, ("experts", experts))
    return "\n".join(f"{name:<11} {value}" for name, value in rows)


def parameter_count(config: ModelConfig) -> int:
    """Numbers in the whole model; a tied head counts once."""
    return sum(math.prod(leaf.shape) for leaf in leaves(config))


def windows(config: ModelConfig) -> str:
    """Which layers see only the nearest tokens."""
    found = Counter(window for window in config.sliding_window if window is not None)
    return "".join(f", window {window} in {count} layers" for window, count in sorted(found.items()))


def vocabulary(config: ModelConfig, tokenizer: Tokenizer | None) -> str:
    """Rows of the embedding, and what the tokenizer covers of them."""
    ends = f"eos {', '.join(map(str, config.eos_token_ids)) or 'none'}"
    if tokenizer is None:
        return f"{config.vocab_size:,}, {ends}; no tokenizer: token ids only"
    chat = "chat template" if tokenizer.chat_templates else "no chat template"
    return f"{config.vocab_size:,}, {ends}; tokenizer with {tokenizer.num_ids:,} ids, {chat}"


def weights(headers: Mapping[str, TensorInfo]) -> str:
    """Size, dtypes and number of the files."""
    if not headers:
        return "none here"
    sizes: Counter[str] = Counter()
    for info in headers.values():
        sizes[info.dtype] += math.prod(info.shape) * BYTES.get(info.dtype, 0)
    files = len({info.file for info in headers.values()})
    return (
        f"{sum(sizes.values()) / 1e9:.3f} GB ({', '.join(sorted(sizes))}), {len(headers)} tensors, "
        f"{files} file{'s' * (files > 1)}"
    )
