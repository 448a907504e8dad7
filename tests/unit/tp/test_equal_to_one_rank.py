"""Simulated ranks against one rank: logits of every kind of model and split, the engine, and what is exchanged."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import plain_logits

import fnllm
import fnllm_weights
from fnllm.tensor_parallel import Call, counting
from fnllm_weights import ModelConfig, Shard
from fnllm_weights.init import init
from fnllm_weights.load import load

torch.set_num_threads(1)

ORACLE = Path(__file__).parents[2] / "oracle"
CHECKPOINTS = sorted(folder.parent.name for folder in ORACLE.glob("*/config.json"))
BOUND = 5e-5  # for float32 logits of order 1; the largest difference seen is 6e-6

SMALL = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=37,
    hidden_size=20,
    intermediate_size=13,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    max_position_embeddings=64,
)
SHAPES = {
    "vocabulary of 37, MLP of 13": SMALL,
    "9 heads over 3": replace(SMALL, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True),
    "one KV head": replace(SMALL, num_attention_heads=5, num_key_value_heads=1, qk_norm=True),
    "every bias": replace(SMALL, qkv_bias=True, o_bias=True, mlp_bias=True),
    "experts of 7": replace(
        SMALL, architecture="Qwen3MoeForCausalLM", num_experts=3, num_experts_per_tok=2, moe_intermediate_size=7,
        norm_topk_prob=True, sparse_layers=(True, False), qk_norm=True,
    ),
}  # fmt: skip


def random_params(config: ModelConfig, shard: Shard = Shard()) -> fnllm.Params:  # noqa: B008  a value
    tree = init(config, seed=7, dtype="float32", shard=shard)
    for layer in tree["layers"]:
        for name, leaf in layer.items():
            if not name.endswith("norm"):
                leaf.mul_(12)  # far from a linear map
    return fnllm.Params(config, None, tree, shard, {})


def all_logits(tp, params: fnllm.Params, ids: list[int]) -> torch.Tensor:
    return plain_logits(params, ids, tp)


def one_and_many(size: int, make, ids: list[int]):
    (one,) = fnllm.simulate(1, all_logits, [make(Shard())], [ids]).results
    shards = [make(Shard(rank, size)) for rank in range(size)]
    many, calls = fnllm.simulate(size, all_logits, shards, [ids] * size)
    return one, many, calls


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_fault_66_uneven_partitions_are_exact(name, size):
    config = SHAPES[name]
    one, many, calls = one_and_many(size, lambda shard: random_params(config, shard), [3, 1, 36, 0, 18, 19, 9, 1])
    assert one.std() > 0.05
    for logits in many:
        assert torch.equal(logits, many[0])
        torch.testing.assert_close(logits, one, rtol=0, atol=BOUND)
    assert calls[:-1] == [Call("all_reduce", (8, 20))] * 5  # after the embedding, and two in each of two layers


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_fault_43_logits_of_the_checkpoints(name, size):
    case = json.loads((ORACLE / name / "golden.json").read_text())["prompts"]["p17"]
    one, many, _ = one_and_many(
        size, lambda shard: load(ORACLE / name, device="cpu", rank=shard.rank, size=shard.size), case["prompt"]
    )
    assert float((many[0] - one).abs().max()) < BOUND


def test_a_bias_is_added_once():
    config = SHAPES["every bias"]
    shards = [random_params(config, Shard(rank, 3)) for rank in range(3)]
    before, _ = fnllm.simulate(3, all_logits, shards, [[1, 2]] * 3)
    for params in shards:  # the same on every rank: a sum over ranks would add three of them
        params.tree["layers"][0]["o_bias"].add_(1.0)
        params.tree["layers"][0]["down_bias"].add_(1.0)
    whole = random_params(config)
    whole.tree["layers"][0]["o_bias"].add_(1.0)
    whole.tree["layers"][0]["down_bias"].add_(1.0)
    after, _ = fnllm.simulate(3, all_logits, shards, [[1, 2]] * 3)
    (expected,), _ = fnllm.simulate(1, all_logits, [whole], [[1, 2]])
    torch.testing.assert_close(after[0], expected, rtol=0, atol=BOUND)
    assert not torch.allclose(after[0], before[0], atol=1e-2)


def test_more_ranks_than_heads_are_refused_with_the_number_that_works():
    with pytest.raises(ValueError, match="num_attention_heads=4 cannot be split over size=5 ranks; use size 4 or less"):
        fnllm_weights.local_sizes(SMALL, Shard(0, 5))


def run_engine(tp, params: fnllm.Params, prompts, count: int, options: dict):
    """Greedy tokens of each prompt through the engine's steps, the preemptions, and the exchanges of each step."""
    tp = counting(tp)
    engine = fnllm.engine(params, tp=tp, **options)
    state, sampling = engine.init(), fnllm.Sampling(temperature=0, max_tokens=count, ignore_eos=True)
    ids = []
    for prompt in prompts:
        state, seq_id = fnllm.add(state, engine.request(prompt, sampling))
        ids.append(seq_id)
    steps = []
    while True:
        tp.calls.clear()
        state, step = engine.step(state)
        if step is None:
            break
        steps.append((int(step.plan.query_lens.sum()), len(step.plan.rows), list(tp.calls)))
    tokens = [fnllm.tokens(state, seq_id)[len(p) :] for seq_id, p in zip(ids, prompts, strict=True)]
    return tokens, state.scheduler.counters.preemptions, steps


def engine_on(size: int, make, prompts, count: int, options: dict) -> list:
    shards = [make(Shard(rank, size)) for rank in range(size)]
    return fnllm.simulate(size, run_engine, shards, [prompts] * size, [count] * size, [options] * size).results


PROMPTS = [[5, 9, 30, 2, 2, 7, 1, 36, 11, 4, 3, 8], [1, 2, 3], [7, 7, 30, 12, 21]]
TIGHT = {"block_size": 4, "num_blocks": 8, "max_num_seqs": 4, "max_num_batched_tokens": 10, "max_chunk": 5}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["9 heads over 3", "experts of 7"])
def test_fault_28_preempted_and_chunked_on_many_ranks(name, size):
    config = SHAPES[name]
    ((roomy, _, _),) = engine_on(1, lambda shard: random_params(config, shard), PROMPTS, 12, {"num_blocks": 64})
    for tokens, preemptions, _ in engine_on(size, lambda shard: random_params(config, shard), PROMPTS, 12, TIGHT):
        assert tokens == roomy
        assert preemptions > 0


@pytest.mark.parametrize("name", ["vocabulary of 37, MLP of 13", "experts of 7"])
def test_the_rhythm_one_all_reduce_then_two_a_layer_then_one_exchange_at_the_head(name):
    config = SHAPES[name]
    results = engine_on(2, lambda shard: random_params(config, shard), PROMPTS, 4, TIGHT)
    for _, _, steps in results:
        assert len(steps) > 4 and {entries for _, entries, _ in steps} > {1}
        for tokens, entries, calls in steps:
            body = [Call("all_reduce", (tokens, config.hidden_size))] * (2 * config.num_hidden_layers)
            last = Call("all_reduce", (entries, config.hidden_size))  # of the tokens that pass the head
            assert calls == [*body, last, Call("all_reduce_max", (entries,))]


def test_gradients_pass_through_simulated_ranks():
    config = SHAPES["9 heads over 3"]

    def loss(tp, params: fnllm.Params) -> torch.Tensor:
        return -sum(fnllm.score(params, [[3, 1, 36, 0]], tp=tp)[0])

    def with_leaves(shard: Shard) -> fnllm.Params:
        params = random_params(config, shard)
        params.tree["layers"][1]["down"].requires_grad_()
        return params

    whole, shards = with_leaves(Shard()), [with_leaves(Shard(rank, 3)) for rank in range(3)]
    fnllm.simulate(1, loss, [whole]).results[0].backward()
    # Each rank's loss is the one loss: the gradient of one of them reaches every rank's part.
    fnllm.simulate(3, loss, shards).results[0].backward()
    parts = [params.tree["layers"][1]["down"].grad for params in shards]
    found = torch.cat(parts, 1)[:, : config.intermediate_size]
    torch.testing.assert_close(found, whole.tree["layers"][1]["down"].grad, rtol=1e-3, atol=1e-5)
