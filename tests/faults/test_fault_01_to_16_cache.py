"""Reported faults of prefix caches, preemption and block counts, tried on the whole engine."""

import dataclasses
import random

import pytest
import torch
from tiny_models import drain, greedy, plain_greedy, tiny

import fnllm
from fnllm import scheduler

SETTINGS = [{"prefix_cache": cache, "max_chunk": chunk} for cache in (True, False) for chunk in (1, 3, None)]
each_setting = pytest.mark.parametrize("setting", SETTINGS, ids=[str(list(one.values())) for one in SETTINGS])
PROMPT = [5, 6, 7, 9, 10, 11, 12, 3, 1, 2, 4, 8]


def make(setting, blocks=40, size=4, length=48, seqs=4, params=None, **options) -> fnllm.Engine:
    sizes = {"num_blocks": blocks, "block_size": size, "max_model_len": length, "max_num_seqs": seqs}
    return fnllm.engine(params or tiny(), **sizes, **setting, **options)


def outputs(engine: fnllm.Engine, prompts, count: int) -> tuple[fnllm.State, list[tuple[int, ...]]]:
    """New tokens of all prompts run together, with every invariant checked after each step."""
    state, ids = engine.init(), []
    for prompt in prompts:
        state, seq_id = fnllm.add(state, engine.request(prompt, greedy(count)))
        ids.append(seq_id)
    step = True
    while step is not None:
        state, step = engine.step(state)
        scheduler.check(state.scheduler)
    return state, [fnllm.tokens(state, seq_id)[len(prompt) :] for seq_id, prompt in zip(ids, prompts, strict=True)]


@each_setting
def test_fault_01_a_prompt_that_is_cached_whole(setting):
    options = {"num_blocks": 40, "block_size": 4, "max_model_len": 48, "max_num_seqs": 4, **setting}
    params = tiny(1)
    first, again = (fnllm.generate(params, PROMPT, greedy(3), **options)[0] for _ in range(2))
    assert first.token_ids == again.token_ids == plain_greedy(params, PROMPT, 3)
    assert first.cached_tokens == 0
    assert again.cached_tokens == (8 if setting["prefix_cache"] else 0), "the last block's last token has to be read"


@each_setting
def test_fault_03_few_blocks_say_what_many_say(setting):
    prompts = [[1, 2, last] for last in (3, 4, 5, 6)]
    few, tight = outputs(make(setting, blocks=7), prompts, 12)
    many, loose = outputs(make(setting, blocks=100), prompts, 12)
    assert tight == loose == [plain_greedy(tiny(), prompt, 12) for prompt in prompts]
    assert few.scheduler.counters.preemptions > 0 == many.scheduler.counters.preemptions


@each_setting
@pytest.mark.parametrize("length", [1, 4, 5, 9])
def test_fault_04_a_preemption_loses_no_token(setting, length):
    engine = make(setting)
    state, seq_id = fnllm.add(engine.init(), engine.request([5], greedy(12)))
    while len(fnllm.tokens(state, seq_id)) < length:
        state, _ = engine.step(state)
    state = dataclasses.replace(state, scheduler=scheduler.preempt(state.scheduler, seq_id))
    expected = plain_greedy(tiny(), [5], 12)
    assert fnllm.tokens(state, seq_id)[1:] == expected[: length - 1]
    while True:
        before = len(fnllm.tokens(state, seq_id))
        state, step = engine.step(state)
        if step is None:
            break
        grown = len(fnllm.tokens(state, seq_id)) - before
        assert grown == int(step.plan.samples.sum())
        assert fnllm.tokens(state, seq_id)[1:] == expected[: before + grown - 1]
    assert fnllm.tokens(state, seq_id)[1:] == expected


@each_setting
@pytest.mark.parametrize("length", [3, 4, 5, 8, 9])
def test_fault_05_blocks_held_are_those_of_the_computed_tokens(setting, length):
    engine = make(setting, length=64)
    state, seq_id = fnllm.add(engine.init(), engine.request(PROMPT[:length], greedy(20)))
    computed = 0
    while len(fnllm.tokens(state, seq_id)) < length + 7:
        state, step = engine.step(state)
        computed += int(step.plan.query_lens.sum())
        assert len(state.scheduler.sequences[seq_id].table) == scheduler.blocks_for(computed, 4) == -(-computed // 4)
        assert scheduler.metrics(state.scheduler).blocks_held == -(-computed // 4)


@each_setting
def test_fault_06_what_can_never_fit_is_refused_or_ends(setting):
    three, two = ({"num_blocks": n, "block_size": 4, "max_model_len": 64, **setting} for n in (3, 2))
    with pytest.raises(ValueError, match=r"20 tokens.*at most 12"):
        fnllm.generate(tiny(), list(range(20)), greedy(3), **three)
    one = fnllm.generate(tiny(), [5, 6, 7], greedy(50), **two)[0]
    assert (len(one.token_ids), one.finish_reason) == (5, "length")
    assert one.token_ids == plain_greedy(tiny(), [5, 6, 7], 5)


@pytest.mark.parametrize("size", [1, 3])
def test_fault_07_an_equal_prefix_published_in_between(size):
    """B's own copy of A's prefix is in its table when A's is published; then C comes."""
    engine = make({"prefix_cache": True, "max_chunk": 5}, blocks=60, size=size)
    shared = PROMPT[:9]
    a, b, c = [*shared, 20], [*shared, 21, 22], [*shared, 23]
    state, ids = engine.init(), []
    for prompt in (a, b, c):
        state, seq_id = fnllm.add(state, engine.request(prompt, greedy(4)))
        ids.append(seq_id)
        state, _ = engine.step(state)
        scheduler.check(state.scheduler)
    step = True
    while step is not None:
        state, step = engine.step(state)
        scheduler.check(state.scheduler)
    for seq_id, prompt in zip(ids, (a, b, c), strict=True):
        assert fnllm.tokens(state, seq_id)[len(prompt) :] == plain_greedy(tiny(), prompt, 4)


def test_fault_10_a_version_and_a_tag_of_one_name_do_not_meet():
    engine = make({})
    version = engine.machine.version_of(engine.params, engine.variant)
    state, cached = engine.init(), []
    for tag in (None, version, str(version), ("params", version), None):
        state, seq_id = fnllm.add(state, engine.request(PROMPT, greedy(1), cache_tag=tag))
        state, step = engine.step(state)
        cached += [count for _, count in step.events.cached]
        state = drain(engine, state)
    assert cached == [0, 0, 0, 0, 8], "only the first and the last are of one kind"


@each_setting
def test_fault_11_other_weights_never_meet_old_prefixes(setting):
    """One state, one workspace, two sets of weights in turn; nothing is reset by hand."""
    a = tiny(1)
    layers = list(a.tree["layers"])
    layers[1] = {name: torch.zeros_like(leaf) for name, leaf in layers[1].items()}
    b = a._replace(tree={**a.tree, "layers": layers})
    options = {"num_blocks": 40, "block_size": 4, "max_model_len": 48, "max_num_seqs": 4, **setting}
    expected = [plain_greedy(params, PROMPT, 5) for params in (a, b)]
    assert expected[0] != expected[1]
    found = [fnllm.generate(params, PROMPT, greedy(5), **options)[0] for params in (a, b, b, a)]
    assert [one.token_ids for one in found] == [expected[0], expected[1], expected[1], expected[0]]
    assert found[1].cached_tokens == 0
    assert found[2].cached_tokens == (8 if setting["prefix_cache"] else 0)


@each_setting
def test_fault_12_log_probabilities_of_a_prompt_that_is_cached(setting):
    options = {"num_blocks": 40, "block_size": 4, "max_model_len": 48, "max_num_seqs": 4, **setting}
    prompt = [*PROMPT, 13]
    wanted = fnllm.Sampling(temperature=0, max_tokens=2, prompt_logprobs=0)
    found = [fnllm.generate(tiny(), prompt, wanted, **options)[0].prompt_logprobs for _ in range(2)]
    assert len(found[0]) == 13 and found[0][0] is None
    assert found[0] == found[1], "computed anew each time, without the cache"
    torch.testing.assert_close(torch.tensor([one.logprob for one in found[0][1:]]), fnllm.score(tiny(), [prompt])[0])


@pytest.mark.parametrize("cache", [True, False])
def test_fault_14_heavy_eviction(cache):
    rng = random.Random(14)
    prompts = [[rng.choice((5, 6, 7)) for _ in range(rng.randrange(1, 14))] for _ in range(200)]
    options = {"num_blocks": 10, "block_size": 4, "max_model_len": 20, "max_num_seqs": 8, "prefix_cache": cache}
    done = fnllm.generate(tiny(), prompts, greedy(3), **options)
    loose = {**options, "num_blocks": 400, "max_num_seqs": 64, "prefix_cache": False}
    expected = fnllm.generate(tiny(), prompts, greedy(3), **loose)
    assert [one.token_ids for one in done] == [one.token_ids for one in expected]
    if cache:
        state = fnllm.engine(tiny(), **options).machine.idle
        assert scheduler.metrics(state.scheduler).evictions > 0
        scheduler.check(state.scheduler)


@each_setting
def test_fault_16_equal_prompts_of_one_call(setting):
    options = {"num_blocks": 40, "block_size": 4, "max_model_len": 48, "max_num_seqs": 4, **setting}
    done = fnllm.generate(tiny(16), [PROMPT, PROMPT], greedy(4), **options)
    assert done[0].token_ids == done[1].token_ids == plain_greedy(tiny(16), PROMPT, 4)
    shared = 8 if setting["prefix_cache"] else 0
    assert [one.cached_tokens for one in done] in ([0, shared], [shared, shared])


@each_setting
def test_fault_91_a_fork_in_the_middle_of_a_block(setting):
    """Fork after 6 tokens (block 4), two branches, one is dropped: the other goes on as if alone."""
    engine = make(setting)
    state, parent = fnllm.add(engine.init(), engine.request(PROMPT[:3], greedy(12)))
    while len(fnllm.tokens(state, parent)) < 6:
        state, _ = engine.step(state)
    state, child = fnllm.fork(state, parent)
    told = fnllm.append(state, child, [20])
    told, _ = engine.step(told)
    scheduler.check(told.scheduler)
    tables = [told.scheduler.sequences[one].table for one in (parent, child)]
    assert tables[0][0] == tables[1][0] and tables[0][1] != tables[1][1], "the full block is shared, the other copied"
    dropped = drain(engine, fnllm.abort(told, parent))
    scheduler.check(dropped.scheduler)
    text = fnllm.tokens(dropped, child)
    assert text[7:] == plain_greedy(tiny(), text[:7], 12) and text[6] == 20
    kept = drain(engine, fnllm.abort(told, child))
    assert fnllm.tokens(kept, parent)[3:] == plain_greedy(tiny(), PROMPT[:3], 12)
