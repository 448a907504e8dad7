"""Where a result comes from: commit, versions and machine, and the model shapes that several harnesses share."""

import math
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from workloads import SHAPES, config_dict

import fnllm
import fnllm_weights
from fnllm_weights.params import walk

ROOT = Path(__file__).parents[1]
SMALL_SHAPES = {
    "tiny": dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=48, vocab_size=101,
    ),
    # large enough for every kernel that a real model takes, small enough to be checked on a CPU
    "small": dict(
        hidden_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=128,
        intermediate_size=1024, vocab_size=4099,
    ),
    "0.6b-cut": dict(SHAPES["0.6b"], num_hidden_layers=4, vocab_size=16411),
}  # fmt: skip
GAIN = 1.2  # of each product: texts wander, and every token before matters


def provenance() -> dict:
    """The command, its commit, date, versions and machine."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40"], capture_output=True, text=True, cwd=ROOT
    )
    found = dict(
        command=" ".join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
        commit=commit.stdout.strip(),
        date=time.strftime("%Y-%m-%d"),
        python=platform.python_version(),
        torch=torch.__version__,
        cores=os.cpu_count(),
    )
    for package in ("triton", "tokenspeed-fa3"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    if torch.cuda.is_available():
        found["gpu"], found["cuda"] = torch.cuda.get_device_name(), torch.version.cuda
    return found


def model_config(size: str) -> fnllm_weights.ModelConfig:
    """The config of one of the workloads' shapes, or of a small one."""
    if size in SHAPES:
        return fnllm_weights.ModelConfig.from_dict(config_dict(size))
    fields = {**config_dict("0.6b"), **SMALL_SHAPES[size], "bos_token_id": 1, "eos_token_id": 2}
    return fnllm_weights.ModelConfig.from_dict({**fields, "tie_word_embeddings": False})


def random_params(size: str, *, dtype: str, device: str, seed: int = 0, lively: bool = False) -> fnllm.Params:
    """Random weights of a shape, on one rank; `lively` ones are large enough that texts wander."""
    config = model_config(size)
    tree = fnllm_weights.init(config, seed=seed, dtype=dtype, device=device)
    if lively:
        for path, leaf in walk(tree):
            if "norm" not in str(path[-1]):
                leaf.mul_(GAIN / leaf.std().item() / math.sqrt(leaf.shape[-1]))
    return fnllm.Params(config, None, tree, fnllm_weights.Shard(), {})
