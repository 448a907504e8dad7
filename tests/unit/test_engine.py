"""The engine's step loop: the same tokens as `generate`, from any state, in any order."""

import dataclasses

import numpy as np
import pytest
import torch
from tiny_models import GREEDY, drain, plain_greedy, speller, tiny

import fnllm
from fnllm import scheduler

SMALL = {"max_model_len": 40, "max_num_seqs": 4, "block_size": 4, "num_blocks": 30}
PROMPTS = [[5, 6, 7], [8], [5, 6, 7, 9, 10, 11, 12], [3, 1, 2, 4]]
SHORT = dataclasses.replace(GREEDY, max_tokens=9)


def start(engine: fnllm.Engine, prompts, sampling=SHORT) -> tuple[fnllm.State, list[int]]:
    state, ids = engine.init(), []
    for prompt in prompts:
        state, seq_id = fnllm.add(state, engine.request(prompt, sampling))
        ids.append(seq_id)
    return state, ids


def advance(engine: fnllm.Engine, state: fnllm.State, steps: int) -> fnllm.State:
    for _ in range(steps):
        state, _ = engine.step(state)
    return state


def outputs(state: fnllm.State, ids, prompts) -> list[tuple[int, ...]]:
    return [fnllm.tokens(state, seq_id)[len(prompt) :] for seq_id, prompt in zip(ids, prompts, strict=True)]


def test_a_loop_of_steps_is_generate():
    engine = fnllm.engine(tiny(), **SMALL)
    state, ids = start(engine, PROMPTS)
    tokens: dict[int, list[int]] = {seq_id: [] for seq_id in ids}
    ends = {}
    while True:
        state, step = engine.step(state)
        if step is None:
            break
        for seq_id, token in zip(step.events.seq_ids.tolist(), step.events.tokens.tolist(), strict=True):
            tokens[seq_id].append(token)
        ends.update({end.seq_id: end.reason for end in step.events.finished})
    done = fnllm.generate(tiny(), PROMPTS, SHORT, **SMALL)
    assert [tuple(tokens[seq_id]) for seq_id in ids] == [one.token_ids for one in done]
    assert outputs(state, ids, PROMPTS) == [one.token_ids for one in done]
    assert ends == dict.fromkeys(ids, "length")
    assert engine.step(state)[1] is None, "nothing is left to do"


def test_engines_of_equal_options_share_their_machine():
    params = tiny(1)
    one, two = fnllm.engine(params, **SMALL), fnllm.engine(params, **SMALL)
    assert one.machine is two.machine
    assert fnllm.engine(params, **{**SMALL, "num_blocks": 29}).machine is not one.machine
    assert fnllm.engine(params, layers=fnllm.Layers(), **SMALL).machine is one.machine


def test_a_step_changes_no_state_that_was_there_before():
    engine = fnllm.engine(tiny(), **SMALL)
    state, ids = start(engine, PROMPTS)
    state = advance(engine, state, 3)
    before, shown = [fnllm.tokens(state, seq_id) for seq_id in ids], fnllm.show(state)
    later = drain(engine, state)
    assert [fnllm.tokens(state, seq_id) for seq_id in ids] == before
    assert fnllm.show(state) == shown
    assert all(len(fnllm.tokens(later, seq_id)) > len(old) for seq_id, old in zip(ids, before, strict=True))


@pytest.mark.parametrize("steps", [0, 1, 3, 6])
@pytest.mark.parametrize("cache", [True, False])
def test_two_futures_of_one_snapshot_do_not_meet(steps, cache):
    """A goes on, then B with other tokens from the same state, then A again from there: each as if alone."""
    engine = fnllm.engine(tiny(), **SMALL, prefix_cache=cache)
    snapshot, ids = start(engine, PROMPTS[:3])
    snapshot = advance(engine, snapshot, steps)
    a = advance(engine, snapshot, 2)
    b = snapshot
    for seq_id in ids:
        b = fnllm.append(b, seq_id, [20, 21])
    known = [fnllm.tokens(b, seq_id) for seq_id in ids]
    b = advance(engine, b, 3)
    a = advance(engine, a, 1)
    c, c_id = fnllm.add(snapshot, engine.request(PROMPTS[3], SHORT))
    c = advance(engine, c, 2)
    b = drain(engine, b)
    a = drain(engine, a)
    c = drain(engine, c)
    again = drain(engine, snapshot)
    expected = [plain_greedy(tiny(), prompt, 9) for prompt in PROMPTS]
    assert outputs(a, ids, PROMPTS[:3]) == outputs(again, ids, PROMPTS[:3]) == expected[:3]
    assert outputs(c, [*ids, c_id], PROMPTS) == expected
    assert outputs(b, ids, known) == [plain_greedy(tiny(), text, 9) for text in known]


def test_a_snapshot_outlives_many_other_runs():
    engine = fnllm.engine(tiny(), **{**SMALL, "num_blocks": 12})
    snapshot, ids = start(engine, PROMPTS[:2])
    snapshot = advance(engine, snapshot, 4)
    for first in range(6):
        other, _ = start(engine, [[first + index, 9, 9, 8, first] for index in range(4)])
        drain(engine, other)
    fnllm.generate(tiny(), PROMPTS, SHORT, **{**SMALL, "num_blocks": 12})
    assert outputs(drain(engine, snapshot), ids, PROMPTS[:2]) == [plain_greedy(tiny(), p, 9) for p in PROMPTS[:2]]


def test_forks_with_seeds_of_their_own_go_apart_and_repeat():
    engine = fnllm.engine(tiny(), **SMALL)
    drawn = fnllm.Sampling(temperature=2, max_tokens=9, ignore_eos=True, seed=5)
    state, (parent,) = start(engine, [PROMPTS[2]], drawn)
    state = advance(engine, state, 3)
    state, child = fnllm.fork(state, parent)
    state = drain(engine, state)
    assert fnllm.tokens(state, parent) == fnllm.tokens(state, child), "equal seed, equal positions, equal noise"


def test_a_kept_sequence_goes_on_after_append():
    """A chat: what was said stays, a new turn is added, and its prefix is found in the cache."""
    engine = fnllm.engine(tiny(), **SMALL)
    state, (seq_id,) = start(engine, [PROMPTS[2]])
    state = drain(engine, state)
    text = fnllm.tokens(state, seq_id)
    state = fnllm.append(state, seq_id, [4, 5])
    state, step = engine.step(state)
    assert step.events.cached == ((seq_id, 12),), "three full blocks of 16 known tokens"
    state = drain(engine, state)
    assert fnllm.tokens(state, seq_id)[18:] == plain_greedy(tiny(), [*text, 4, 5], 9)


def test_an_appended_turn_counts_its_own_tokens():
    """What was said before is the prompt of the new turn: for min_tokens and for penalties on what was drawn."""
    params = speller((3, 1, 2, 4, 5, 6, 1))  # ... ab cd e end
    engine = fnllm.engine(params, **SMALL)
    setting = fnllm.Sampling(temperature=0, max_tokens=4, min_tokens=4)
    state, (seq_id,) = start(engine, [[4]], setting)
    state = drain(engine, state)
    told = fnllm.tokens(state, seq_id) + (4,)
    state = drain(engine, fnllm.append(state, seq_id, [4]))
    assert fnllm.tokens(state, seq_id)[len(told) :] == fnllm.generate(params, list(told), setting, **SMALL)[0].token_ids
    penalised = fnllm.Sampling(temperature=0, max_tokens=4, frequency_penalty=0.7, repetition_penalty=1.2)
    engine = fnllm.engine(tiny(), **SMALL)
    state, (seq_id,) = start(engine, PROMPTS[:1], penalised)
    state = advance(engine, state, 2)
    told = fnllm.tokens(state, seq_id) + (9,)
    state = drain(engine, fnllm.append(state, seq_id, [9]))
    alone = fnllm.generate(tiny(), list(told), penalised, **SMALL)[0].token_ids
    assert fnllm.tokens(state, seq_id)[len(told) :] == alone


def test_truncate_goes_back_and_says_the_same_again():
    engine = fnllm.engine(tiny(), **SMALL)
    state, (seq_id,) = start(engine, [PROMPTS[2]])
    state = advance(engine, state, 6)
    whole = fnllm.tokens(drain(engine, state), seq_id)
    for length in (12, 9, 7):
        cut = fnllm.truncate(state, seq_id, length)
        assert fnllm.tokens(cut, seq_id) == whole[:length]
        assert fnllm.tokens(drain(engine, cut), seq_id) == whole
    cut = drain(engine, fnllm.truncate(state, seq_id, 3))
    assert fnllm.tokens(cut, seq_id) == (*whole[:3], *plain_greedy(tiny(), whole[:3], 9)), "a shorter prompt"


def test_a_state_of_other_layers_is_refused():
    engine = fnllm.engine(tiny(), **SMALL)
    other = fnllm.engine(tiny(), layers=fnllm.Layers()._replace(mlp=lambda p, x, ctx: x * 0), **SMALL)
    state, _ = start(engine, PROMPTS[:1])
    with pytest.raises(ValueError, match="other layers"):
        other.step(state)


def test_requests_and_states_of_another_model_are_refused():
    engine, wide = fnllm.engine(tiny(), **SMALL), fnllm.engine(tiny(vocab_size=57), **SMALL)
    with pytest.raises(
        ValueError, match="prompt: token id 50 at position 1 is outside the vocabulary: ids are 0 to 40"
    ):
        fnllm.add(engine.init(), wide.request([3, 50], SHORT))
    state, _ = start(wide, PROMPTS[:1])
    running, _ = wide.step(state)
    for one in (state, running):
        for go_on in (engine.step, engine.launch, engine.recover):
            with pytest.raises(ValueError, match="state belongs to an engine of another model.*vocab_size=57.*=41"):
                go_on(one)
    same = fnllm.engine(tiny()._replace(workspace={}), **SMALL)
    state, (seq_id,) = start(engine, PROMPTS[:1])
    state, _ = engine.step(state)
    assert fnllm.tokens(drain(same, state), seq_id) == fnllm.tokens(drain(engine, state), seq_id)


def test_swapped_layers_and_tags_share_no_prefix():
    engine = fnllm.engine(tiny(), **SMALL)
    state = engine.init()
    cached = []
    for tag in (None, "a", None, "a", "b"):
        state, seq_id = fnllm.add(state, engine.request(PROMPTS[2], SHORT, cache_tag=tag))
        state, step = engine.step(state)
        cached += step.events.cached
        state = fnllm.abort(drain(engine, state), seq_id)
    assert [count for _, count in cached] == [0, 0, 4, 4, 0]


def test_weights_changed_in_place_are_noticed():
    params = tiny(2)
    engine = fnllm.engine(params, **SMALL)
    state, (first,) = start(engine, [PROMPTS[2]])
    state = drain(engine, state)
    before = params.tree["layers"][1]["o"].clone()
    with torch.no_grad():
        params.tree["layers"][1]["o"].mul_(-1)
        state, second = fnllm.add(state, engine.request(PROMPTS[2], SHORT))
        state = drain(engine, state)
        changed = plain_greedy(params, PROMPTS[2], 9)
        params.tree["layers"][1]["o"].copy_(before)
    assert fnllm.tokens(state, second)[7:] == changed != fnllm.tokens(state, first)[7:]


def test_weights_changed_reaches_an_engine_whose_params_know_none():
    params = tiny(22)._replace(workspace=None)
    engine, weight = fnllm.engine(params, **SMALL), params.tree["layers"][1]["o"]
    state, _ = start(engine, [PROMPTS[2]])
    state = drain(engine, state)
    before = weight.clone()
    weight.data.mul_(-1)
    with pytest.raises(ValueError, match="give weights_changed the engine"):
        fnllm.weights_changed(params)
    fnllm.weights_changed(engine)
    state, second = fnllm.add(state, engine.request(PROMPTS[2], SHORT))
    state = drain(engine, state)
    wanted = plain_greedy(params, PROMPTS[2], 9)
    weight.data.copy_(before)
    assert fnllm.tokens(state, second)[len(PROMPTS[2]) :] == wanted


@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 1}], ids=["", "one row"])
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("done_before", ["nothing", "request", "add", "an earlier turn"])
def test_fault_11_a_request_is_computed_with_the_weights_of_its_first_block(done_before, told, options):
    """Whatever was done with it before they changed, it finds no prefix of the older ones."""
    params = tiny(22)._replace(workspace={})
    engine, sampling = fnllm.engine(params, **{**SMALL, **options}), dataclasses.replace(SHORT, max_tokens=2)
    state, (first,) = start(engine, [PROMPTS[2]], sampling)
    state = drain(engine, state)
    request = engine.request(PROMPTS[2], sampling)
    if done_before == "add":
        state, second = fnllm.add(state, request)
    weight = params.tree["layers"][1]["o"]
    before = weight.clone()
    with torch.no_grad():
        (weight.data if told else weight).mul_(-1)
        if told:
            fnllm.weights_changed(params)
        if done_before == "an earlier turn":
            second, state = first, fnllm.append(state, first, [9])
        elif done_before != "add":
            request = engine.request(PROMPTS[2], sampling) if done_before == "nothing" else request
            state, second = fnllm.add(state, request)
        text = fnllm.tokens(state, second)
        state, step = engine.step(state)
        state = drain(engine, state)
        wanted = plain_greedy(params, text, 2)
        weight.copy_(before)
    assert step.events.cached == ((second, 0),)
    assert fnllm.tokens(state, second)[len(text) :] == wanted
    scheduler.check(state.scheduler)


def test_preempted_sequences_are_computed_anew_with_the_weights_there_are():
    """What they find then was computed with those, and what is found of them later too."""
    params = tiny(23)._replace(workspace={})
    engine = fnllm.engine(params, **SMALL)
    state, (first,) = start(engine, [PROMPTS[2]])
    state = advance(engine, state, 3)
    with torch.no_grad():
        params.tree["layers"][1]["o"].mul_(-1)
    state = dataclasses.replace(state, scheduler=scheduler.preempt(state.scheduler, first))
    known = fnllm.tokens(state, first)
    state = drain(engine, state)
    assert fnllm.tokens(state, first) == (*known, *plain_greedy(params, known, 16 - len(known)))
    state, second = fnllm.add(state, engine.request(PROMPTS[2], SHORT))
    state, step = engine.step(state)
    assert step.events.cached == ((second, 4),)
    assert fnllm.tokens(drain(engine, state), second)[7:] == plain_greedy(params, PROMPTS[2], 9)


def test_what_an_engine_is_asked_wrongly_is_named():
    engine = fnllm.engine(tiny(), **SMALL)
    with pytest.raises(ValueError, match="empty"):
        engine.request([], SHORT)
    with pytest.raises(ValueError, match="41.*at most 40"):
        fnllm.add(engine.init(), engine.request(range(41), SHORT))
    with pytest.raises(TypeError, match="max_num_seqs"):
        fnllm.engine(tiny(), max_num_seq=3)


def test_a_state_takes_the_results_of_its_own_steps_alone_each_once_and_in_their_order():
    engine, elsewhere = (fnllm.engine(params, **SMALL) for params in (tiny(), tiny(seed=1)))
    states = [start(one, [prompt])[0] for one, prompt in zip((engine, engine, elsewhere), PROMPTS, strict=False)]
    launched = [one.launch(state) for one, state in zip((engine, engine, elsewhere), states, strict=True)]
    (state, flight), *others = launched
    for stranger in (states[0], *(other for other, _ in others)):  # all are at their first step
        with pytest.raises(ValueError, match="flight is not the next of the [01] that this state waits for"):
            engine.collect(stranger, flight)
    state, flight = engine.launch(states[0])
    later, second = engine.launch(state)
    with pytest.raises(ValueError, match="not the next of the 2"):
        engine.collect(later, second)
    for waiting in (state, later):  # a state is a value: each of both may take it
        done, _ = engine.collect(waiting, flight)
        with pytest.raises(ValueError, match="not the next of the [01]"):
            engine.collect(done, flight)


@pytest.mark.parametrize("bad", [[41], [-1], [3, 2**40]])
def test_ids_outside_the_vocabulary_never_reach_the_device(bad):
    engine = fnllm.engine(tiny(), **SMALL)
    with pytest.raises(ValueError, match=str(bad[-1])):
        fnllm.add(engine.init(), engine.request(bad, SHORT))
    state, (seq_id,) = start(engine, PROMPTS[:1])
    with pytest.raises(ValueError, match=str(bad[-1])):
        fnllm.append(state, seq_id, bad)


@pytest.mark.parametrize("cache", [True, False])
def test_a_step_launched_before_the_last_one_is_read(cache):
    """As on a GPU: one plan in flight, through joins, ends, preemption and edits between steps."""
    engine = fnllm.engine(tiny(), **{**SMALL, "num_blocks": 11}, prefix_cache=cache)
    state, ids = start(engine, PROMPTS)
    flight = None
    for _ in range(200):
        state, launched = engine.launch(state)
        if flight is not None:
            state, _ = engine.collect(state, flight)
        elif launched is None:
            break
        flight = launched
        scheduler.check(state.scheduler)
    assert outputs(state, ids, PROMPTS) == [plain_greedy(tiny(), prompt, 9) for prompt in PROMPTS]
    assert state.scheduler.counters.preemptions > 0


def test_results_of_a_step_stay_when_others_follow():
    engine = fnllm.engine(tiny(), capture="logits", **SMALL)
    state, ids = start(engine, PROMPTS[:1])
    steps = []
    while True:
        state, step = engine.step(state)
        if step is None:
            break
        steps.append((step, step.results.ids.clone(), step.results.captured["logits"].clone()))
    assert len(steps) == 9
    for step, drawn, logits in steps:
        assert torch.equal(step.results.ids, drawn) and torch.equal(step.results.captured["logits"], logits)
        assert int(logits[-1].argmax()) == int(drawn[0])


def test_plans_are_numbers_that_no_step_changes():
    engine = fnllm.engine(tiny(), **SMALL)
    state, _ = start(engine, PROMPTS)
    state, step = engine.step(state)
    kept = [np.array(field) for field in (step.plan.rows, step.plan.seq_ids, step.plan.starts)]
    drain(engine, state)
    for old, field in zip(kept, (step.plan.rows, step.plan.seq_ids, step.plan.starts), strict=True):
        assert np.array_equal(old, field)
