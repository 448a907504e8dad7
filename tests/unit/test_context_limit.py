"""How long a sequence may be: the config's own limit, and what its rope scaling makes of it."""

import dataclasses

import pytest
import torch
from tiny_models import GREEDY, checkpoint, tiny

import fnllm
from fnllm.options import EngineOptions, resolve
from fnllm_weights import ModelConfig

FIELDS = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 41, "hidden_size": 24, "intermediate_size": 40,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "max_position_embeddings": 100, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
LIMITS = [
    ({}, 100),
    ({"rope_type": "linear", "factor": 2.5}, 250),
    ({**YARN, "original_max_position_embeddings": 50}, 200),  # the file was left as it was before the scaling
    ({**YARN, "original_max_position_embeddings": 25}, 100),  # the file counts the scaling in
    ({**LLAMA3, "original_max_position_embeddings": 50}, 100),
    ({**LONG, "original_max_position_embeddings": 25}, 100),
]


@pytest.mark.parametrize(("scaling", "limit"), LIMITS, ids=[f"{s.get('rope_type')}-{limit}" for s, limit in LIMITS])
def test_the_limit_is_the_configs_and_its_scalings(scaling, limit):
    config = ModelConfig.from_dict({**FIELDS, "rope_scaling": scaling or None}, None)
    assert resolve(EngineOptions(max_model_len=limit), config, False).max_model_len == limit
    assert resolve(EngineOptions(), config, False).max_model_len == 100
    found = rf"max_model_len={limit + 1} .*{limit} positions.*max_position_embeddings=100"
    with pytest.raises(ValueError, match=found):
        resolve(EngineOptions(max_model_len=limit + 1), config, False)


def test_dynamic_scaling_has_no_limit():
    config = ModelConfig.from_dict({**FIELDS, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, None)
    assert resolve(EngineOptions(max_model_len=5000), config, False).max_model_len == 5000
    params = checkpoint("qwen3-dynamic")
    options = {"max_model_len": 200, "max_num_seqs": 1}
    one = fnllm.generate(params, [1] * 100, dataclasses.replace(GREEDY, max_tokens=40), **options)[0]
    assert len(one.token_ids) == 40


def test_generate_refuses_what_the_model_was_not_made_for():
    with pytest.raises(ValueError, match="max_model_len=129 is more than the 128 positions"):
        fnllm.generate(tiny(), [1], GREEDY, max_model_len=129)


def test_params_with_another_config_dtype_or_tokenizer_get_a_machine_of_their_own():
    """They share the workspace of the params they were made from."""
    params = tiny(seed=11)
    options = {"max_model_len": 40, "max_num_seqs": 2, "block_size": 4}
    first = fnllm.generate(params, [1, 2], GREEDY, **options)
    wide = params._replace(tree=cast(params.tree, torch.float64))
    assert fnllm.generate(wide, [1, 2], GREEDY, **options)[0].token_ids == first[0].token_ids
    longer = params._replace(config=dataclasses.replace(params.config, max_position_embeddings=256))
    assert len(fnllm.generate(longer, [1] * 130, dataclasses.replace(GREEDY, max_tokens=3))[0].token_ids) == 3
    steep = params._replace(config=dataclasses.replace(params.config, rms_norm_eps=0.5))
    assert fnllm.generate(steep, [1, 2], GREEDY, **options) != first
    assert fnllm.generate(params, [1, 2], GREEDY, **options)[0].token_ids == first[0].token_ids


def cast(part, dtype):
    if isinstance(part, torch.Tensor):
        return part.to(dtype)
    return {k: cast(x, dtype) for k, x in part.items()} if isinstance(part, dict) else [cast(x, dtype) for x in part]
