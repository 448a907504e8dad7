"""config.json and generation_config.json in every spelling, against transformers' own reading of them."""

import json
import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fnllm_weights import ARCHITECTURES, ModelConfig, RopeConfig
from fnllm_weights.shard import leaves

SMALL = {
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
FOLDERS = """llama-tiny mistral-tiny qwen2-tiny qwen2-window qwen3-bias qwen3-dynamic qwen3-linear qwen3-moe-mixed
qwen3-moe-norm qwen3-odd qwen3-tiny qwen3-untied-sharded qwen3-yarn""".split()


def read(fields: dict, architecture: str = "Qwen3ForCausalLM", generation: dict | None = None) -> ModelConfig:
    return ModelConfig.from_dict({**SMALL, "architectures": [architecture], **fields}, generation)


@pytest.mark.parametrize("name", FOLDERS)
def test_old_and_new_spelling_are_one_config(oracle, name):
    new = json.loads((oracle / name / "config.json").read_text())
    old = json.loads((oracle / name / "config.v4.json").read_text())
    config = ModelConfig.from_dict(new)
    assert config == ModelConfig.from_dict(old)
    assert hash(config) == hash(ModelConfig.from_dict(old))
    assert config.dtype == new["dtype"]


def test_rope_settings_of_the_oracle(oracle):
    def rope(name):
        return ModelConfig.from_dict(json.loads((oracle / name / "config.v4.json").read_text())).rope

    assert rope("qwen3-tiny") == RopeConfig(rope_theta=1e6)
    assert rope("qwen3-linear") == RopeConfig(rope_type="linear", factor=4.0)
    assert rope("qwen3-yarn") == RopeConfig(
        rope_theta=1e6, rope_type="yarn", factor=4.0, original_max_position_embeddings=64
    )
    assert rope("llama-tiny").low_freq_factor == 1.0


def random_fields(rng: random.Random, architecture: str) -> dict:
    """A config.json that transformers can read, with everything that changes tensors or windows drawn at random."""
    heads = rng.choice([1, 2, 3])
    fields = {
        **SMALL,
        "architectures": [architecture],
        "model_type": ARCHITECTURES[architecture].model_type,
        "num_key_value_heads": heads,
        "num_attention_heads": heads * rng.choice([1, 2, 4]),
        "hidden_size": 48,
        "tie_word_embeddings": rng.random() < 0.5,
        "rms_norm_eps": rng.choice([1e-5, 1e-6]),
    }
    if architecture != "Qwen2ForCausalLM":
        fields["head_dim"] = rng.choice([4, 10])
    if architecture in ("Qwen3ForCausalLM", "LlamaForCausalLM", "Qwen3MoeForCausalLM"):
        fields["attention_bias"] = rng.random() < 0.5
    if architecture == "LlamaForCausalLM":
        fields["mlp_bias"] = rng.random() < 0.5
    if architecture == "MistralForCausalLM" and rng.random() < 0.7:
        fields["sliding_window"] = rng.choice([None, 5])
    if architecture.startswith("Qwen"):
        fields |= {"use_sliding_window": rng.random() < 0.6, "sliding_window": rng.choice([7, None])}
    if architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        fields["max_window_layers"] = rng.randrange(6)
        if fields["use_sliding_window"] and fields["sliding_window"] and rng.random() < 0.5:
            fields["layer_types"] = [rng.choice(["full_attention", "sliding_attention"]) for _ in range(4)]
    if architecture == "Qwen3MoeForCausalLM":
        fields |= {
            rng.choice(["num_experts", "num_local_experts"]): 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 6,
            "decoder_sparse_step": rng.choice([1, 2, 3]),
            "mlp_only_layers": rng.choice([[], [1], [0, 3]]),
            "norm_topk_prob": rng.random() < 0.5,
        }
    return fields


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_random_configs_against_transformers(architecture):
    rng = random.Random(architecture)
    for _ in range(12):
        fields = random_fields(rng, architecture)
        config = ModelConfig.from_dict(fields)
        theirs = AutoConfig.for_model(**fields)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(theirs)
        everywhere = getattr(theirs, "sliding_window", None)  # where the attention has no window of its own
        windows = [getattr(layer.self_attn, "sliding_window", everywhere) for layer in model.model.layers]
        assert config.sliding_window == tuple(windows), fields
        assert config.rms_norm_eps == theirs.rms_norm_eps
        assert config.rope.rope_theta == theirs.rope_parameters["rope_theta"]
        found = {piece.tensor: piece.shape for leaf in leaves(config) for piece in leaf.pieces}
        assert found == checkpoint_shapes(model, theirs), fields


def checkpoint_shapes(model, config) -> dict[str, tuple[int, ...]]:
    """Names and shapes that save_pretrained would write: experts are fused in memory and single in the file."""
    shapes = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("mlp.experts.gate_up_proj"):
            experts, rows, hidden = tensor.shape
            for e in range(experts):
                for part in ("gate_proj", "up_proj"):
                    shapes[name.replace("gate_up_proj", f"{e}.{part}.weight")] = (rows // 2, hidden)
        elif name.endswith("mlp.experts.down_proj"):
            for e in range(tensor.shape[0]):
                shapes[name.replace("down_proj", f"{e}.down_proj.weight")] = tuple(tensor.shape[1:])
        elif not (name == "lm_head.weight" and config.tie_word_embeddings):
            shapes[name] = tuple(tensor.shape)
    return shapes


# Extra fields of published checkpoints that load: what each maker writes beside the usual ones.
PUBLISHED = {
    "Qwen3-Coder": (
        "Qwen3MoeForCausalLM",
        {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0, "router_aux_loss_coef": 0.0,
         "num_experts": 160, "max_window_layers": 62, "use_sliding_window": False, "sliding_window": None},
    ),
    "Qwen2.5": (
        "Qwen2ForCausalLM",
        {"use_mrope": False, "sliding_window": 131072, "max_window_layers": 28, "use_sliding_window": False,
         "attention_dropout": 0.0, "torch_dtype": "bfloat16", "_name_or_path": "Qwen/Qwen2.5-7B",
         "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}},
    ),
    "Llama-3.1": (
        "LlamaForCausalLM",
        {"pretraining_tp": 1, "mlp_bias": False, "eos_token_id": [128001, 128008, 128009], "rope_theta": 5e5,
         "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 8192, "rope_type": "llama3"}},
    ),
    "SmolLM2": (
        "LlamaForCausalLM",
        {"is_llama_config": True, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
         "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
    ),
    "Llama-1": ("LlamaForCausalLM", {"max_sequence_length": 2048, "pad_token_id": 0, "torch_dtype": "float16"}),
    "Mistral-Nemo": ("MistralForCausalLM", {"head_dim": 128, "sliding_window": None, "unsloth_version": "2025.12.5"}),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_dialects_load(name):
    architecture, fields = PUBLISHED[name]
    assert read(fields, architecture).architecture == architecture


def test_missing_fields_mean_what_transformers_takes():
    plain = read({}, "LlamaForCausalLM")
    assert plain.rms_norm_eps == 1e-6 and plain.rope.rope_theta == 10000.0 and not plain.tie_word_embeddings
    without_kv = {**SMALL, "architectures": ["LlamaForCausalLM"]}
    del without_kv["num_key_value_heads"]
    assert ModelConfig.from_dict(without_kv).num_key_value_heads == 6
    assert read({}, "MistralForCausalLM").sliding_window == (4096,) * 4  # missing is not null
    assert read({"sliding_window": None}, "MistralForCausalLM").sliding_window == (None,) * 4
    without_kv["max_position_embeddings"] = None
    assert ModelConfig.from_dict({**without_kv, "rms_norm_eps": None}).max_position_embeddings == 2048
    del without_kv["architectures"]
    assert ModelConfig.from_dict({**without_kv, "model_type": "qwen2"}).architecture == "Qwen2ForCausalLM"


def test_fault_44_eos_ids_of_both_files_are_united():
    config = read({"eos_token_id": 2, "bos_token_id": 1}, generation={"eos_token_id": [3, 7, 2], "bos_token_id": 9})
    assert config.eos_token_ids == (2, 3, 7)
    assert config.bos_token_id == 1
    assert read({"eos_token_id": None}).eos_token_ids == ()
    assert read({"eos_token_id": -1}).eos_token_ids == ()
    assert read({"eos_token_id": [30, 31]}).eos_token_ids == (30,)  # 31 lies beyond the vocabulary


def test_sampling_defaults_are_kept():
    generation = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "transformers_version": "5"}
    assert dict(read({}, generation=generation).generation_defaults) == {
        "temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_parameters": {"rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 500000}},
    ],
)
def test_fault_53_every_way_to_say_no_scaling(rope):
    assert read(rope).rope == RopeConfig(rope_theta=5e5)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "attn_factor": 0.8}, "no entry attn_factor"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 32}, "no entry beta_fast"),
        ({"rope_type": "linear"}, "needs factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "needs high_freq_factor"),
        ({"rope_type": "su", "factor": 2.0}, "supported: default, linear, dynamic, yarn, longrope, llama3"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, "short_factor has 1 numbers"),
        ({"rope_type": "longrope", "short_factor": 1.0, "long_factor": [2.0]}, "must be a list"),
        ({"rope_type": "longrope", "short_factor": [0.0], "long_factor": [2.0]}, "positive numbers, found .0.0."),
        ({"rope_type": "linear", "factor": -1}, "factor must be a positive number, found -1"),
        ({"rope_type": "linear", "factor": "4"}, "factor must be a positive number, found '4'"),
        ({"rope_type": "yarn", "type": "linear", "factor": 4.0}, "two values for rope_type"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "the whole head is rotated"),
    ],
)
def test_fault_54_an_unknown_or_wrong_rope_entry_is_named(rope, message):
    for field in ("rope_scaling", "rope_parameters"):
        with pytest.raises(ValueError, match=message):
            read({field: rope})


def test_conflicting_places_are_refused():
    with pytest.raises(ValueError, match=r"two values for rope_theta: 10000 and rope_parameters.rope_theta=20000"):
        read({"rope_theta": 10000, "rope_parameters": {"rope_theta": 20000}})
    with pytest.raises(ValueError, match="num_experts=4 and num_local_experts=8 differ"):
        read({"num_experts": 4, "num_local_experts": 8}, "Qwen3MoeForCausalLM")


def test_yarn_without_factor_or_original_length_takes_them_from_the_context():
    rope = read({"rope_scaling": {"type": "yarn", "factor": None, "original_max_position_embeddings": 16}}).rope
    assert rope.factor == 4.0
    assert read({"rope_scaling": {"type": "yarn", "factor": 2}}).rope.original_max_position_embeddings == 64


def test_fault_57_head_dim_is_read_and_derived_only_when_missing():
    assert read({"hidden_size": 28, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 8}).head_dim == 8
    assert read({"hidden_size": 24, "num_attention_heads": 6}).head_dim == 4
    with pytest.raises(ValueError, match="head_dim is missing and hidden_size=28 is no multiple"):
        read({"hidden_size": 28, "num_attention_heads": 3, "num_key_value_heads": 1})


def test_fault_64_a_quantised_checkpoint_is_refused_in_one_sentence():
    with pytest.raises(ValueError, match=r"^quantised checkpoints are not supported \(quantization_config: awq\); use"):
        read({"quantization_config": {"quant_method": "awq", "bits": 4}})


@pytest.mark.parametrize(
    "fields",
    [
        {"architectures": ["Other"], "quantization_config": {"quant_method": "awq"}, "strange": 1},
        {"architectures": ["Other"], "hidden_size": "many"},
        {"architectures": [], "model_type": "gpt2"},
        {"architectures": ["Qwen3ForCausalLM", "Other"]},
        {"architectures": "Qwen3ForCausalLM"},
        {"architectures": [["Qwen3ForCausalLM"]]},
    ],
)
def test_fault_65_an_unsupported_architecture_is_the_first_thing_said(fields):
    with pytest.raises(ValueError, match="supported: Qwen3ForCausalLM, Qwen2ForCausalLM, LlamaForCausalLM, Mistral"):
        ModelConfig.from_dict({**SMALL, **fields})


@pytest.mark.parametrize(
    ("fields", "architecture", "message"),
    [
        ({"final_logit_softcapping": 30.0}, "LlamaForCausalLM", "final_logit_softcapping=30.0"),
        ({"sliding_window": 8}, "LlamaForCausalLM", "sliding_window=8"),
        ({"rope_interleaved": True}, "LlamaForCausalLM", "rope_interleaved=True"),
        ({"attention_bias": True}, "MistralForCausalLM", "attention_bias=True"),
        ({"mlp_bias": True}, "Qwen3ForCausalLM", "mlp_bias=True"),
        ({"use_qk_norm": True}, "LlamaForCausalLM", "use_qk_norm=True"),
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, "Qwen2ForCausalLM", "dual_chunk_attention_config"),
        ({"hidden_act": "gelu"}, "LlamaForCausalLM", "hidden_act='gelu' is not supported"),
        ({"layer_types": ["sliding_attention"] * 4}, "Qwen3ForCausalLM", "does not agree with sliding_window=None"),
        ({"layer_types": ["full_attention"]}, "Qwen3ForCausalLM", "for each of 4 layers"),
        ({"layer_types": "full_attention"}, "Qwen3ForCausalLM", "for each of 4 layers"),
        ({"layer_types": [["full_attention"]] * 4}, "Qwen3ForCausalLM", "for each of 4 layers"),
        ({"mlp_only_layers": 3}, "Qwen3MoeForCausalLM", "mlp_only_layers must be a list"),
        ({"layer_types": ["chunked_attention"] * 4}, "Qwen3ForCausalLM", "full_attention, sliding_attention"),
        ({"sliding_window": 5, "layer_types": ["full_attention"] * 4}, "MistralForCausalLM", "does not agree"),
        ({"num_hidden_layers": 0}, "Qwen3ForCausalLM", "num_hidden_layers must be a whole number of at least 1"),
        ({"vocab_size": 31.5}, "Qwen3ForCausalLM", "vocab_size must be a whole number"),
        ({"hidden_size": True}, "Qwen3ForCausalLM", "hidden_size must be a whole number"),
        ({"num_key_value_heads": 4}, "Qwen3ForCausalLM", "is no multiple of num_key_value_heads=4"),
        ({"head_dim": 5}, "Qwen3ForCausalLM", "head_dim=5 is odd"),
        ({"rms_norm_eps": 0}, "Qwen3ForCausalLM", "rms_norm_eps must be a positive number"),
        ({"tie_word_embeddings": "yes"}, "Qwen3ForCausalLM", "tie_word_embeddings must be true or false"),
        ({"dtype": "int8"}, "Qwen3ForCausalLM", "dtype='int8' is not supported"),
        ({"eos_token_id": "</s>"}, "Qwen3ForCausalLM", "eos_token_id must be a token id"),
        ({"num_experts_per_tok": 9, "num_experts": 8}, "Qwen3MoeForCausalLM", "num_experts_per_tok=9"),
    ],
)
def test_what_would_change_the_mathematics_is_an_error_that_names_it(fields, architecture, message):
    with pytest.raises(ValueError, match=message):
        read(fields, architecture)


def test_a_missing_size_is_named():
    for field in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        fields = {**SMALL, "architectures": ["Qwen3ForCausalLM"]}
        del fields[field]
        with pytest.raises(ValueError, match=f"config.json lacks {field}"):
            ModelConfig.from_dict(fields)


def test_a_config_written_by_hand():
    config = ModelConfig(architecture="LlamaForCausalLM", **{k: SMALL[k] for k in SMALL}, head_dim=4)
    assert config.sliding_window == (None,) * 4 and config.sparse_layers == (False,) * 4
    with pytest.raises(ValueError, match=r"sliding_window has 1 entries; .* needed, or \(\) for None in every layer"):
        replace(config, sliding_window=(3,))
    with pytest.raises(ValueError, match="architecture Other is not supported"):
        replace(config, architecture="Other")
