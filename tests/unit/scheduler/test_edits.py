"""fork, truncate, append, invalidate, park, finish, abort; and that a state is a value."""

import dataclasses

import numpy as np
import pytest
from unit.scheduler.simulator import make, next_token, started

from fnllm import scheduler
from fnllm.scheduler import Request, SchedulerConfig


def test_a_fork_of_a_sequence_with_a_token_in_flight_samples_its_own():
    engine, parent = started()
    engine.schedule()
    fork = engine.fork(parent)
    assert len(engine.expected[fork]) == 6
    engine.check()
    engine.drain()
    assert engine.expected[fork] == engine.expected[parent]


def test_a_fork_shares_blocks_without_the_prefix_cache_too():
    engine, parent = started(prompt=range(9), prefix_cache=False)
    fork = engine.fork(parent)
    assert scheduler.metrics(engine.state).blocks_held == 4
    plan = engine.schedule()
    assert plan.joins[0].length == 11 and plan.query_lens.tolist() == [1, 1] and fork in plan.seq_ids
    engine.drain()
    assert scheduler.metrics(engine.state).counters.prefill_tokens == 10


def test_a_fork_without_an_idle_block_computes_the_partial_one_again():
    engine, parent = started(blocks=2, steps=2, prompt=range(4), length=7)
    fork = engine.fork(parent)
    engine.check()
    assert engine.state.sequences[fork].computed == 4 and not engine.state.copies
    engine.drain()
    assert engine.expected[fork] == engine.expected[parent]


def test_forks_of_forks_before_a_plan_copy_from_the_one_source():
    engine, parent = started()
    child = engine.fork(parent)
    engine.fork(child)
    engine.check()
    plan = engine.schedule()
    assert len(set(plan.copies[0].tolist())) == 1 and len(set(plan.copies[1].tolist())) == 2
    engine.drain()


def test_a_copy_into_a_dropped_block_is_dropped():
    engine, parent = started()
    engine.abort(engine.fork(parent))
    assert not engine.state.copies
    engine.check()


def test_truncate_goes_back_and_on():
    engine, seq_id = started(steps=8)
    full = list(engine.expected[seq_id])
    engine.schedule()
    engine.truncate(seq_id, 6)
    engine.check()
    plan = engine.schedule()
    assert plan.joins[0].length == 5 and plan.prefill_tokens.tolist() == full[5:6]
    engine.drain()
    assert engine.expected[seq_id][: len(full)] == full and len(engine.expected[seq_id]) == 23


def test_truncating_into_a_shared_block_copies_it():
    engine, parent = started(steps=8)
    fork = engine.fork(parent)
    engine.truncate(fork, 3)
    assert engine.state.sequences[fork].table[0] != engine.state.sequences[parent].table[0]
    engine.append(fork, [9, 9, 9])
    engine.check()
    engine.drain()


def test_truncate_below_the_prompt_shortens_it():
    engine, seq_id = started(prompt=range(7))
    engine.truncate(seq_id, 2)
    engine.drain()
    assert len(engine.expected[seq_id]) == 2 + 20


@pytest.mark.parametrize("most", [4, 30])
def test_truncate_keeps_the_bound_that_append_gave_the_turn(most):
    engine, seq_id = started()
    engine.append(seq_id, [5, 6], most)
    length = len(engine.expected[seq_id])
    for _ in range(3):
        engine.schedule()
        engine.commit()
    engine.truncate(seq_id, length + 1)
    engine.drain()
    assert len(engine.expected[seq_id]) == length + most


@pytest.mark.parametrize("length", [0, -1, 7, 2.0, True])
def test_truncate_checks_the_length(length, unchecked):
    engine, seq_id = started()
    with pytest.raises(ValueError, match=r"length=.* \[1, 6\], the known tokens of seq_id=0"):
        scheduler.truncate(engine.state, seq_id, length)


def test_append_to_a_running_sequence_begins_a_turn():
    engine, seq_id = started()
    engine.schedule()
    engine.append(seq_id, [5, 6], 3)
    engine.check()
    engine.drain()
    assert len(engine.expected[seq_id]) == 6 + 2 + 3


def test_append_to_a_kept_sequence_finds_its_own_blocks():
    engine, seq_id = started(most=6, steps=0)
    engine.drain()
    assert engine.reasons[seq_id] == "length" and scheduler.metrics(engine.state).kept == 1
    assert scheduler.metrics(engine.state).blocks_held == 0
    engine.append(seq_id, [5])
    engine.drain()
    assert engine.cached[seq_id] == 8 and len(engine.expected[seq_id]) == 3 + 6 + 1 + 6
    engine.append(seq_id, [], 2)
    engine.drain()
    assert len(engine.expected[seq_id]) == 18


def test_append_checks_what_can_fit(unchecked):
    engine, seq_id = started(length=16, most=4, steps=9)
    with pytest.raises(ValueError, match=r"17 tokens and could never run: at most 16 tokens"):
        scheduler.append(engine.state, seq_id, [1] * 10)
    with pytest.raises(ValueError, match="max_tokens=-1"):
        scheduler.append(engine.state, seq_id, [1], -1)
    with pytest.raises(TypeError, match=r"tokens\[0\]='a'"):
        scheduler.append(engine.state, seq_id, ["a"])


def test_a_kept_sequence_can_be_forked_and_cut_and_stays_ended():
    engine, seq_id = started(most=6, steps=0)
    engine.drain()
    fork = engine.fork(seq_id)
    engine.truncate(fork, 4)
    assert engine.schedule() is None and scheduler.metrics(engine.state).kept == 2
    engine.append(fork, [8], 2)
    engine.drain()
    assert engine.expected[fork][:5] == engine.expected[seq_id][:4] + [8] and len(engine.expected[fork]) == 7
    engine.abort(fork)
    engine.abort(seq_id)
    assert len(engine.state.sequences) == 0


def test_sequences_that_are_gone_are_named():
    engine, seq_id = started(most=2, steps=0)
    engine.drain()
    with pytest.raises(ValueError, match="has ended already, with reason 'length'"):
        scheduler.finish(engine.state, seq_id, "stop string")
    engine.abort(seq_id)
    for call in (scheduler.abort, scheduler.fork, scheduler.preempt, scheduler.park, scheduler.tokens):
        with pytest.raises(
            ValueError, match="seq_id=0 is not in this state: .* aborted, .* a state from before still has it"
        ):
            call(engine.state, seq_id)


def test_invalidate_forgets_blocks_and_recomputes():
    engine, first = started(prompt=range(9), steps=2)
    other = engine.add([7, 7], 5)
    engine.step()
    lost = engine.state.sequences[first].table[0]
    engine.invalidate([lost])
    engine.check()
    assert engine.state.sequences[first].row == -1 and engine.state.sequences[other].row >= 0
    assert all(entry.block != lost for _, entry in engine.state.pool.prefix.items())
    engine.drain()
    with pytest.raises(ValueError, match=r"blocks=\[-1, 100\] are not in this cache"):
        scheduler.invalidate(engine.state, [100, 5, -1])


def test_those_that_lost_blocks_wait_in_their_old_order():
    engine = make()
    ids = [engine.add([last], 9) for last in range(3)]
    engine.step()
    engine.invalidate([block for seq_id in ids for block in engine.state.sequences[seq_id].table])
    assert [join.seq_id for join in engine.schedule().joins] == ids


def test_invalidate_follows_a_copy_that_is_not_made_yet():
    engine, parent = started()
    fork = engine.fork(parent)
    engine.invalidate([engine.state.sequences[parent].table[-1]])
    assert not engine.state.copies and not engine.state.sequences[fork].table
    engine.check()
    engine.drain()


def test_park_keeps_the_blocks_and_joins_again():
    engine, seq_id = started()
    table = engine.state.sequences[seq_id].table
    engine.schedule()
    engine.state = scheduler.park(engine.state, seq_id)
    assert engine.schedule() is None, "it waits for its token in flight"
    engine.commit()
    plan = engine.schedule()
    assert plan.joins[0].block_table.tolist()[: len(table)] == list(table) and plan.query_lens.tolist() == [1]
    engine.drain()


def test_park_takes_all_and_keeps_their_order():
    engine = make()
    ids = [engine.add([last], 9) for last in range(3)]
    engine.step()
    engine.state = scheduler.park(engine.state)
    assert [join.seq_id for join in engine.schedule().joins] == ids
    engine.drain()


def test_waiting_forks_give_their_blocks_to_running_sequences():
    engine = make(blocks=6, size=2, seqs=1, length=12)
    parent = engine.add([1, 2, 3], 9)
    engine.step()
    engine.step()
    forks = [engine.fork(parent) for _ in range(3)]
    engine.check()
    engine.drain()
    assert all(engine.expected[fork] == engine.expected[parent] for fork in forks)


def test_no_function_changes_a_state():
    engine, seq_id = started(steps=5)
    engine.add([4, 5], 3)
    engine.schedule()
    before = engine.state
    text = scheduler.show(before)
    columns = [column for name, column in vars(before.rows).items() if name != "recent"] + [before.rows.recent.lines]
    copies = [column.copy() for column in columns]
    engine.fork(seq_id)
    engine.truncate(seq_id, 4)
    engine.drain(2)
    scheduler.check(before)
    assert scheduler.show(before) == text
    for column, copy in zip(columns, copies, strict=True):
        assert (column == copy).all() and not column.flags.writeable
    plan = engine.plans[0]
    with pytest.raises(ValueError):
        plan.rows[0] = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.running = 3


def test_the_same_events_replay_to_the_same_plans():
    def run():
        engine = make(blocks=7, size=2, seqs=3, budget=6)
        for last in range(6):
            engine.add([1, 2, 3, last], 6)
        engine.drain(2)
        return engine.plans

    for one, other in zip(run(), run(), strict=True):
        for field in dataclasses.fields(one):
            left, right = getattr(one, field.name), getattr(other, field.name)
            if isinstance(left, np.ndarray):
                assert left.dtype == right.dtype and (left == right).all()
            elif field.name in ("table_updates", "copies"):
                assert all((a == b).all() for a, b in zip(left, right, strict=True))


def test_two_continuations_of_one_state_do_not_meet():
    engine, seq_id = started()
    branches = [engine.copy() for _ in range(2)]
    branches[0].append(seq_id, [9], 4)
    branches[0].drain()
    branches[1].drain(2)
    assert branches[0].expected[seq_id][:7] == engine.expected[seq_id] + [9]
    assert branches[1].expected[seq_id][6] == next_token(engine.expected[seq_id], 0, 11)
    assert len(engine.expected[seq_id]) == 6


def test_request_copies_its_prompt(unchecked):
    prompt = [1, 2, 3]
    request = Request(prompt, 4)
    prompt[0] = 9
    assert request.prompt == (1, 2, 3)


def test_numbers_of_numpys_smallest_kind_count_as_what_they_are(unchecked):
    config = SchedulerConfig(100, 4, 8, 64, 256)
    request = Request(tuple(range(100)), np.int8(60), min_tokens=np.uint8(3), keep=True)
    state, seq_id = scheduler.add(scheduler.init(config), request)
    assert state.sequences[seq_id].limit == 160
    cut = scheduler.truncate(state, seq_id, np.uint8(80))
    assert scheduler.tokens(cut, seq_id) == tuple(range(80))
    more = scheduler.append(cut, seq_id, [1], max_tokens=np.int8(60))
    assert more.sequences[seq_id].limit == 141
