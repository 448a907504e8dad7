"""Completions are values; the rates come from their timings."""

import dataclasses

import pytest

from fnllm.completion import Chunk, Completion, Timings, failed


def test_rates():
    done = Completion(
        token_ids=(1, 2, 3), prompt_tokens=10, cached_tokens=4, timings=Timings(queued=1.0, first_token=3.0, total=4.0)
    )
    assert done.prefill_tokens_per_second == 6 / 2.0
    assert done.decode_tokens_per_second == 2 / 1.0
    assert dataclasses.replace(done, token_ids=(1, 2)).decode_tokens_per_second == 1 / 1.0


def test_rates_of_what_did_not_happen():
    assert Completion().prefill_tokens_per_second is None
    assert Completion().decode_tokens_per_second is None
    assert Completion(token_ids=(1,), timings=Timings(0.0, 1.0, 1.0)).decode_tokens_per_second is None
    assert Completion(token_ids=(1, 2), timings=Timings(0.0, 1.0, 1.0)).decode_tokens_per_second is None


def test_frozen_and_failed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Completion().text = "x"
    error = ValueError("no")
    assert (failed(error).finish_reason, failed(error).error) == ("error", error)


def test_a_chunk_is_finished_with_its_completion():
    assert not Chunk(index=0, text="a").finished
    assert Chunk(index=0, completion=Completion()).finished
