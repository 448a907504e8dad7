"""Loading: fused tensors against the stored ones, shards against the whole, faults named before any allocation."""

import json
import shutil
from collections import Counter

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fnllm_weights import ModelConfig, Params, Shard, check_params, load, load_with_report, make_plan
from fnllm_weights import init as random_tree
from fnllm_weights import read as reading
from fnllm_weights import save as save_params
from fnllm_weights.load import read_config, read_headers
from fnllm_weights.plan import chunks

FOLDERS = """llama-tiny mistral-tiny qwen2-tiny qwen2-window qwen3-bias qwen3-moe-mixed qwen3-odd
qwen3-untied-sharded""".split()
INDEX = "model.safetensors.index.json"


def stored(folder) -> dict[str, torch.Tensor]:
    found = {}
    for file in folder.glob("model*.safetensors"):
        found |= load_file(file)
    return found


@pytest.mark.parametrize("name", FOLDERS)
def test_fused_tensors_are_the_stored_ones(oracle, name):
    params = check_params(load(oracle / name, dtype="bfloat16"))
    found = {key: tensor.bfloat16() for key, tensor in stored(oracle / name).items()}
    assert torch.equal(params.tree["embed"], found["model.embed_tokens.weight"])
    assert torch.equal(params.tree["norm"], found["model.norm.weight"])
    assert params.tokenizer is None
    for index, layer in enumerate(params.tree["layers"]):
        base = f"model.layers.{index}."
        qkv = [found[f"{base}self_attn.{n}_proj.weight"] for n in "qkv"]
        assert torch.equal(layer["qkv"], torch.cat(qkv))
        assert torch.equal(layer["o"], found[f"{base}self_attn.o_proj.weight"])
        assert torch.equal(layer["post_norm"], found[f"{base}post_attention_layernorm.weight"])
        if params.config.qkv_bias:
            assert torch.equal(layer["qkv_bias"], torch.cat([found[f"{base}self_attn.{n}_proj.bias"] for n in "qkv"]))
        if params.config.sparse_layers[index]:
            for e in range(params.config.num_experts):
                expert = [found[f"{base}mlp.experts.{e}.{n}_proj.weight"] for n in ("gate", "up", "down")]
                assert torch.equal(layer["experts_gate_up"][e], torch.cat(expert[:2]))
                assert torch.equal(layer["experts_down"][e], expert[2])
            assert torch.equal(layer["router"], found[f"{base}mlp.gate.weight"])
        else:
            gate_up = [found[f"{base}mlp.{n}_proj.weight"] for n in ("gate", "up")]
            assert torch.equal(layer["gate_up"], torch.cat(gate_up))
            assert torch.equal(layer["down"], found[f"{base}mlp.down_proj.weight"])


def test_dtypes(oracle):
    assert load(oracle / "llama-tiny").tree["embed"].dtype == torch.float32  # on the CPU
    assert load(oracle / "llama-tiny").config.dtype == "float16"  # what is stored
    assert load(oracle / "llama-tiny", dtype=torch.bfloat16).tree["norm"].dtype == torch.bfloat16
    for wrong in ("int8", torch.int8, "half"):
        with pytest.raises(ValueError, match="is not supported; use one of float32, float16, bfloat16"):
            load(oracle / "llama-tiny", dtype=wrong)


def test_nothing_requires_a_gradient(oracle):
    tree = load(oracle / "qwen3-tiny").tree
    assert not any(t.requires_grad for layer in tree["layers"] for t in layer.values())


@pytest.mark.parametrize("name", ["qwen3-odd", "qwen3-bias", "qwen3-untied-sharded", "qwen3-moe-mixed"])
def test_four_ranks_together_read_each_sharded_tensor_once(oracle, name):
    whole_params, whole = load_with_report(oracle / name)
    config, read, largest = whole_params.config, Counter(), 0
    for rank in range(4):
        params, report = load_with_report(oracle / name, rank=rank, size=4)
        check_params(params)
        assert params.shard == Shard(rank, 4)
        assert report.nbytes == sum(report.tensors.values())
        read.update(report.tensors)
        largest = max(largest, report.nbytes)
    sizes = {key: t.numel() * t.element_size() for key, t in stored(oracle / name).items()}
    assert whole.tensors == sizes
    # Four ranks of two KV heads: each head lies on two ranks, so that its rows are read twice.
    kv_copies = 4 // config.num_key_value_heads if 4 % config.num_key_value_heads == 0 else 1
    for tensor, nbytes in read.items():
        replicated = tensor.endswith(("norm.weight", "o_proj.bias", "mlp.gate.weight"))
        copies = 4 if replicated else kv_copies if ".k_proj." in tensor or ".v_proj." in tensor else 1
        assert nbytes == copies * sizes[tensor], tensor
    assert largest < whole.nbytes / 2


def test_tied_leaves_are_one_storage_on_every_rank(oracle):
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        tree = load(oracle / "qwen3-odd", rank=rank, size=size).tree
        assert tree["lm_head"].data_ptr() == tree["embed"].data_ptr() and tree["lm_head"] is tree["embed"]


def test_fault_59_tied_without_a_head_tensor_and_with_one(oracle, edited):
    plain = load(oracle / "qwen3-tiny")
    embed = load_file(oracle / "qwen3-tiny/model.safetensors")["model.embed_tokens.weight"]
    folder = edited("qwen3-tiny", tensors={"lm_head.weight": embed.clone()})
    params = load(folder)
    assert params.tree["lm_head"] is params.tree["embed"]
    assert torch.equal(params.tree["embed"], plain.tree["embed"])
    folder = edited("qwen3-tiny", tensors={"lm_head.weight": embed.clone(), "model.embed_tokens.weight": None})
    assert torch.equal(load(folder).tree["embed"], plain.tree["embed"])


def test_tied_with_a_head_of_its_own_is_not_silently_tied(edited):
    folder = edited("qwen3-tiny", tensors={"lm_head.weight": torch.zeros(160, 48, dtype=torch.bfloat16)})
    with pytest.raises(ValueError, match="ties lm_head.weight to model.embed_tokens.weight, .* they differ"):
        load(folder)


def test_fault_66_a_vocabulary_that_the_ranks_do_not_divide(tmp_path):
    config = ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=37, hidden_size=8, intermediate_size=6, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=4, tie_word_embeddings=True,
    )  # fmt: skip
    tree = random_tree(config, seed=3)
    save_params(Params(config, None, tree), tmp_path)
    ranks = [load(tmp_path, rank=rank, size=2).tree["embed"] for rank in range(2)]
    assert [t.shape for t in ranks] == [(19, 8), (19, 8)]
    assert torch.equal(torch.cat(ranks)[:37], tree["embed"])
    assert (ranks[1][18] == 0).all()


@pytest.fixture
def no_allocation(monkeypatch):
    """Any tensor made by the loader fails the test."""

    def refuse(*args, **kwargs):
        raise AssertionError("allocated before the error")

    monkeypatch.setattr(reading.torch, "empty", refuse)


def test_fault_62_absent_and_broken_files_are_named_before_allocation(oracle, tmp_path, no_allocation):
    with pytest.raises(ValueError, match="config.json does not exist"):
        load(tmp_path)
    shutil.copy(oracle / "qwen3-untied-sharded/config.json", tmp_path)
    with pytest.raises(ValueError, match="has no weights: expected model.safetensors or model.safetensors.index.json"):
        load(tmp_path)
    for file in (oracle / "qwen3-untied-sharded").glob("model*"):
        shutil.copy(file, tmp_path)
    (tmp_path / "model-00003-of-00010.safetensors").unlink()
    with pytest.raises(ValueError, match="lists files that are not there: model-00003-of-00010.safetensors"):
        load(tmp_path)


def test_an_index_that_does_not_fit_its_files(oracle, tmp_path, no_allocation):
    shutil.copytree(oracle / "qwen3-untied-sharded", tmp_path, dirs_exist_ok=True)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00010.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"lists tensors that their files lack: model.norm.weight"):
        load(tmp_path)
    for text in ("{}", '{"weight_map": {}}', '{"weight_map": []}'):
        (tmp_path / INDEX).write_text(text)
        with pytest.raises(ValueError, match="has no weight_map"):
            load(tmp_path)
    for file in ("3", "null", '["a"]'):
        (tmp_path / INDEX).write_text(f'{{"weight_map": {{"a": {file}}}}}')
        with pytest.raises(ValueError, match="index.json: weight_map must give each tensor a file name"):
            load(tmp_path)


def test_a_tensor_in_two_files_is_that_of_the_index_which_must_name_it(oracle, tmp_path):
    shutil.copytree(oracle / "qwen3-untied-sharded", tmp_path, dirs_exist_ok=True)
    index = json.loads((tmp_path / INDEX).read_text())
    name, other = "model.norm.weight", "model-00001-of-00010.safetensors"
    save_file(load_file(tmp_path / other) | {name: torch.zeros(48)}, tmp_path / other)
    assert torch.equal(load(tmp_path).tree["norm"], load(oracle / "qwen3-untied-sharded").tree["norm"])
    file = index["weight_map"].pop(name)
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"^{name} is in {other} and in {file}, and .* names neither"):
        load(tmp_path)


@pytest.mark.parametrize("cut", [0, 4, 8, 100, -1])
def test_a_truncated_file_is_named(edited, cut, no_allocation):
    folder = edited("qwen3-tiny")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:cut])
    with pytest.raises(ValueError, match="model.safetensors.*(truncated|safetensors file)"):
        load(folder)


@pytest.mark.parametrize("content", [b"\x02\0\0\0\0\0\0\0[]", b"\x04\0\0\0\0\0\0\0nope", b"\xff" * 64])
def test_a_corrupt_header_is_named(edited, content, no_allocation):
    folder = edited("qwen3-tiny")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="model.safetensors (has a broken header|is no safetensors file)"):
        load(folder)


def test_broken_json_is_named(edited, no_allocation):
    folder = edited("qwen3-tiny")
    for file in ("generation_config.json", "config.json"):
        (folder / file).write_text("{")
        with pytest.raises(ValueError, match=f"{file} is not valid JSON"):
            load(folder)
        (folder / file).write_text("[1]")
        with pytest.raises(ValueError, match=f"{file} must hold one JSON object, found list"):
            load(folder)


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"num_hidden_layers": 4, "layer_types": None}, None, "the checkpoint lacks model.layers.3.input_layernorm"),
        ({"num_hidden_layers": 2, "layer_types": None}, None, "does not use: model.layers.2"),
        ({"head_dim": 8}, None, r"has shape \(64, 48\), config.json asks for \(32, 48\)"),
        ({"head_dim": None}, None, r"q_proj.weight .* has shape \(64, 48\), config.json asks for \(48, 48\)"),
        ({"tie_word_embeddings": False}, None, "the checkpoint lacks lm_head.weight"),
        (None, {"model.norm.weight": None}, "^the checkpoint lacks model.norm.weight$"),
        (None, {"model.norm.weight": torch.zeros(48, dtype=torch.int8)}, "model.norm.weight .* is stored as I8"),
    ],
)  # fmt: skip
def test_a_config_and_weights_that_do_not_belong_together(edited, config, tensors, message, no_allocation):
    with pytest.raises(ValueError, match=message):
        load(edited("qwen3-tiny", config, tensors))


def test_a_shard_that_cannot_be(oracle, no_allocation):
    with pytest.raises(ValueError, match="rank=2 of size=2 is no rank"):
        load(oracle / "qwen3-tiny", rank=2, size=2)
    with pytest.raises(ValueError, match="num_attention_heads=4 cannot be split over size=5 ranks; use size 4 or less"):
        load(oracle / "qwen3-tiny", rank=0, size=5)


def test_many_threads_and_chunks_change_nothing(oracle, monkeypatch):
    expected = load(oracle / "qwen3-moe-mixed", rank=1, size=3).tree
    monkeypatch.setattr(reading, "CHUNK", 100)
    monkeypatch.setattr(reading, "_threads", lambda device: 5)
    found = load(oracle / "qwen3-moe-mixed", rank=1, size=3).tree
    for one, other in zip(found["layers"], expected["layers"], strict=True):
        assert all(torch.equal(one[key], other[key]) for key in other)
    assert torch.equal(found["embed"], expected["embed"])


def test_staging_copies_bits_of_any_view():
    buffer = torch.zeros(64, dtype=torch.uint8)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        part = torch.arange(12, dtype=dtype).view(3, 4)[1:, 1:3]
        staged = reading.stage(part, buffer)
        assert torch.equal(staged, part) and staged.dtype == dtype and staged.is_contiguous()
        assert staged.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    large = torch.zeros(17)
    assert reading.stage(large, buffer) is large


class Stand:
    """Stands in for a CUDA stream, event or context: everything is done at once."""

    def __init__(self, *args):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False

    def synchronize(self):
        pass

    wait_event = record = __init__


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_way_through_pinned_buffers(oracle, monkeypatch, dtype):
    """Chunks, turns of the two buffers and conversion, with a stand-in for the device."""
    for name in ("Stream", "Event", "device", "stream"):
        monkeypatch.setattr(torch.cuda, name, Stand)
    plain_empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **kw: plain_empty(*shape, **kw))
    monkeypatch.setattr(reading, "CHUNK", 200)
    folder = oracle / "qwen3-moe-mixed"
    plan = make_plan(read_config(folder), read_headers(folder), Shard(1, 3))
    expected, report = reading.execute(plan, folder, dtype, torch.device("cpu"))
    handles = {file: safe_open(folder / file, "pt") for file in {copy.file for copy in plan.copies}}
    tensors = {path: torch.full_like(tensor, 0) for path, tensor in expected.items()}
    work = [part for copy in plan.copies for part in chunks(copy, 200)]
    read = reading._fill_gpu(work, handles, tensors, torch.device("cpu"), Stand())
    assert all(torch.equal(tensors[path], expected[path]) for path in expected)
    assert dict(read) == report.tensors


def test_the_report_reads_well(oracle):
    report = load_with_report(oracle / "qwen3-tiny")[1]
    assert report._replace(nbytes=16_000_000_000, seconds=4.0).gb_per_s == 4.0
    assert str(report._replace(nbytes=16_000_000_000, seconds=4.0)) == "16.00 GB in 4.00 s (4.0 GB/s)"


def test_float64_weights_load(tmp_path, oracle):
    shutil.copy(oracle / "qwen3-tiny/config.json", tmp_path)
    tensors = {key: t.double() for key, t in load_file(oracle / "qwen3-tiny/model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(load(tmp_path).tree["embed"], load(oracle / "qwen3-tiny").tree["embed"])
