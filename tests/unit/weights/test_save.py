"""Saving: what was loaded comes back bit for bit, and other readers take it for the same model."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from fnllm_weights import ModelConfig, Params, load, save
from fnllm_weights.init import init
from fnllm_weights.tokenizer import make_tokenizer

FOLDERS = """llama-tiny mistral-tiny qwen2-tiny qwen2-window qwen3-bias qwen3-dynamic qwen3-linear qwen3-moe-mixed
qwen3-moe-norm qwen3-odd qwen3-tiny qwen3-untied-sharded qwen3-yarn""".split()


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("model*.safetensors") for name, t in load_file(file).items()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("name", FOLDERS)
def test_the_layout_comes_back_bit_for_bit(oracle, tmp_path, name):
    """Even through float32, the dtype that the CPU computes in."""
    params = load(oracle / name)
    save(params, tmp_path / "deep/copy")
    before, after = stored(oracle / name), stored(tmp_path / "deep/copy")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert after[key].dtype == tensor.dtype and torch.equal(bits(after[key]), bits(tensor)), key
    assert load(tmp_path / "deep/copy").config == params.config


@pytest.mark.parametrize("name", FOLDERS)
def test_transformers_reads_the_same_model(oracle, tmp_path, name):
    save(load(oracle / name), tmp_path)
    before, after = (AutoConfig.from_pretrained(folder) for folder in (oracle / name, tmp_path))
    assert after.rope_parameters == before.rope_parameters
    for field in ("vocab_size", "hidden_size", "rms_norm_eps", "eos_token_id", "dtype", "tie_word_embeddings"):
        assert getattr(after, field) == getattr(before, field)
    ids = torch.arange(20)[None]
    logits = [
        AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32)(ids).logits for f in (oracle / name, tmp_path)
    ]
    assert torch.equal(*logits)


def test_several_files_and_what_an_earlier_checkpoint_left(oracle, tmp_path):
    params = load(oracle / "qwen3-tiny")
    save(params, tmp_path)
    save(params, tmp_path, max_file_bytes=40_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert not (tmp_path / "model.safetensors").exists()
    assert index["metadata"]["total_size"] == sum(t.numel() * 2 for t in stored(oracle / "qwen3-tiny").values())
    assert torch.equal(load(tmp_path).tree["embed"], params.tree["embed"])
    changed = params._replace(tree={**params.tree, "norm": torch.zeros(48)})
    save(changed, tmp_path)
    assert not (tmp_path / "model.safetensors.index.json").exists()
    assert (load(tmp_path).tree["norm"] == 0).all()


def test_the_stored_dtype_is_kept_only_where_it_loses_nothing(oracle, tmp_path):
    params = load(oracle / "qwen3-tiny")
    trained = params._replace(tree={**params.tree, "norm": params.tree["norm"] + 1e-6})
    save(trained, tmp_path)
    assert {t.dtype for t in stored(tmp_path).values()} == {torch.float32}
    assert load(tmp_path).config.dtype == "float32"
    assert torch.equal(load(tmp_path).tree["norm"], trained.tree["norm"])
    save(trained, tmp_path, dtype="float16")
    assert {t.dtype for t in stored(tmp_path).values()} == {torch.float16}


def test_float64_weights_come_back_bit_for_bit(oracle, tmp_path):
    params = load(oracle / "qwen3-tiny", dtype="float64")
    trained = params._replace(tree={**params.tree, "norm": params.tree["norm"] + 1e-12})
    save(trained, tmp_path)
    assert {t.dtype for t in stored(tmp_path).values()} == {torch.float64}
    assert torch.equal(load(tmp_path, dtype="float64").tree["norm"], trained.tree["norm"])
    assert load(tmp_path).tree["norm"].dtype == torch.float32


def test_a_shard_or_a_misshapen_tree_is_refused(oracle, tmp_path):
    with pytest.raises(ValueError, match=r"params hold only rank 1 of 2; save needs the whole model \(size=1\)"):
        save(load(oracle / "qwen3-tiny", rank=1, size=2), tmp_path)
    params = load(oracle / "qwen3-tiny")
    with pytest.raises(ValueError, match=r"params.norm: expected Float\[H\]=\(48,\), found \(49,\)"):
        save(params._replace(tree={**params.tree, "norm": torch.zeros(49)}), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_config_that_no_file_can_say_is_refused(oracle, tmp_path):
    params = load(oracle / "llama-tiny")
    with pytest.raises(ValueError, match="a config.json of LlamaForCausalLM cannot express this config"):
        save(params._replace(config=replace(params.config, sliding_window=(4, None, 4))), tmp_path)


def test_generation_settings_and_tokenizer_go_along(oracle, tmp_path):
    folder = tmp_path / "first"
    shutil.copytree(oracle / "qwen3-tiny", folder)
    generation = {"eos_token_id": [5, 6], "temperature": 0.6, "top_k": 20, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    params = load(folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    side = {"tokenizer_config.json": '{"bos_token": "b"}', "chat_template.jinja": "{{ messages }}"}
    save(params._replace(tokenizer=make_tokenizer(words, side)), tmp_path / "second")
    again = load(tmp_path / "second")
    assert again.config == params.config
    assert again.config.eos_token_ids == (2, 5, 6) and dict(again.config.generation_defaults)["top_k"] == 20
    assert again.tokenizer.encode("b") == [1] and again.tokenizer.bos_id == 1
    assert again.tokenizer.chat_templates == {"default": "{{ messages }}"}


def test_an_earlier_tokenizers_templates_are_not_read(oracle, tmp_path):
    params, words = load(oracle / "qwen3-tiny"), tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a"))
    more = {"chat_template.jinja": "old", "additional_chat_templates/tool_use.jinja": "old tools"}
    for side in (more, {"tokenizer_config.json": '{"chat_template": "new"}'}):
        save(params._replace(tokenizer=make_tokenizer(words, side)), tmp_path)
    assert load(tmp_path).tokenizer.chat_templates == {"default": "new"}


def test_a_model_made_from_nothing(tmp_path):
    config = ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=11, hidden_size=6, intermediate_size=7, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=4, mlp_bias=True, eos_token_ids=(3,),
    )  # fmt: skip
    tree = init(config, seed=1, dtype="float32")
    save(Params(config, None, tree), tmp_path)
    assert load(tmp_path).config == replace(config, dtype="float32")
    assert torch.equal(load(tmp_path).tree["layers"][1]["gate_up_bias"], tree["layers"][1]["gate_up_bias"])
