"""The buckets of steps, with the rules of a GPU tried on plans only."""

import numpy as np
import pytest

from fnllm.buckets import (
    CAPTURED_ENTRIES,
    Bucket,
    common_buckets,
    context_bound,
    ladder,
    padded,
    padding,
    prefill_size,
    up_to_64,
)
from fnllm.options import EngineOptions, resolve
from fnllm.scheduler import Plan
from fnllm_weights import ModelConfig

CONFIG = ModelConfig(
    architecture="Qwen3ForCausalLM", vocab_size=50, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    num_attention_heads=1, num_key_value_heads=1, head_dim=8, max_position_embeddings=9000,
)  # fmt: skip
SETTINGS = resolve(EngineOptions(max_num_seqs=40, max_num_batched_tokens=3000), CONFIG, True)


def plan(decode: int, prefill: tuple[int, ...] = (), starts: int = 7) -> Plan:
    """Rows 0, 1, ...: `decode` single tokens, then chunks of these lengths."""
    entries = decode + len(prefill)
    lens = np.array([1] * decode + list(prefill), np.int32)
    empty = np.zeros(0, np.int32)
    rows, tokens = np.arange(entries, dtype=np.int32), np.arange(sum(prefill), dtype=np.int32) % 50
    return Plan(
        step=0, rows=rows, seq_ids=rows, starts=np.full(entries, starts, np.int32), query_lens=lens, num_decode=decode,
        prefill_tokens=tokens, samples=np.ones(entries, bool), joins=(), table_updates=(empty,) * 3,
        copies=(empty,) * 2,
    )  # fmt: skip


def bucket(*args, on_gpu=True) -> tuple:
    inputs, captured = padded(plan(*args), SETTINGS, on_gpu)
    return len(inputs.row), None if inputs.token_ids is None else len(inputs.token_ids), captured


def test_decode_steps_are_captured_by_their_entries():
    assert [bucket(n) for n in (1, 3, 16, 17, 40)] == [(n, None, True) for n in (1, 4, 16, 24, 40)]
    assert bucket(17, on_gpu=False) == (17, None, True)


@pytest.mark.parametrize(
    ("decode", "prefill", "expected"),
    [
        (0, (5,), (CAPTURED_ENTRIES, 64, True)),
        (2, (100, 1946), (CAPTURED_ENTRIES, 2048, True)),
        (8, (5,), (41, 256, True)),  # small, and of too many sequences for those
        (30, (226,), (41, 256, True)),
        (30, (227,), (41, 512, True)),
        (38, (500, 1510), (41, 2048, True)),
        (2, (100, 1947), (41, 3008, True)),  # few sequences, and too many tokens for those
        (0, (3000,), (41, 3008, True)),  # as large as a step may be
        (36, (1000, 1964), (41, 3008, True)),
        (0, (2999,), (41, 3008, True)),
    ],
)
def test_prefill_steps_are_captured_by_their_tokens(decode, prefill, expected):
    assert bucket(decode, prefill) == expected


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(3071, (3072, False)), (3072, (4096, True)), (4097, (4160, False)), (8127, (8128, False)), (8129, (8192, True))],
)
def test_large_steps_are_not_padded_by_much(tokens, expected):
    settings = resolve(EngineOptions(max_num_seqs=40, max_num_batched_tokens=8192), CONFIG, True)
    inputs, captured = padded(plan(0, (tokens,)), settings, True)
    assert len(inputs.row) == 41 and inputs.token_ids is not None
    assert (len(inputs.token_ids), captured) == expected


def test_every_captured_size_is_some_step_s():
    """Each costs time at the start and memory, so none is captured that no step could ask for."""
    settings_of = (40, 8192), (40, 4096), (40, 100), (8, 8192), (8, 1000), (9, 1000), (7, 64), (7, 2048), (7, 3000)
    for seqs, most in settings_of:
        settings = resolve(EngineOptions(max_num_seqs=seqs, max_num_batched_tokens=most), CONFIG, True)
        known = [(bucket.entries, bucket.tokens) for bucket in common_buckets(settings) if bucket.tokens]
        steps = (
            prefill_size(entries, tokens, settings) for entries in (1, seqs) for tokens in range(entries, most + 1)
        )
        asked = {(entries, tokens) for entries, tokens, captured in steps if captured}
        assert len(known) == len(set(known)) and set(known) == asked


def test_what_is_captured_beforehand_is_what_steps_ask_for():
    known = set(common_buckets(SETTINGS))
    for step in (
        plan(1),
        plan(9),
        plan(40),
        plan(0, (64,)),
        plan(3, (2000,)),
        plan(5, (2000, 995)),
        plan(30, (70, 900)),
    ):
        inputs, captured = padded(step, SETTINGS, True)
        tokens = None if inputs.token_ids is None else len(inputs.token_ids)
        bound = context_bound(step, SETTINGS.max_model_len) if tokens is None else 0
        assert captured and Bucket(len(inputs.row), tokens, None, bound) in known


def test_padding_is_behind_the_entries_and_names_the_scratch_row():
    inputs, _ = padded(plan(1, (3,)), SETTINGS, True)
    assert inputs.row.tolist() == [0, 1] + [40] * 6
    assert inputs.accept.tolist() == [True, True] + [False] * 6
    assert inputs.cu_seqlens.tolist() == [0, 1, 4, 4, 4, 4, 4, 4, 4]
    assert inputs.token_ids[:5].tolist() == [-1, 0, 1, 2, 0]
    assert inputs.entry[:4].tolist() == [0, 1, 1, 1] and set(inputs.entry[4:].tolist()) == {8}


def test_a_bucket_of_padding_has_the_shapes_of_its_steps():
    for step in (plan(3), plan(2, (9,)), plan(30, (300,))):
        inputs, _ = padded(step, SETTINGS, True)
        tokens = None if inputs.token_ids is None else len(inputs.token_ids)
        empty = padding(len(inputs.row), tokens, None, SETTINGS.max_num_seqs)
        for ours, theirs in zip(empty, inputs, strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or (ours.shape == theirs.shape and ours.dtype == theirs.dtype)
        assert not empty.accept.any() and set(empty.row.tolist()) == {40}
        each = 1 if tokens is None else 0  # a decode step's entries have a token each, padding too
        assert empty.cu_seqlens.tolist() == [each * entry for entry in range(len(inputs.row) + 1)]


def test_few_bounds_on_the_context():
    assert context_bound(plan(2, starts=4095), 9000) == 4096
    assert context_bound(plan(2, starts=4096), 9000) == 9000
    assert context_bound(plan(2, starts=7), 4096) == 4096 and context_bound(plan(2, starts=7), 100) == 100


def test_a_ladder_wastes_little():
    sizes = ladder(1000)
    assert sizes[-1] == 1000 and list(sizes) == sorted(set(sizes)) and len(sizes) < 40
    assert all(b - a <= max(a / 4, 8) for a, b in zip(sizes, sizes[1:], strict=False) if a >= 16)
    assert [up_to_64(n) for n in (1, 64, 65)] == [64, 64, 128]
