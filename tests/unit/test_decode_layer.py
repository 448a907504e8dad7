"""The fused decoder layer against the layer functions it stands for."""

import dataclasses

import pytest
import torch

import fnllm
import fnllm_weights
from fnllm import layers
from fnllm.batch import StepInputs, decode_batch
from fnllm.cache import allocate
from fnllm.context import Context
from fnllm.decode_layer import attention_counters, decode_layer, fuses
from fnllm.layers import Layers, add_norm
from fnllm.rope import make_rope
from fnllm.rows import empty_rows
from fnllm.taps import Taps
from fnllm.tensor_parallel import SINGLE

CONFIG = fnllm_weights.ModelConfig(
    architecture="Qwen3ForCausalLM", vocab_size=20, hidden_size=24, intermediate_size=40, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, qk_norm=True, qkv_bias=True, o_bias=True, mlp_bias=True,
)  # fmt: skip


def context(config, length: int, tp=SINGLE) -> Context:
    """One sequence of `length` cached tokens, over a cache of random keys and values."""
    sizes = fnllm_weights.local_sizes(config, fnllm_weights.Shard(tp.rank, tp.size))
    device = torch.device("cpu")
    rows = empty_rows(1, 4, 16, device)
    rows = rows._replace(length=torch.tensor([length, 0], dtype=torch.int32))
    rows = rows._replace(block_table=torch.tensor([[3, 1, 0, 2], [0, 0, 0, 0]], dtype=torch.int32))
    inputs = StepInputs(torch.tensor([0]), torch.tensor([True]), torch.tensor([0, 1], dtype=torch.int32), None)
    cache = allocate(config, sizes, 4, 4, torch.float32, device)
    for pool in (*cache.k, *cache.v):
        pool.normal_()
    batch = decode_batch(rows, inputs, make_rope(config), 4)
    return Context(config, sizes, tp, Layers(), batch, cache, "triton", 0, None, Taps(), 0)


@pytest.mark.parametrize("length", [0, 3, 7])
@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("window", [None, 3])
def test_equals_the_layer_functions(length, qk_norm, window):
    torch.manual_seed(length)
    config = dataclasses.replace(CONFIG, qk_norm=qk_norm, sliding_window=(window,))
    p = {name: x.normal_(std=0.5) for name, x in fnllm_weights.init(config, dtype="float32")["layers"][0].items()}
    stream = torch.randn(1, 24)
    fused, plain = context(config, length), context(config, length)
    for ours, theirs in zip((*fused.cache.k, *fused.cache.v), (*plain.cache.k, *plain.cache.v), strict=True):
        ours.copy_(theirs)
    got = decode_layer(p, stream, attention_counters(fused), fused)
    h, residual = add_norm(p["input_norm"], stream, None, plain)
    h, residual = add_norm(p["post_norm"], plain.layers.attention(p, h, plain), residual, plain)
    torch.testing.assert_close(got, residual + plain.layers.mlp(p, h, plain), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fused.cache.k[0], plain.cache.k[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fused.cache.v[0], plain.cache.v[0], rtol=1e-5, atol=1e-5)


def test_two_ranks_add_the_stream_and_each_bias_once():
    trees = [
        fnllm_weights.init(CONFIG, dtype="float32", shard=shard)["layers"][0]
        for shard in (fnllm_weights.Shard(), fnllm_weights.Shard(0, 2), fnllm_weights.Shard(1, 2))
    ]
    for p in trees:
        p["o_bias"].fill_(0.3)
        p["down_bias"].fill_(-0.2)
    stream = torch.randn(1, 24)

    def run(tp, p):
        ctx = context(CONFIG, 0, tp)
        return decode_layer(p, stream, attention_counters(ctx), ctx)

    ranks, calls = fnllm.simulate(2, run, trees[1:])
    assert [call.kind for call in calls] == ["all_reduce", "all_reduce"]
    for got in ranks:
        torch.testing.assert_close(got, run(SINGLE, trees[0]), rtol=1e-5, atol=1e-5)


def test_is_not_used_on_a_cpu():
    assert not fuses({"gate_up": None}, torch.zeros(1, 24, dtype=torch.bfloat16), context(CONFIG, 3))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_a_decode_step_attends_from_the_projection_on(qk_norm, window, monkeypatch):
    """`attend_fused` against the path of separate operations; with the triton backend it is one op."""
    config = dataclasses.replace(CONFIG, qk_norm=qk_norm, sliding_window=(window,))
    p = {name: x.normal_(std=0.5) for name, x in fnllm_weights.init(config, dtype="float32")["layers"][0].items()}
    fused, plain = context(config, 7), context(config, 7)
    for ours, theirs in zip((*fused.cache.k, *fused.cache.v), (*plain.cache.k, *plain.cache.v), strict=True):
        ours.copy_(theirs)
    x = torch.randn(1, 24)
    want = layers.attention(p, x, plain)
    monkeypatch.setattr(layers, "on_device", lambda x, ctx: True)
    monkeypatch.setattr(layers, "qk_norm_rope_store", None)
    torch.testing.assert_close(layers.attention(p, x, fused), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fused.cache.k[0], plain.cache.k[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fused.cache.v[0], plain.cache.v[0])
