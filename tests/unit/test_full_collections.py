"""Python's collector around a call of `generate`: full collections wait until it ends."""

import dataclasses
import gc

import pytest
import torch
from tiny_models import GREEDY, tiny

import fnllm
from fnllm.ambient import full_collections_off

SMALL = {"max_model_len": 40, "max_num_seqs": 4, "block_size": 4}
PROMPTS = [[5, 6, 7], [8], [5, 6, 7, 9, 10, 11, 12], [3, 1, 2, 4]]
SHORT = dataclasses.replace(GREEDY, max_tokens=6)


def test_python_s_full_collections_wait_while_generate_runs():
    """One may take half a second. They are as before once the call has ended, also by an error."""
    seen = []

    def fails_at_last(logits, ids):
        seen.append(gc.get_threshold())
        return logits if len(seen) < 6 else logits * torch.nan

    sampling = dataclasses.replace(SHORT, logits_fn=fails_at_last, max_tokens=50)
    usual = gc.get_threshold()
    with pytest.raises(FloatingPointError):
        fnllm.generate(tiny(), PROMPTS[:1], sampling, **SMALL)
    assert gc.get_threshold() == seen[0] == usual
    assert [one[:2] for one in seen] == [usual[:2]] * len(seen) and min(one[2] for one in seen[1:]) > 10**9
    seen.clear()
    with pytest.raises(FloatingPointError):
        list(fnllm.stream(tiny(), PROMPTS[:1], sampling, **SMALL))
    assert set(seen) == {usual}  # what lies between two chunks is the caller's


def test_calls_that_overlap_leave_python_s_collector_as_it_was():
    usual = gc.get_threshold()
    first, second = full_collections_off(lambda: 0), full_collections_off(lambda: 0)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == usual


@pytest.mark.parametrize("enabled", [True, False])
def test_a_full_collection_follows_what_was_traced_and_nothing_else(enabled):
    def made(traced):
        begun = gc.get_stats()[2]["collections"]
        with full_collections_off(lambda: traced.pop(0)):
            pass
        return gc.get_stats()[2]["collections"] - begun

    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        assert (made([2, 3]), made([3, 3])) == (int(enabled), 0)
    finally:
        (gc.enable if was else gc.disable)()


def test_a_caller_s_young_garbage_is_found_while_generate_runs():
    """A function that leaves cycles round its logits would else fill the memory by the end of a long call."""
    alive, most = set(), []

    class Cycle:
        def __init__(self, number):
            self.number, self.itself = number, self
            alive.add(number)

        def __del__(self):
            alive.discard(self.number)

    def leaves_cycles(logits, ids):
        for i in range(200):
            Cycle(200 * len(most) + i)
        most.append(len(alive))
        return logits

    sampling = dataclasses.replace(SHORT, logits_fn=leaves_cycles, max_tokens=30)
    usual = gc.get_threshold()
    gc.set_threshold(500, *usual[1:])
    try:
        fnllm.generate(tiny(), PROMPTS[:1], sampling, **SMALL)
    finally:
        gc.set_threshold(*usual)
    assert len(most) >= 30 and max(most) < 3000
