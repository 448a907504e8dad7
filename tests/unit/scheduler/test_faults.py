"""Faults that users of other engines reported, each under its number in the project's list."""

import random

import numpy as np
import pytest
from unit.scheduler.simulator import Engine, make, run_alone

from fnllm import scheduler
from fnllm.scheduler import Request, SchedulerConfig


def held(engine: Engine, seq_id: int) -> int:
    return len(engine.state.sequences[seq_id].table)


def test_fault_01_a_cached_prompt_still_computes_its_last_token():
    engine, prompt = make(), list(range(10)) + [3, 7]
    first = engine.add(prompt, 3)
    engine.drain()
    second = engine.add(prompt, 3)
    plan = engine.schedule()
    assert plan.query_lens.tolist() == [4] and plan.samples.all(), "the block of the last token is computed again"
    engine.drain()
    assert engine.expected[first] == engine.expected[second]
    assert (engine.cached[first], engine.cached[second]) == (0, 8)


def test_fault_03_few_blocks_give_the_tokens_of_many():
    outputs = []
    for blocks in (7, 100):
        engine = make(blocks)
        ids = [engine.add([1, 2, last], 12) for last in (3, 4, 5, 6)]
        while engine.step():
            engine.check()
        outputs.append([engine.expected[seq_id] for seq_id in ids])
        assert (scheduler.metrics(engine.state).counters.preemptions > 0) == (blocks == 7)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("length", [1, 4, 5, 9])
@pytest.mark.parametrize("in_flight", [False, True])
def test_fault_04_preemption_loses_no_token(length, in_flight):
    engine = make()
    seq_id = engine.add([2], 12)
    while len(engine.expected[seq_id]) < length:
        engine.step()
    if in_flight:
        engine.schedule()
    engine.state = scheduler.preempt(engine.state, seq_id)
    engine.check()
    assert held(engine, seq_id) == 0
    if in_flight:
        assert engine.schedule() is None, "it waits for its token"
        engine.commit()
    for grown in range(length + in_flight, 13):
        assert len(engine.expected[seq_id]) == grown
        engine.step()
    engine.drain()
    assert engine.expected[seq_id][1:] == run_alone(engine.requests[seq_id], 0, 11, 256)


@pytest.mark.parametrize("length", [3, 4, 5, 8, 9])
def test_fault_05_blocks_held_are_ceil_of_tokens(length):
    engine = make(size=4)
    seq_id = engine.add(range(length), 7)
    for step in range(6):
        engine.schedule()
        assert held(engine, seq_id) == -(-(length + step) // 4)
        engine.commit()
        assert held(engine, seq_id) == -(-(length + step) // 4)


def test_fault_06_what_can_never_fit_is_refused_or_ends_with_a_reason():
    state = scheduler.init(SchedulerConfig(3, 4, 8, 64, 64))
    with pytest.raises(ValueError, match=r"20 tokens .* at most 12 tokens .*max_model_len=64.*3 blocks x 4 = 12"):
        scheduler.add(state, Request((1,) * 20, 4))
    engine = make(blocks=2)
    seq_id = engine.add([1, 2, 3], 50)
    engine.drain()
    assert engine.reasons[seq_id] == "length" and len(engine.expected[seq_id]) == 8


def test_fault_07_an_equal_prefix_published_in_between_frees_nothing_in_use():
    engine, prefix = make(blocks=40, size=1, budget=5), list(range(9))
    engine.add([*prefix, 1], 4)
    engine.schedule()
    second = engine.add([*prefix, 2], 4)
    for _ in range(3):
        engine.schedule()
        engine.check()
        engine.commit()
        engine.check()
    engine.add([*prefix, 3], 4)
    while engine.step():
        engine.check()
    assert engine.expected[second][10:] == run_alone(engine.requests[second], 0, 11, 256)


def test_fault_10_kinds_of_key_do_not_meet():
    state = scheduler.init(SchedulerConfig(20, 4, 4, 64, 64))
    for key in (scheduler.make_cache_key(params="x"), scheduler.make_cache_key(steering="x")):
        state, seq_id = scheduler.add(state, Request((1, 2, 3, 4, 5), 1, cache_key=key))
        state, plan = scheduler.schedule(state)
        assert plan.joins[0].cached == 0
        state, _ = scheduler.commit(state, plan, np.array([7]))
    state, seq_id = scheduler.add(state, Request((1, 2, 3, 4, 5), 1, cache_key=scheduler.make_cache_key(params="x")))
    assert scheduler.schedule(state)[1].joins[0].cached == 4
    assert hash(scheduler.make_cache_key(v=-1)) == hash(scheduler.make_cache_key(v=-2))
    assert scheduler.make_cache_key(v=-1) != scheduler.make_cache_key(v=-2)
    # A key that equals the number of some prefix is not taken for it.
    state, seq_id = scheduler.add(state, Request((1, 2, 3, 4, 5), 1, cache_key=0))
    assert all(join.cached == 0 for join in scheduler.schedule(state)[1].joins if join.seq_id == seq_id)


class Asking:
    """A part of a key that cannot be compared, as a dataclass of tensors cannot."""

    def __eq__(self, other):
        raise RuntimeError("ambiguous")

    def __hash__(self):
        return id(self)


def test_parts_of_keys_are_compared_by_hash_first():
    state = scheduler.init(SchedulerConfig(200, 4, 4, 64, 64))
    parts = [Asking() for _ in range(80)]  # more than a trie's root has branches
    for part in parts * 2:
        request = Request((1, 2, 3, 4, 5), 1, cache_key=scheduler.make_cache_key(part=part))
        state, plan = scheduler.schedule(scheduler.add(state, request)[0])
        state, _ = scheduler.commit(state, plan, np.array([7]))
    assert state.counters.cached_tokens == 4 * len(parts)  # each found its own prefix, and no other's


def test_fault_11_new_weights_do_not_meet_old_prefixes():
    engine, prompt = make(), [1, 2, 3, 4, 5, 6, 7, 8, 9]
    engine.add(prompt, 3, weights=0)
    engine.drain()
    new = engine.add(prompt, 3, weights=1)
    engine.drain()
    assert engine.cached[new] == 0
    assert engine.expected[new][9:] == run_alone(engine.requests[new], 1, 11, 256)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_fault_14_heavy_eviction_leaves_no_stale_entry(prefix_cache):
    rng = random.Random(5)
    engine = make(blocks=10, length=24, prefix_cache=prefix_cache)
    for _ in range(200):
        engine.add([rng.randrange(3) for _ in range(rng.randint(1, 20))], rng.randint(1, 4))
    while engine.step():
        scheduler.check(engine.state)
    assert scheduler.metrics(engine.state).counters.finished == 200
    assert bool(scheduler.metrics(engine.state).evictions) == prefix_cache


def test_fault_15_shared_blocks_are_counted_once():
    engine = make(blocks=12)
    first = engine.add(range(9), 6)
    engine.step()
    forks = [engine.fork(first) for _ in range(2)]
    engine.step()
    engine.check()
    now = scheduler.metrics(engine.state)
    assert now.blocks_held == 2 + 3, "two shared full blocks, three partial ones"
    engine.abort(forks[0])
    engine.finish(first)
    engine.check()
    engine.drain()
    now = scheduler.metrics(engine.state)
    assert (now.blocks_held, now.blocks_free + now.blocks_cached) == (0, 12)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("count", [2, 5])
def test_fault_16_equal_prompts_of_one_call_share(count, depth):
    engine = make()
    ids = [engine.add(range(10), 3) for _ in range(count)]
    engine.drain(depth)
    assert [engine.cached[seq_id] for seq_id in ids] == [0] + [8] * (count - 1)
    assert len({tuple(engine.expected[seq_id]) for seq_id in ids}) == 1


def test_fault_17_counts_are_validated_and_zero_is_allowed(unchecked):
    for wrong, error in ((-2, ValueError), (2.5, TypeError), (True, TypeError), (None, TypeError)):
        for field in ("max_tokens", "min_tokens"):
            with pytest.raises(error, match=f"{field}={wrong}"):
                Request((1,), **{"max_tokens": 1, field: wrong})
    engine = make(budget=3)
    seq_id = engine.add(range(7), 0)
    engine.drain()
    assert engine.reasons[seq_id] == "length" and engine.expected[seq_id] == list(range(7))
    assert [plan.query_lens.tolist() for plan in engine.plans] == [[3], [3], [1]]
    assert not any(plan.samples.any() for plan in engine.plans)


def test_fault_18_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="prompt is empty"):
        Request((), 4)


@pytest.mark.parametrize("prompt_len, new", [(14, 2), (16, 0), (15, 1), (3, 10)])
def test_fault_20_a_sequence_ends_at_the_longest_length(prompt_len, new):
    engine = make(length=16)
    seq_id = engine.add(range(prompt_len), 10)
    engine.drain(2)
    assert engine.reasons[seq_id] == "length" and len(engine.expected[seq_id]) == prompt_len + new


def test_fault_21_one_function_gives_the_limit():
    config = SchedulerConfig(3, 4, 8, 64, 64)
    assert scheduler.length_limit(config) == 12
    state = scheduler.init(config)
    for length in (11, 12):
        state, _ = scheduler.add(state, Request((1,) * length, 4))
    with pytest.raises(ValueError, match="13 tokens .* at most 12 tokens"):
        scheduler.add(state, Request((1,) * 13, 4))


def test_fault_23_without_chunks_a_prompt_over_the_budget_is_refused():
    engine = make(budget=8, chunked_prefill=False)
    seq_id = engine.add(range(8), 4)
    with pytest.raises(ValueError, match="9 tokens .* at most 8 tokens .*max_num_batched_tokens=8"):
        engine.add(range(9), 4)
    engine.drain()
    assert len(engine.expected[seq_id]) == 12
    # One that has grown past the budget still comes back after a preemption.
    seq_id = engine.add(range(8), 4)
    for _ in range(3):
        engine.step()
    engine.state = scheduler.preempt(engine.state, seq_id)
    engine.drain()
    assert len(engine.expected[seq_id]) == 12


def test_fault_24_a_budget_beyond_the_model_length_is_accepted():
    engine = make(budget=64, length=16)
    engine.add(range(16), 0)
    engine.drain()


@pytest.mark.parametrize("depth", [1, 2])
def test_fault_26_a_long_prompt_starves_nobody(depth):
    engine = make(budget=8)
    first = engine.add([1, 2], 60)
    for _ in range(3):
        engine.step()
    engine.add([n % 11 for n in range(100)], 5)
    for _ in range(20):
        plan = engine.schedule()
        assert plan.seq_ids[0] == first and plan.num_decode >= 1 and plan.query_lens.sum() <= 8
        if len(engine.flight) >= depth:
            engine.commit()
    assert engine.plans[-8].query_lens.sum() == 8, "the prompt fills the budget"


def test_fault_28_a_plan_says_what_is_decoded():
    engine = make(blocks=4)
    ids = [engine.add([last], 12) for last in (1, 2)]
    preempted = False
    while engine.step():
        plan = engine.plans[-1]
        for entry, seq_id in enumerate(plan.seq_ids.tolist()):
            fresh = seq_id in {join.seq_id for join in plan.joins}
            assert not (fresh and entry < plan.num_decode), "whoever gets a row brings its tokens along"
            preempted |= fresh and len(engine.expected[seq_id]) > 3
    assert preempted and all(len(engine.expected[seq_id]) == 13 for seq_id in ids)


@pytest.mark.parametrize("wrong, error", [(-1, ValueError), (2**31, ValueError), (1.5, TypeError), ("a", TypeError)])
def test_fault_31_ids_that_are_none_are_named(wrong, error, unchecked):
    with pytest.raises(error, match=r"prompt\[1\]"):
        Request((3, wrong), 4)
    with pytest.raises(error, match=r"stop_token_ids\[0\]"):
        Request((3,), 4, stop_token_ids=frozenset([wrong]))


def test_fault_44_any_stop_id_ends_and_is_named():
    state = scheduler.init(SchedulerConfig(8, 4, 4, 64, 64))
    state, seq_id = scheduler.add(state, Request((1, 2), 9, stop_token_ids=frozenset([3, 7])))
    state, other = scheduler.add(state, Request((1, 5), 9, stop_token_ids=frozenset([4])))
    for token, want in ((5, ()), (7, ((seq_id, "stop", 7),))):
        state, plan = scheduler.schedule(state)
        state, events = scheduler.commit(state, plan, np.array([token, token]))
        assert events.finished == want and events.tokens.tolist() == [token] * 2
    assert scheduler.metrics(state).running == 1 and other in state.sequences


def test_fault_91_a_fork_runs_as_if_alone():
    engine = make(size=4)
    parent = engine.add([1, 2, 3, 4], 12)
    engine.step()
    engine.step()
    assert len(engine.expected[parent]) == 6
    branch, dropped = engine.fork(parent), engine.fork(parent)
    engine.check()
    tables = [engine.state.sequences[seq_id].table for seq_id in (parent, branch, dropped)]
    assert len({table[0] for table in tables}) == 1 and len({table[1] for table in tables}) == 3
    assert engine.state.pool.blocks[tables[0][0]].refs == 3
    plan = engine.schedule()
    sources, targets = (part.tolist() for part in plan.copies)
    assert sources == [tables[0][1]] * 2 and set(targets) == {tables[1][1], tables[2][1]}
    engine.commit()
    engine.abort(dropped)
    engine.check()
    assert engine.state.pool.blocks[tables[0][0]].refs == 2
    engine.append(branch, [7, 7], 6)
    engine.drain()
    alone = Request(tuple(engine.expected[branch][: engine.turn[branch]]), 6)
    assert engine.expected[branch][engine.turn[branch] :] == run_alone(alone, 0, 11, 256)
    assert engine.expected[parent][4:] == run_alone(engine.requests[parent], 0, 11, 256)
