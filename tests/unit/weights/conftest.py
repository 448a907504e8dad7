"""Folders that the tests of this package share."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

ORACLE = Path(__file__).parents[2] / "oracle"


@pytest.fixture
def oracle() -> Path:
    """The folder of the small checkpoints that transformers wrote."""
    return ORACLE


@pytest.fixture
def edited(tmp_path):
    """A copy of a one-file checkpoint with config fields and tensors replaced; None takes a tensor or field away."""

    def copy(name: str, config: dict | None = None, tensors: dict | None = None) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        for file in ("config.json", "generation_config.json", "model.safetensors"):
            shutil.copy(ORACLE / name / file, folder / file)
        if config is not None:
            fields = {**json.loads((folder / "config.json").read_text()), **config}
            fields = {key: value for key, value in fields.items() if value is not None}
            (folder / "config.json").write_text(json.dumps(fields))
        if tensors is not None:
            stored = {**load_file(folder / "model.safetensors"), **tensors}
            stored = {key: value for key, value in stored.items() if value is not None}
            save_file(stored, folder / "model.safetensors")
        return folder

    return copy
