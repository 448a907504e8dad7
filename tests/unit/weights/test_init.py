"""Random weights: their distribution, and that shards are parts of one model."""

from dataclasses import replace

import pytest
import torch

from fnllm_weights import ModelConfig, Params, Shard, check_params, init, load, save

CONFIG = ModelConfig(
    architecture="Qwen3MoeForCausalLM", vocab_size=97, hidden_size=32, intermediate_size=50, num_hidden_layers=2,
    num_attention_heads=6, num_key_value_heads=2, head_dim=8, qkv_bias=True, o_bias=True, qk_norm=True, num_experts=3,
    num_experts_per_tok=2, moe_intermediate_size=7, sparse_layers=(True, False),
)  # fmt: skip


def test_weights_are_normal_and_norms_are_one():
    tree = init(replace(CONFIG, vocab_size=20_000), seed=0)
    assert tree["embed"].std().item() == pytest.approx(0.02, rel=0.01)
    assert abs(tree["embed"].mean().item()) < 1e-4
    layer = tree["layers"][0]
    assert all((layer[name] == 1).all() for name in ("input_norm", "post_norm", "q_norm", "k_norm"))
    assert layer["qkv"].std().item() == pytest.approx(0.02, rel=0.1)
    assert not torch.equal(tree["layers"][1]["qkv"], layer["qkv"])
    check_params(Params(CONFIG, None, init(CONFIG)))


def test_a_seed_says_everything():
    assert torch.equal(init(CONFIG, seed=5)["lm_head"], init(CONFIG, seed=5)["lm_head"])
    assert not torch.equal(init(CONFIG, seed=5)["lm_head"], init(CONFIG, seed=6)["lm_head"])


def test_dtype_and_tied_embeddings():
    tree = init(replace(CONFIG, tie_word_embeddings=True, dtype="bfloat16"))
    assert tree["lm_head"] is tree["embed"] and tree["embed"].dtype == torch.bfloat16
    assert init(replace(CONFIG, dtype="bfloat16"), dtype="float16")["embed"].dtype == torch.float16


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_rank_holds_its_part_of_the_one_model(tmp_path, size):
    """As if the whole had been saved and each rank had loaded its share."""
    save(Params(CONFIG, None, init(CONFIG, seed=2)), tmp_path)
    for rank in range(size):
        mine, loaded = init(CONFIG, seed=2, shard=Shard(rank, size)), load(tmp_path, rank=rank, size=size).tree
        assert torch.equal(mine["lm_head"], loaded["lm_head"])
        for one, other in zip(mine["layers"], loaded["layers"], strict=True):
            assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
