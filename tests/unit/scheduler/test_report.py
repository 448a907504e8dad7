"""A state for human eyes, `show` and `metrics`, and for machines, `check`: each says what is so and what is wrong."""

import dataclasses

import pytest
from unit.scheduler.simulator import make, started

from fnllm import scheduler


def test_tokens_and_show_and_metrics():
    engine, seq_id = started(steps=4, prompt=range(6))
    engine.fork(seq_id)
    engine.schedule()
    assert scheduler.tokens(engine.state, seq_id) == tuple(engine.expected[seq_id])
    text = scheduler.show(engine.state)
    assert "seq 0 [row 0] 10 tokens + 1 in flight, 10 computed: 0x2* 1x2* 2" in text
    assert "cached-only," not in text and "copies" not in text
    assert "shared by 0, 1: blocks 0, 1" in text and "4 held + 0 cached-only + 96 free = 100" in text
    now = scheduler.metrics(engine.state)
    assert (now.running, now.waiting, now.kept, now.in_flight) == (2, 0, 0, 1)
    assert (now.blocks_held, now.blocks_cached, now.blocks_free) == (4, 0, 96)
    assert (now.counters.prefill_tokens, now.counters.decode_tokens, now.counters.accepted_tokens) == (7, 4, 4)
    assert (now.counters.cached_tokens, now.counters.preemptions, now.counters.finished) == (0, 0, 0)


def test_show_has_a_line_for_everything():
    engine = make(blocks=12, size=2)
    engine.add([1] * 5, 0)
    kept = engine.add([2], 1, keep=True)
    engine.drain()
    running = engine.add([3, 4], 5)
    engine.step()
    assert scheduler.show(engine.state) == (
        "plan 2, 0 in flight; 1 running, 0 waiting, 1 kept\n"
        "blocks of 2: 1 held + 2 cached-only + 9 free = 12; length limit 24\n"
        f"  seq {running} [row 0] 3 tokens, 2 computed: 3*\n"
        f"  seq {kept} [kept (length)] 2 tokens, 0 computed: -\n"
        "cached-only, next to be evicted first: 1 0"
    )
    engine.step()
    fork = engine.fork(running)
    assert scheduler.show(engine.state).splitlines()[2:] == [
        f"  seq {running} [row 0] 4 tokens, 3 computed: 3x2* 2",
        f"  seq {fork} [waiting] 4 tokens, 3 computed: 3x2* 4~",
        f"  seq {kept} [kept (length)] 2 tokens, 0 computed: -",
        f"shared by {running}, {fork}: blocks 3",
        "cached-only, next to be evicted first: 1 0",
        "copies: 2 to 4",
    ]
    now = scheduler.metrics(engine.state)
    assert (now.running, now.waiting, now.kept) == (1, 1, 1)


def test_check_finds_a_broken_state():
    engine, _ = started(prompt=range(9))
    state, pool = engine.state, engine.state.pool
    broken = [
        dataclasses.replace(state, running=3),
        dataclasses.replace(state, waiting=scheduler.line.push_back(state.waiting, [0])),
        dataclasses.replace(state, pool=dataclasses.replace(pool, fresh=1)),
        dataclasses.replace(state, pool=dataclasses.replace(pool, blocks=pool.blocks.set(0, pool.blocks[1]))),
        dataclasses.replace(state, pool=dataclasses.replace(pool, prefix=pool.prefix.delete(pool.blocks[0].key))),
        dataclasses.replace(state, copies=((1, 2), (2, 3))),
        dataclasses.replace(state, sequences=state.sequences.delete(0)),
    ]
    scheduler.check(state)
    for wrong in broken:
        with pytest.raises((AssertionError, KeyError)):
            scheduler.check(wrong)


def test_check_finds_what_is_wrong_with_one_sequence():
    engine, parent = started(prompt=range(9), budget=13)
    late = engine.add(range(5, 30), 4)
    engine.step()  # a first chunk of the late one
    fork = engine.fork(parent)
    state, pool = engine.state, engine.state.pool
    scheduler.check(state)
    rows, record = state.rows, state.sequences[parent]

    def with_row(name, value):
        column = getattr(rows, name).copy()
        column[record.row] = value
        return dataclasses.replace(state, rows=dataclasses.replace(rows, **{name: column}), roster=None)

    def with_record(seq_id, **changes):
        changed = dataclasses.replace(state.sequences[seq_id], **changes)
        return dataclasses.replace(state, sequences=state.sequences.set(seq_id, changed))

    def with_pool(**changes):
        return dataclasses.replace(state, pool=dataclasses.replace(pool, **changes))

    forked, key = state.sequences[fork], pool.blocks[record.table[1]].key
    wrong = {
        "tokens in no place": with_row("known", 4),
        "another limit": with_row("limit", 25),
        "a row of a later plan": with_row("joined", state.next_step),
        "a filled block too few": with_row("filled", 1),
        "neither decoding nor prefilling": with_row("decoding", False),
        "computed and without a block": with_row("computed", 17),
        "a short block": with_record(fork, blocks=(b"1234", *forked.blocks[1:])),
        "a full tail": with_record(fork, tail=bytes(16)),
        "nothing to compute": with_record(fork, computed=len(scheduler.tokens(state, fork))),
        "fewer than no tokens in flight": with_record(fork, pending=-1),
        "a prompt that is not there": with_record(fork, prompt_len=100),
        "a filled block without its number": with_record(fork, numbers=forked.numbers[:-1]),
        "a row that is another's": with_record(parent, row=7),
        "prefilling in disorder": dataclasses.replace(state, prefilling=(late, late)),
        "prefilling and not running": dataclasses.replace(state, prefilling=(late, fork)),
        "waiting with blocks and not noted": dataclasses.replace(state, warm=state.warm.delete(fork)),
        "committed and not planned": dataclasses.replace(state, next_commit=state.next_step + 1),
        "numbers given out twice": with_pool(next_number=max(entry.number for _, entry in pool.prefix.items())),
        "one number for two prefixes": with_record(parent, numbers=(record.numbers[0],) * len(record.numbers)),
        "another prefix's number": with_pool(prefix=pool.prefix.set(key, pool.prefix[key]._replace(number=0))),
        "ready and being computed": with_pool(prefix=pool.prefix.set(key, pool.prefix[key]._replace(owner=parent))),
    }
    unseen = []
    for name, broken in wrong.items():
        try:
            scheduler.check(broken)
        except AssertionError:
            continue
        unseen.append(name)
    assert not unseen
