"""The load plan from headers alone: what it reads, and what it refuses by name."""

from dataclasses import replace

import numpy as np
import pytest

from fnllm_weights import ModelConfig, Shard, make_plan
from fnllm_weights.plan import EMBED, HEAD, TensorInfo, chunks, parse_header
from fnllm_weights.shard import leaves

CONFIG = ModelConfig(
    architecture="Qwen3ForCausalLM", vocab_size=11, hidden_size=6, intermediate_size=7, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=2, qk_norm=True,
)  # fmt: skip
TIED = replace(CONFIG, tie_word_embeddings=True)


def headers(config: ModelConfig, **changes) -> dict[str, TensorInfo]:
    found = {p.tensor: TensorInfo("a.safetensors", "BF16", p.shape) for leaf in leaves(config) for p in leaf.pieces}
    found |= {name.replace("__", "."): info for name, info in changes.items()}
    return {name: info for name, info in found.items() if info is not None}


def test_copies_fill_every_leaf_with_its_source_and_nothing_else():
    for rank in range(3):
        plan = make_plan(CONFIG, headers(CONFIG), Shard(rank, 3))
        count = {leaf.path: np.zeros(leaf.shape, int) for leaf in plan.leaves}
        for leaf in plan.leaves:
            for box in leaf.padding:
                count[leaf.path][tuple(slice(*b) for b in box)] += 1
        for copy in plan.copies:
            count[copy.path][tuple(slice(*b) for b in copy.dest)] += 1
            assert copy.nbytes == 2 * np.prod([b - a for a, b in copy.source])
        assert all((c == 1).all() for c in count.values())
        assert plan.nbytes == sum(copy.nbytes for copy in plan.copies)


def test_a_plan_is_a_value():
    assert make_plan(CONFIG, headers(CONFIG)) == make_plan(CONFIG, dict(reversed(headers(CONFIG).items())))
    assert hash(make_plan(CONFIG, headers(CONFIG)))


@pytest.mark.parametrize("limit", [1, 7, 24, 25, 100, 10**9])
def test_chunks_cover_their_copy_in_order(limit):
    plan = make_plan(CONFIG, headers(CONFIG), Shard(1, 2))
    for copy in plan.copies:
        parts = list(chunks(copy, limit))
        row = copy.nbytes // (copy.source[0][1] - copy.source[0][0])
        assert all(part.nbytes <= max(limit, row) for part in parts)
        assert sum(part.nbytes for part in parts) == copy.nbytes
        assert parts[0].source[0][0] == copy.source[0][0] and parts[-1].source[0][1] == copy.source[0][1]
        assert parts[0].dest[0][0] == copy.dest[0][0] and parts[-1].dest[0][1] == copy.dest[0][1]
        for before, after in zip(parts, parts[1:], strict=False):
            assert before.source[0][1] == after.source[0][0] and before.dest[0][1] == after.dest[0][0]


def test_chunks_of_a_stacked_leaf_stay_with_their_expert():
    sparse = replace(
        CONFIG, architecture="Qwen3MoeForCausalLM", num_experts=3, num_experts_per_tok=1, moe_intermediate_size=4,
        sparse_layers=(True, True),
    )  # fmt: skip
    up = next(
        c
        for c in make_plan(sparse, headers(sparse)).copies
        if c.tensor.endswith("layers.1.mlp.experts.2.up_proj.weight")
    )
    assert up.dest == ((2, 3), (4, 8), (0, 6))
    assert [part.dest for part in chunks(up, 2 * up.nbytes // 4)] == [
        ((2, 3), (4, 6), (0, 6)),
        ((2, 3), (6, 8), (0, 6)),
    ]


def test_a_tied_head_needs_no_tensor_and_may_have_one():
    assert make_plan(TIED, headers(TIED)).copies[0].twin is None
    both = headers(TIED, **{HEAD.replace(".", "__"): TensorInfo("b.safetensors", "BF16", (11, 6))})
    assert make_plan(TIED, both).copies[0].twin == ("b.safetensors", HEAD)
    alone = {HEAD if name == EMBED else name: info for name, info in headers(TIED).items()}
    assert make_plan(TIED, alone).copies[0][:2] == ("a.safetensors", HEAD)
    assert all(copy.twin is None for copy in make_plan(TIED, alone).copies)


def test_fault_61_an_untied_config_without_the_head_names_it():
    with pytest.raises(ValueError, match="the checkpoint lacks lm_head.weight; .* tie_word_embeddings=true"):
        make_plan(CONFIG, headers(CONFIG, lm_head__weight=None))


Q = "model__layers__1__self_attn__q_proj__weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({Q: None}, "^the checkpoint lacks model.layers.1.self_attn.q_proj.weight$"),
        ({"model__layers__2__mlp__up_proj__weight": TensorInfo("a", "F32", (7, 6))}, "does not use: model.layers.2"),
        ({"model__layers__1__self_attn__q_proj__bias": TensorInfo("a", "F32", (8,))}, "does not use: .*q_proj.bias"),
        ({Q: TensorInfo("c.safetensors", "BF16", (6, 8))},
         r"q_proj.weight in c.safetensors has shape \(6, 8\), config.json asks for \(8, 6\)"),
        ({Q: TensorInfo("c.safetensors", "F8_E4M3", (8, 6))}, "q_proj.weight in c.safetensors is stored as F8_E4M3"),
    ],
)  # fmt: skip
def test_fault_62_what_is_missing_surplus_or_mis_shaped_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        make_plan(CONFIG, headers(CONFIG, **changes))


def test_many_missing_tensors_are_counted_not_listed():
    with pytest.raises(ValueError, match="the checkpoint lacks model.embed_tokens.weight, .* and 20 more"):
        make_plan(CONFIG, {})


def test_old_rotary_tables_are_no_surplus():
    old = {"model__layers__0__self_attn__rotary_emb__inv_freq": TensorInfo("a", "F32", (1,))}
    assert make_plan(CONFIG, headers(CONFIG, **old)) == make_plan(CONFIG, headers(CONFIG))


def test_the_dtype_is_the_config_s_or_else_the_embedding_s():
    assert make_plan(CONFIG, headers(CONFIG)).dtype == "bfloat16"
    assert make_plan(replace(CONFIG, dtype="float16"), headers(CONFIG)).dtype == "float16"


def test_a_header_is_checked_against_the_file():
    entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    assert parse_header("f", {"__metadata__": {"format": "pt"}, "x": entry}, 24) == {"x": ("f", "F32", (2, 3))}
    with pytest.raises(ValueError, match="f holds 20 bytes of weights, its header names 24: truncated or corrupt"):
        parse_header("f", {"x": entry}, 20)
    with pytest.raises(ValueError, match="f: x has 24 bytes"):
        parse_header("f", {"x": {**entry, "shape": [2, 4]}}, 24)
    offsets = ({"x": {**entry, "data_offsets": value}} for value in (None, [0], [0, 24, 24]))
    for broken in ([], {"x": 1}, {"x": {"dtype": "F32"}}, *offsets):
        with pytest.raises(ValueError, match="f has a broken header"):
            parse_header("f", broken, 24)
