"""States as values: every edit gives a new state and leaves the old one unchanged."""

import dataclasses

import pytest
from tiny_models import GREEDY, drain, plain_greedy, tiny

import fnllm
from fnllm import scheduler

SMALL = {"max_model_len": 40, "max_num_seqs": 3, "block_size": 4, "num_blocks": 20}
SHORT = dataclasses.replace(GREEDY, max_tokens=10)
PROMPT = [5, 6, 7, 9, 10]


@pytest.fixture
def running() -> tuple[fnllm.Engine, fnllm.State, int]:
    """An engine, a state with one sequence of 5 + 3 tokens, and its id."""
    engine = fnllm.engine(tiny(), **SMALL)
    state, seq_id = fnllm.add(engine.init(), engine.request(PROMPT, SHORT))
    for _ in range(3):
        state, _ = engine.step(state)
    return engine, state, seq_id


def test_a_state_cannot_be_assigned_to(running):
    _, state, _ = running
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.clock = 3


@pytest.mark.parametrize(
    "edit",
    [
        lambda state, seq_id: fnllm.fork(state, seq_id)[0],
        lambda state, seq_id: fnllm.append(state, seq_id, [1, 2]),
        lambda state, seq_id: fnllm.truncate(state, seq_id, 2),
        lambda state, seq_id: fnllm.finish(state, seq_id, "enough"),
        lambda state, seq_id: fnllm.abort(state, seq_id),
    ],
    ids=["fork", "append", "truncate", "finish", "abort"],
)
def test_an_edit_leaves_the_state_it_came_from(running, edit):
    engine, state, seq_id = running
    shown, known = fnllm.show(state), fnllm.tokens(state, seq_id)
    edited = edit(state, seq_id)
    scheduler.check(edited.scheduler)
    drain(engine, edited)
    assert (fnllm.show(state), fnllm.tokens(state, seq_id)) == (shown, known)
    assert fnllm.tokens(drain(engine, state), seq_id)[5:] == plain_greedy(tiny(), PROMPT, 10)


def test_edits_of_a_state_that_is_drained_in_between(running):
    """Two branches of one sequence: one is dropped, the other is cut back and told something else."""
    engine, state, seq_id = running
    state, branch = fnllm.fork(state, seq_id)
    state, _ = engine.step(state)
    state = fnllm.abort(state, seq_id)
    state = fnllm.append(fnllm.truncate(state, branch, 6), branch, [11, 12, 13])
    told = fnllm.tokens(state, branch)
    assert told[6:] == (11, 12, 13) and told[:5] == tuple(PROMPT)
    state = drain(engine, state)
    assert fnllm.tokens(state, branch)[9:] == plain_greedy(tiny(), told, 10)


def test_a_finished_sequence_stays_addressable_and_an_aborted_one_does_not(running):
    engine, state, seq_id = running
    ended = fnllm.finish(state, seq_id, "enough")
    assert fnllm.tokens(ended, seq_id) == fnllm.tokens(state, seq_id)
    assert engine.step(ended)[1] is None
    with pytest.raises(ValueError, match="ended already"):
        fnllm.finish(ended, seq_id, "again")
    gone = fnllm.abort(state, seq_id)
    for use in (fnllm.tokens, fnllm.fork, fnllm.abort):
        with pytest.raises(ValueError, match=str(seq_id)):
            use(gone, seq_id)


@pytest.mark.parametrize("length", [0, -1, 9, 2.5, True])
def test_a_wrong_length_is_named(running, length):
    _, state, seq_id = running
    with pytest.raises((TypeError, ValueError), match="length"):  # under shape checking the signature refuses it
        fnllm.truncate(state, seq_id, length)


def test_ids_count_on_and_never_come_back(running):
    engine, state, seq_id = running
    gone = fnllm.abort(state, seq_id)
    _, new = fnllm.add(gone, engine.request(PROMPT, SHORT))
    assert new > seq_id


def test_show_names_sequences_and_shared_blocks(running):
    _, state, seq_id = running
    state, child = fnllm.fork(state, seq_id)
    text = fnllm.show(state)
    assert str(seq_id) in text and str(child) in text and len(text.splitlines()) >= 2


@pytest.mark.parametrize("known", [8, 9, 10, 11, 12, 13])
def test_a_fork_holds_no_more_than_it_must(known):
    """Full blocks are shared, the partial one is copied; both branches say what one alone says."""
    engine = fnllm.engine(tiny(), **SMALL)
    state, seq_id = fnllm.add(engine.init(), engine.request(PROMPT, SHORT))
    while len(fnllm.tokens(state, seq_id)) < known:
        state, _ = engine.step(state)
    state, child = fnllm.fork(state, seq_id)
    state, _ = engine.step(state)
    tables = [state.scheduler.sequences[one].table for one in (seq_id, child)]
    shared = len(set(tables[0]) & set(tables[1]))
    assert shared in ((known - 1) // 4, known // 4)
    state = drain(engine, state)
    expected = plain_greedy(tiny(), PROMPT, 10)
    assert fnllm.tokens(state, seq_id)[5:] == fnllm.tokens(state, child)[5:] == expected
