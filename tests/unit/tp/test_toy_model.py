"""The toy model of examples/toy_tensor_parallel.py: its shapes on each of two ranks, and its exchanges."""

import torch
from examples_of import example

import fnllm
from fnllm.tensor_parallel import Call
from fnllm_weights import Shard, local_sizes
from fnllm_weights.init import init

toy = example("toy_tensor_parallel")

SHAPES = [
    ("embedding rows", (16, 8)),  # half of V = 32
    ("embed: summed over ranks", (5, 8)),  # T, H
    ("qkv", (5, 8)),  # 4 of the queries, 2 of the keys, 2 of the values
    ("q", (5, 2, 2)),  # T, 2 of 4 heads, D
    ("k", (5, 1, 2)),  # T, 1 of 2 KV heads, D
    ("v", (5, 1, 2)),
    ("attend", (5, 2, 2)),
    ("o: a partial sum of heads", (5, 8)),
    ("attention: summed over ranks", (5, 8)),
    ("gate_up", (5, 16)),  # 8 of the gate's features, 8 of the up's
    ("activation", (5, 8)),
    ("down: a partial sum of features", (5, 8)),
    ("mlp: summed over ranks", (5, 8)),
    ("head: own logits", (3, 16)),  # only the last token of each prompt
]


def test_shapes_at_each_step_and_exchanges():
    seen = [[], []]
    results, calls = fnllm.simulate(2, toy.forward_one_rank, seen)
    assert seen[0] == seen[1] == SHAPES
    assert calls == [
        Call("all_reduce", (5, 8)),  # after the embedding
        Call("all_reduce", (5, 8)),  # after attention's output projection
        Call("all_reduce", (5, 8)),  # after the MLP
        Call("all_reduce_max", (3,)),  # the head: one integer for each sampled row
        Call("all_gather", (3, 16)),  # the example's own look at the logits
    ]
    ((tokens, logits),) = fnllm.simulate(1, toy.forward_one_rank, [[]]).results
    for rank_tokens, rank_logits in results:
        assert torch.equal(rank_tokens, tokens) and torch.equal(rank_tokens, logits.argmax(-1))
        torch.testing.assert_close(rank_logits, logits, rtol=0, atol=1e-6)


def test_each_rank_contributes_the_embedding_rows_it_owns():
    trees = [init(toy.CONFIG, seed=3, dtype="float32", shard=Shard(rank, 2)) for rank in range(2)]
    whole = init(toy.CONFIG, seed=3, dtype="float32")
    ids = torch.tensor([2, 19, 30])

    def partial(tp, tree):
        start = local_sizes(toy.CONFIG, Shard(tp.rank, 2)).vocab_start
        mine = (ids >= start) & (ids < start + 16)
        return mine.tolist(), torch.where(mine[:, None], tree["embed"][(ids - start).clamp(0, 15)], 0)

    (mask0, part0), (mask1, part1) = fnllm.simulate(2, partial, trees).results
    assert mask0 == [True, False, False] and mask1 == [False, True, True]
    assert torch.equal(part0 + part1, whole["embed"][ids])


def test_the_example_runs(capsys):
    toy.main()
    assert "next tokens" in capsys.readouterr().out
