"""Folders and hub ids: what is asked of huggingface_hub, and what is said when neither is there."""

import shutil
import sys
import types
from pathlib import Path

import pytest
import torch

from fnllm_weights import load


class FakeHub(types.ModuleType):
    """huggingface_hub with one repository, a local folder; notes each call."""

    def __init__(self, folder: Path):
        super().__init__("huggingface_hub")
        self.folder, self.calls = folder, []

    def hf_hub_download(self, repo_id, filename, revision=None):
        self.calls.append(("file", repo_id, filename, revision))
        if repo_id != "some/model":
            raise RuntimeError("404: no such repository")
        target = self.folder / "cache" / filename
        target.parent.mkdir(exist_ok=True)
        shutil.copy(self.folder / filename, target)
        return str(target)

    def snapshot_download(self, repo_id, revision=None, allow_patterns=None):
        self.calls.append(("all", repo_id, revision))
        assert "*.json" in allow_patterns and not any(p.endswith(".bin") for p in allow_patterns)
        return str(self.folder)


@pytest.fixture
def hub(edited, monkeypatch):
    fake = FakeHub(edited("qwen3-tiny"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    return fake


def test_a_hub_id_is_fetched_config_first(hub, oracle):
    params = load("some/model", revision="v2")
    assert hub.calls == [("file", "some/model", "config.json", "v2"), ("all", "some/model", "v2")]
    assert torch.equal(params.tree["embed"], load(oracle / "qwen3-tiny").tree["embed"])
    assert params.config.eos_token_ids == (2,)


def test_fault_65_an_unsupported_model_is_refused_before_its_weights_are_fetched(hub):
    (hub.folder / "config.json").write_text('{"architectures": ["Other"]}')
    with pytest.raises(ValueError, match="architecture Other is not supported; supported: Qwen3ForCausalLM"):
        load("some/model")
    assert [call[0] for call in hub.calls] == ["file"]


def test_an_id_that_the_hub_does_not_know(hub):
    with pytest.raises(ValueError, match="'no/model' is not a folder, and cannot be fetched as a hub id: 404"):
        load("no/model")


def test_without_the_library_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"no folder 'Qwen/Qwen3-0.6B'; .*pip install 'fnllm\[hub\]'"):
        load("Qwen/Qwen3-0.6B")


def test_a_folder_needs_no_hub(monkeypatch, oracle):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert load(str(oracle / "qwen3-tiny")).config.vocab_size == 160


@pytest.mark.parametrize("path", ["./not/here", "/not/here", "a/b/c", "~/nothing", Path("some/model"), ""])
def test_a_path_is_not_taken_for_an_id(path, hub):
    with pytest.raises(ValueError, match="there is no folder|lacks|config.json does not exist"):
        load(path)
    assert not hub.calls


def test_wrong_kinds(oracle, hub):
    with pytest.raises(ValueError, match="config.json is a file; give the folder"):
        load(oracle / "qwen3-tiny/config.json")
    with pytest.raises(TypeError):
        load(3)
