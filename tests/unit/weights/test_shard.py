"""The shard table: every rank's parts, put together again, are the whole; the rules for uneven counts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fnllm_weights import ModelConfig, Shard, local_sizes
from fnllm_weights.plan import check_tiling
from fnllm_weights.shard import leaves, path_name, split_heads

DENSE = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=37, hidden_size=12, intermediate_size=14, num_hidden_layers=2,
    num_attention_heads=9, num_key_value_heads=3, head_dim=4, qkv_bias=True, o_bias=True, mlp_bias=True,
)  # fmt: skip
SPARSE = replace(
    DENSE, architecture="Qwen3MoeForCausalLM", mlp_bias=False, qk_norm=True, num_experts=3, num_experts_per_tok=2,
    moe_intermediate_size=5, sparse_layers=(True, False), tie_word_embeddings=True,
)  # fmt: skip
SIZES = (1, 2, 3, 4, 5)


@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize("size", SIZES)
def test_ranks_together_hold_every_number_of_the_checkpoint(config, size):
    whole = {p.tensor: p.shape for leaf in leaves(config) for p in leaf.pieces}
    seen = {name: np.zeros(shape, int) for name, shape in whole.items()}
    for rank in range(size):
        for leaf in leaves(config, Shard(rank, size)):
            # Painted by hand: pieces and padding cover each leaf once.
            painted = np.zeros(leaf.shape, int)
            for piece in leaf.pieces:
                seen[piece.tensor][tuple(slice(*b) for b in piece.source)] += 1
                painted[tuple(slice(*b) for b in piece.dest)] += 1
                assert piece.shape == whole[piece.tensor]
                assert [b - a for a, b in piece.source] == [b - a for a, b in piece.dest][-len(piece.source) :]
            for box in leaf.padding:
                painted[tuple(slice(*b) for b in box)] += 1
            assert (painted == 1).all(), path_name(leaf.path)
        check_tiling(leaves(config, Shard(rank, size)))
    replicated = ("norm.weight", "layernorm.weight", "o_proj.bias", "down_proj.bias", "gate.weight")
    for name, count in seen.items():
        assert (count == (size if name.endswith(replicated) else 1)).all(), name


@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_have_equal_shapes(size):
    for config in (DENSE, SPARSE):
        shapes = [[(leaf.path, leaf.shape) for leaf in leaves(config, Shard(rank, size))] for rank in range(size)]
        assert all(found == shapes[0] for found in shapes)


def test_heads_of_three_kv_heads_with_three_query_heads_each():
    """The counts of SmolLM2: 9 query heads, 3 KV heads."""
    assert [split_heads(9, 3, Shard(r, 2)) for r in range(2)] == [((0, 6, 6), (0, 2, 2)), ((6, 9, 6), (2, 3, 2))]
    assert [split_heads(9, 3, Shard(r, 3)) for r in range(3)] == [
        ((3 * r, 3 * r + 3, 3), (r, r + 1, 1)) for r in range(3)
    ]
    # No multiple of the KV heads: one each, the last rank has only padding.
    assert split_heads(9, 3, Shard(3, 4)) == ((9, 9, 3), (3, 3, 1))
    # Twice as many ranks: each KV head twice, its three query heads as two and one with padding.
    assert [split_heads(9, 3, Shard(r, 6)) for r in (0, 1, 5)] == [
        ((0, 2, 2), (0, 1, 1)), ((2, 3, 2), (0, 1, 1)), ((8, 9, 2), (2, 3, 1)),
    ]  # fmt: skip


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2), (6, 3), (9, 3), (8, 8), (12, 4), (7, 7), (14, 2)])
def test_every_query_head_lies_once_with_its_kv_head(heads, kv_heads):
    group = heads // kv_heads
    for size in range(1, heads + 1):
        owners = []
        for rank in range(size):
            q, kv = split_heads(heads, kv_heads, Shard(rank, size))
            assert q.rows % kv.rows == 0  # attention needs whole groups, padding included
            local = q.rows // kv.rows
            for position, head in enumerate(range(q.start, q.stop)):
                assert kv.start + position // local == head // group
                owners.append(head)
        assert sorted(owners) == list(range(heads))


def test_local_sizes():
    sizes = local_sizes(DENSE, Shard(1, 2))
    assert (sizes.heads, sizes.kv_heads, sizes.head_dim) == (6, 2, 4)
    assert (sizes.vocab_start, sizes.vocab_rows, sizes.vocab_span) == (19, 19, (19, 37, 19))
    assert (sizes.intermediate, sizes.moe_intermediate) == (7, 0)
    assert local_sizes(SPARSE, Shard(3, 4)).moe_span == (5, 5, 2)
    assert local_sizes(DENSE)[:6] == (9, 3, 4, 0, 37, 14)


def test_what_cannot_be_split_says_what_would_work():
    with pytest.raises(
        ValueError, match="num_attention_heads=9 cannot be split over size=10 ranks; use size 9 or less"
    ):
        local_sizes(DENSE, Shard(0, 10))
    with pytest.raises(
        ValueError, match="moe_intermediate_size=5 cannot be split over size=6 ranks; use size 5 or less"
    ):
        local_sizes(SPARSE, Shard(0, 6))
    with pytest.raises(ValueError, match="intermediate_size=14 cannot be split over size=15 ranks"):
        local_sizes(replace(DENSE, num_attention_heads=18), Shard(0, 15))
    # Where all layers are sparse nothing has the width of a dense one.
    assert local_sizes(replace(SPARSE, sparse_layers=(True, True), intermediate_size=1), Shard(0, 4)).heads == 3
    for shard in (Shard(2, 2), Shard(-1, 2), Shard(0, 0)):
        with pytest.raises(ValueError, match="is no rank; need 0 <= rank < size"):
            local_sizes(DENSE, shard)


def whole_layer(seed: int) -> dict[str, torch.Tensor]:
    """Random checkpoint tensors of layer 0, float64."""
    generator = torch.Generator().manual_seed(seed)
    pieces = [p for leaf in leaves(DENSE) for p in leaf.pieces if "layers.0." in p.tensor]
    return {p.tensor: torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in pieces}


def local_layer(tensors: dict[str, torch.Tensor], shard: Shard) -> dict[str, torch.Tensor]:
    found = {}
    for leaf in leaves(DENSE, shard):
        if leaf.path[:2] == ("layers", 0):
            found[leaf.path[2]] = torch.zeros(leaf.shape, dtype=torch.float64)
            for piece in leaf.pieces:
                source = tensors[piece.tensor][tuple(slice(*b) for b in piece.source)]
                found[leaf.path[2]][tuple(slice(*b) for b in piece.dest)] = source
    return found


def layer_without_norms(p: dict[str, torch.Tensor], heads: int, kv_heads: int, x: torch.Tensor):
    """This rank's summand of attention and of the MLP, biases of the output left to the caller."""
    q, k, v = (x @ p["qkv"].T + p["qkv_bias"]).split([heads * 4, kv_heads * 4, kv_heads * 4], dim=-1)
    q, k, v = (t.view(len(x), -1, 4).transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(heads // kv_heads, dim=0) for t in (k, v))
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    gate, up = (x @ p["gate_up"].T + p["gate_up_bias"]).chunk(2, dim=-1)
    return y.transpose(0, 1).reshape(len(x), -1) @ p["o"].T, (torch.nn.functional.silu(gate) * up) @ p["down"].T


@pytest.mark.parametrize("size", [2, 3, 4, 6, 9])
def test_padding_is_exact_the_ranks_sum_to_the_whole_layer(size):
    tensors, x = whole_layer(0), torch.randn(5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = layer_without_norms(local_layer(tensors, Shard(0, 1)), 9, 3, x)
    parts = []
    for rank in range(size):
        sizes = local_sizes(DENSE, Shard(rank, size))
        parts.append(layer_without_norms(local_layer(tensors, Shard(rank, size)), sizes.heads, sizes.kv_heads, x))
    for whole, summands in zip(expected, zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(sum(summands), whole, rtol=0, atol=1e-12)


def test_a_part_that_overlaps_or_is_missing_is_refused():
    table = leaves(DENSE)
    qkv = next(leaf for leaf in table if leaf.path[-1] == "qkv")
    first, *rest = qkv.pieces
    moved = first._replace(dest=((1, first.dest[0][1] + 1), first.dest[1]))
    for broken in ((moved, *rest), tuple(rest), (first, *qkv.pieces)):
        with pytest.raises(ValueError, match=r"layers\[0\].qkv: its parts do not cover \(60, 12\) exactly once"):
            check_tiling([qkv._replace(pieces=broken)])
