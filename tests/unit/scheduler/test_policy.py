"""Who runs when: budget, order, sharing of prefixes, eviction, and what ends a sequence."""

import pickle

import numpy as np
import pytest
from unit.scheduler.simulator import make

from fnllm import scheduler
from fnllm.scheduler import Request, SchedulerConfig
from fnllm.scheduler.line import iterate
from fnllm.scheduler.request import root


def test_decode_comes_first_and_prompts_share_the_rest():
    engine = make(budget=10)
    engine.add([1], 9)
    engine.step()
    engine.add([2] * 6, 9)
    engine.add([3] * 9, 9)
    plan = engine.schedule()
    assert plan.num_decode == 1 and plan.query_lens.tolist() == [1, 6, 3]
    assert plan.prefill_tokens.tolist() == [2] * 6 + [3] * 3 and plan.samples.tolist() == [True, True, False]
    engine.commit()
    plan = engine.schedule()
    assert plan.num_decode == 2 and plan.query_lens.tolist() == [1, 1, 6] and plan.samples.all() and not plan.joins


def test_adding_many_is_adding_each():
    requests = [Request((n % 3, 1, 2, 3, n), 50 * n) for n in range(9)]
    config = SchedulerConfig(100, 2, 8, 64, 256)
    start, first = scheduler.add(scheduler.init(config), Request((1, 2), 3))
    one, ids = start, []
    for request in requests:
        one, seq_id = scheduler.add(one, request)
        ids.append(seq_id)
    together, seq_ids = scheduler.add_all(start, requests)
    assert seq_ids == ids == list(range(first + 1, first + 10))
    assert dict(together.sequences.items()) == dict(one.sequences.items())
    for n, (seq_id, request) in enumerate(zip(seq_ids, requests, strict=True)):
        added = together.sequences[seq_id]
        assert added.request is request and scheduler.tokens(together, seq_id) == (n % 3, 1, 2, 3, n)
        # The whole cache, 100 blocks of 2 tokens, is less than max_model_len.
        assert (added.prompt_len, added.max_tokens, added.limit) == (5, 50 * n, min(5 + 50 * n, 200))
    for state in (one, together):
        assert list(iterate(state.waiting)) == [first, *ids] and state.next_id == ids[-1] + 1
        scheduler.check(state)
    assert scheduler.add_all(start, [])[1] == []
    with pytest.raises(ValueError, match="257 tokens"):
        scheduler.add_all(start, [requests[0], Request((1,) * 257, 1)])
    assert len(start.sequences) == 1


def test_ids_are_packed_once_and_read_as_a_tuple():
    ids = scheduler.token_ids((3, 0, 2**31 - 1), 2**31)
    assert ids == (3, 0, 2**31 - 1) and Request(ids, 1).packed is ids.packed
    assert ids.packed == np.array(ids, np.int32).tobytes() == Request((3, 0, 2**31 - 1), 1).packed
    assert list(ids) == [*reversed(ids)][::-1] == [ids[0], ids[1], ids[-1]] and ids[1:] == (0, 2**31 - 1)
    assert ids == scheduler.token_ids([3, 0, 2**31 - 1], 2**31) and ids != (3, 0) and len(ids) == 3
    assert hash(ids) == hash(tuple(ids)) and repr(ids) == repr(tuple(ids)) and pickle.loads(pickle.dumps(ids)) == ids
    assert Request(ids, 1).prompt is ids, "a long prompt is not kept twice"
    for wrong in (3, 4, -1, 2**40, 1.0, "1"):
        assert scheduler.token_ids((0, wrong, 2), 3) is None
    for packed in (b"abc", np.array([3, -1], np.int32).tobytes()):
        with pytest.raises(ValueError, match="int32 numbers of 0 and above"):
            scheduler.TokenIds(packed)


def test_a_chunk_is_bounded():
    engine = make(budget=10, max_chunk=3)
    engine.add([1] * 7, 1)
    engine.add([2] * 4, 1)
    engine.drain()
    assert [plan.query_lens.tolist() for plan in engine.plans] == [[3, 3], [3, 1], [1]]


def test_without_chunks_a_prompt_waits_for_a_step_that_takes_it_whole():
    engine = make(budget=8, chunked_prefill=False)
    first, second = engine.add([1] * 6, 3), engine.add([2] * 7, 3)
    third = engine.add([3], 3)
    assert engine.schedule().seq_ids.tolist() == [first], "the short one does not overtake"
    engine.commit()
    assert engine.schedule().seq_ids.tolist() == [first, second]
    engine.commit()
    assert engine.schedule().seq_ids.tolist() == [first, second, third]


def test_no_more_sequences_run_than_can_get_a_token():
    engine = make(seqs=6, budget=3)
    for last in range(6):
        engine.add([1, last], 5)
    engine.drain()
    assert max(len(plan.rows) for plan in engine.plans) == 3


def test_rows_are_kept_and_reused():
    engine = make(seqs=2)
    ids = [engine.add([last], most) for last, most in ((1, 2), (2, 6), (3, 3))]
    rows = {}
    while engine.step():
        plan = engine.plans[-1]
        for seq_id, row in zip(plan.seq_ids.tolist(), plan.rows.tolist(), strict=True):
            assert rows.setdefault(seq_id, row) == row
    assert [rows[seq_id] for seq_id in ids] == [0, 1, 0]


def test_the_newest_gives_way_and_comes_back_before_others():
    engine = make(blocks=4, size=2, seqs=3)
    ids = [engine.add([last], 7) for last in (1, 2, 3)]
    order = []
    while engine.step():
        order += [join.seq_id for join in engine.plans[-1].joins]
    assert order[:3] == ids[:3] and 0 not in order[3:], "the oldest is never preempted"
    assert all(engine.reasons[seq_id] == "length" for seq_id in ids)


def test_a_prompt_being_computed_is_waited_for_and_others_pass():
    engine = make(budget=6, max_chunk=4, size=2)
    first, same = engine.add([1] * 8 + [2], 2), engine.add([1] * 8 + [3], 2)
    other = engine.add([4, 5], 2)
    joined = {}
    while engine.step():
        for join in engine.plans[-1].joins:
            joined[join.seq_id] = (engine.plans[-1].step, join.cached)
    assert joined[first] == (0, 0) and joined[same][1] == 8, "all of the common prefix is shared"
    assert joined[other][0] < joined[same][0], "the wait holds up nobody else"


def test_waiting_for_a_prefix_ends_when_its_sequence_does():
    engine = make(budget=2, size=2)
    first, same = engine.add([1] * 9, 2), engine.add([1] * 9, 2)
    engine.step()
    engine.abort(first)
    assert engine.schedule().joins[0].seq_id == same
    engine.drain()


def test_a_waiting_prompt_is_not_starved_by_newer_ones():
    engine = make(blocks=16, size=2, seqs=4, budget=6)
    engine.add([1] * 20, 8)
    long = engine.add([1] * 20 + [2], 8)
    for step in range(60):
        engine.add([3, step % 11], 3)
        engine.add([1] * (step % 20 + 1), 1)
        engine.step()
    assert engine.reasons.get(long) == "length"


def test_prompts_of_many_equal_groups_share_within_a_call():
    engine = make(budget=16, seqs=4, size=2)
    ids = [[engine.add([group] * 6, 2) for _ in range(3)] for group in range(4)]
    engine.drain(2)
    for group in ids:
        assert sorted(engine.cached[seq_id] for seq_id in group) == [0, 4, 4]


@pytest.mark.parametrize("seed", range(20))
def test_prompts_admitted_together_find_what_each_would_find_alone(seed):
    rng = np.random.default_rng(seed)
    engine = make(blocks=1000, seqs=40, budget=1000, size=2)
    # Texts of few distinct blocks: long and short common beginnings, in two worlds that share nothing.
    texts = [rng.integers(0, 2, rng.integers(1, 16)).repeat(2).tolist() for _ in range(40)]
    options = [{"weights": int(rng.integers(0, 2)), "use_cache": rng.random() < 0.8} for _ in texts]
    for text, option in zip(texts[:12], options, strict=False):
        engine.add(text, 1, **option)
    engine.drain()
    for text, option in zip(texts[12:], options[12:], strict=True):
        engine.add([*text, int(rng.integers(0, 2))], 3, **option)
    before = engine.state
    plan = engine.schedule()
    engine.check()
    assert len({join.cached for join in plan.joins}) > 2
    for join in plan.joins:
        sequence, parent, found = before.sequences[join.seq_id], root(before.sequences[join.seq_id]), []
        for block in sequence.blocks if sequence.request.use_cache else ():
            entry = before.pool.prefix.get((parent, block))
            if entry is None:
                break
            parent = entry.number
            found.append(entry.block)
        most = (len(sequence.request.prompt) - 1) // 2
        assert join.cached == 2 * min(len(found), most)
        assert join.block_table[: join.cached // 2].tolist() == found[:most]
    engine.drain()
    engine.check()


def test_a_prefix_that_another_gave_up_keeps_its_number():
    engine = make(budget=6, max_chunk=2, size=2)
    first = engine.add([1] * 8, 2)
    engine.step()
    second = engine.add([1] * 4, 5)
    plan = engine.schedule()
    assert plan.seq_ids.tolist() == [first, second] and plan.starts.tolist() == [2, 2], "both compute the second block"
    engine.abort(first)
    engine.drain()
    again = engine.add(engine.expected[second], 1)
    engine.drain()
    assert engine.cached[again] == 8, "what was sampled behind that block is found as well"


def test_running_sequences_are_left_a_block_for_every_four():
    engine = make(blocks=16, size=4, seqs=8)
    for last in range(5):
        engine.add([last], 12)
    engine.step()
    ten = engine.add([9] * 40, 5)
    engine.step()
    assert engine.state.sequences[ten].row < 0, "of 11 idle blocks 2 are left to the five"
    eleven = engine.add([8] * 44, 5)
    engine.abort(0)
    assert [join.seq_id for join in engine.copy().schedule().joins] == [ten], "it is let in while others still run"
    engine.abort(ten)
    assert [join.seq_id for join in engine.schedule().joins] == [eleven], "of 12 idle blocks 1 is left to the four"


def test_least_recently_used_goes_first_and_children_before_parents():
    engine = make(blocks=6, size=2, length=12)
    engine.add([1] * 5, 0)
    engine.drain()
    engine.add([2] * 5, 0)
    engine.drain()
    engine.add([1] * 5, 0)  # the ones are used again
    engine.drain()
    engine.add([3] * 6, 0)
    engine.drain()
    hits = {}
    for value in (1, 2):
        request = Request((value,) * 5, 0, cache_key=scheduler.make_cache_key(weights=0))
        state, _ = scheduler.add(engine.state, request)
        hits[value] = scheduler.schedule(state)[1].joins[0].cached
    assert hits == {1: 4, 2: 2}, "of the twos only the second block was evicted"


def test_evicting_a_parent_leaks_nothing():
    engine = make(blocks=6, size=2, length=12)
    engine.add([1] * 5, 0)
    engine.drain()
    table = [entry.block for entry in engine.state.pool.prefix.items() for entry in entry[1:]]
    engine.invalidate([min(table)])
    engine.check()
    again = engine.add([1] * 5, 0)
    engine.drain()
    assert engine.cached[again] == 0
    engine.add([2] * 12, 0)
    engine.drain()
    engine.check()
    assert scheduler.metrics(engine.state).blocks_held == 0


def test_use_cache_false_neither_reads_nor_publishes():
    engine = make()
    engine.add(range(9), 1, use_cache=False)
    engine.drain()
    assert len(engine.state.pool.prefix) == 0
    engine.add(range(9), 1)
    engine.drain()
    again = engine.add(range(9), 1, use_cache=False)
    engine.drain()
    assert engine.cached[again] == 0


def test_min_tokens_hold_a_stop_id_back():
    state = scheduler.init(SchedulerConfig(8, 4, 4, 64, 64))
    state, seq_id = scheduler.add(state, Request((1,), 9, min_tokens=2, stop_token_ids=frozenset([5])))
    for made in range(3):
        state, plan = scheduler.schedule(state)
        state, events = scheduler.commit(state, plan, np.array([5]))
        assert bool(events.finished) == (made == 2)


def test_stop_wins_over_length_on_the_last_token():
    state = scheduler.init(SchedulerConfig(8, 4, 4, 64, 64))
    state, seq_id = scheduler.add(state, Request((1,), 1, stop_token_ids=frozenset([5])))
    state, plan = scheduler.schedule(state)
    state, events = scheduler.commit(state, plan, np.array([5]))
    assert events.finished == ((seq_id, "stop", 5),)
    assert seq_id not in state.sequences, "what is not to be kept is forgotten"


def test_a_surplus_token_is_dropped():
    state = scheduler.init(SchedulerConfig(8, 4, 4, 64, 64))
    state, seq_id = scheduler.add(state, Request((1,), 9, stop_token_ids=frozenset([5])))
    state, first = scheduler.schedule(state)
    state, second = scheduler.schedule(state)
    state, events = scheduler.commit(state, first, np.array([5]))
    assert events.finished == ((seq_id, "stop", 5),)
    state, events = scheduler.commit(state, second, np.array([6]))
    assert len(events.tokens) == 0 and not events.finished
    scheduler.check(state)


def test_commits_out_of_turn_or_of_other_shape_are_refused():
    state = scheduler.init(SchedulerConfig(8, 4, 4, 64, 64))
    state, _ = scheduler.add(state, Request((1,), 9))
    state, first = scheduler.schedule(state)
    state, second = scheduler.schedule(state)
    with pytest.raises(ValueError, match="plan.step=1 is out of turn.*is 0"):
        scheduler.commit(state, second, np.array([1]))
    with pytest.raises(ValueError, match=r"shape \(2,\).* an integer for each of its 1 entries"):
        scheduler.commit(state, first, np.array([1, 2]))


def test_tokens_that_are_no_integers_are_refused(unchecked):
    state = scheduler.init(SchedulerConfig(8, 4, 4, 64, 64))
    state, _ = scheduler.add(state, Request((1,), 9))
    state, plan = scheduler.schedule(state)
    with pytest.raises(ValueError, match="dtype float64"):
        scheduler.commit(state, plan, np.array([1.0]))


SIZES = dict(num_blocks=4, block_size=4, max_num_seqs=4, max_num_batched_tokens=8, max_model_len=16)


@pytest.mark.parametrize("field", SIZES)
@pytest.mark.parametrize("value", [0, -3, 2.5, True])
def test_sizes_are_validated(field, value, unchecked):
    with pytest.raises(ValueError, match=f"{field}={value}"):
        SchedulerConfig(**{**SIZES, field: value})


def test_a_chunk_bound_needs_chunks():
    with pytest.raises(ValueError, match="max_chunk=3 has no meaning"):
        SchedulerConfig(4, 4, 4, 8, 16, chunked_prefill=False, max_chunk=3)
    with pytest.raises(ValueError, match="max_chunk=0"):
        SchedulerConfig(4, 4, 4, 8, 16, max_chunk=0)


def test_the_watched_stop_ids_are_those_of_running_requests():
    state = scheduler.init(SchedulerConfig(8, 4, 2, 64, 64))
    for stop in range(20):
        state, _ = scheduler.add(state, Request((1,), 1 + stop % 3, stop_token_ids=frozenset([stop, 40])))
    while scheduler.metrics(state).running or len(state.waiting):
        state, plan = scheduler.schedule(state)
        watched = set(state.rows.stops.nonzero()[0].tolist())
        running = [state.sequences[int(seq_id)] for seq_id in state.rows.seq_id if seq_id >= 0]
        assert set().union(*(sequence.request.stop_token_ids for sequence in running)) <= watched
        assert len(watched) <= 4
        state, _ = scheduler.commit(state, plan, np.full(len(plan.rows), 2**31 - 1))


def test_a_token_like_a_stop_id_does_not_stop():
    state = scheduler.init(SchedulerConfig(8, 4, 4, 64, 64))
    state, seq_id = scheduler.add(state, Request((1,), 9, stop_token_ids=frozenset([5])))
    state, _ = scheduler.add(state, Request((2,), 9, stop_token_ids=frozenset([6])))
    for token in (5 + 2**16, 6, 5):
        state, plan = scheduler.schedule(state)
        state, events = scheduler.commit(state, plan, np.array([token, 0]))
        assert bool(events.finished) == (token == 5)
