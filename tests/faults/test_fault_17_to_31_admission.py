"""Reported faults of admission, limits and scheduling, through `generate`."""

import pytest
from tiny_models import greedy, plain_greedy, speller, tiny

import fnllm
from fnllm import scheduler

SETTINGS = [{"prefix_cache": cache, "max_chunk": chunk} for cache in (True, False) for chunk in (1, 3, None)]
each_setting = pytest.mark.parametrize("setting", SETTINGS, ids=[str(list(one.values())) for one in SETTINGS])
GOOD = [[5, 6, 7], [8, 9]]
SIZES = {"num_blocks": 20, "block_size": 4, "max_num_seqs": 4}


@each_setting
def test_fault_17_no_new_token_and_wrong_counts(setting):
    done = fnllm.generate(tiny(), GOOD, [greedy(0), greedy(2)], **SIZES, **setting)
    assert [one.token_ids for one in done] == [(), plain_greedy(tiny(), GOOD[1], 2)]
    for wrong in (-2, 2.5, "3", None):
        with pytest.raises((TypeError, ValueError), match="max_tokens"):
            fnllm.generate(tiny(), GOOD, fnllm.Sampling(max_tokens=wrong), **SIZES)


def test_fault_18_an_empty_prompt_among_good_ones():
    params = speller((3, 1, 2, 4, 5, 6, 3))
    for empty in ([], ""):
        with pytest.raises(ValueError, match=r"prompts\[1\].*empty"):
            fnllm.generate(params, ["x", empty, "ab"], greedy(3), **SIZES)
        done = fnllm.generate(params, ["x", empty, "ab"], greedy(3), errors="return", **SIZES)
        assert [one.text for one in done] == ["abcde", "", "cdex"] and "empty" in str(done[1].error)


def test_fault_19_scoring_alone():
    ids = [5, 9, 2]
    assert fnllm.score(tiny(), [ids])[0].shape == (2,)
    one = fnllm.generate(tiny(), ids, fnllm.Sampling(max_tokens=0, prompt_logprobs=0), **SIZES)[0]
    assert len(one.prompt_logprobs) == 3 and one.token_ids == ()


@each_setting
@pytest.mark.parametrize(("length", "new"), [(14, 2), (15, 1), (16, 0), (6, 10)])
def test_fault_20_decoding_ends_at_the_longest_length(setting, length, new):
    prompt = [5 + index % 7 for index in range(length)]
    one = fnllm.generate(tiny(), prompt, greedy(10), max_model_len=16, **SIZES, **setting)[0]
    assert one.token_ids == plain_greedy(tiny(), prompt, new) and one.finish_reason == "length"


@each_setting
def test_fault_21_the_cache_s_limit_is_the_effective_one(setting):
    options = {"num_blocks": 3, "block_size": 4, "max_num_seqs": 4, "max_model_len": 64, **setting}
    prompt = list(range(5, 18))
    done = fnllm.generate(tiny(), [prompt[:11], prompt[:12]], greedy(5), **options)
    assert [len(one.token_ids) for one in done] == [1, 0]
    with pytest.raises(ValueError, match="13 tokens.*at most 12"):
        fnllm.generate(tiny(), prompt, greedy(5), **options)
    assert scheduler.length_limit(fnllm.engine(tiny(), **options).limits) == 12


@pytest.mark.parametrize("cache", [True, False])
def test_fault_23_without_chunks_a_prompt_beyond_the_budget_is_refused(cache):
    options = {**SIZES, "max_num_batched_tokens": 8, "chunked_prefill": False, "prefix_cache": cache}
    assert fnllm.generate(tiny(), list(range(8)), greedy(3), **options)[0].token_ids == plain_greedy(
        tiny(), list(range(8)), 3
    )
    with pytest.raises(ValueError, match="9 tokens.*at most 8"):
        fnllm.generate(tiny(), list(range(9)), greedy(3), **options)


def test_fault_24_a_budget_beyond_the_model_s_length():
    done = fnllm.generate(tiny(), GOOD, greedy(3), max_num_batched_tokens=64, max_model_len=16, **SIZES)
    assert [one.token_ids for one in done] == [plain_greedy(tiny(), prompt, 3) for prompt in GOOD]


@each_setting
def test_fault_26_a_long_prompt_starves_nobody(setting):
    engine = fnllm.engine(
        tiny(), num_blocks=60, block_size=4, max_num_seqs=4, max_model_len=120, max_num_batched_tokens=8, **setting
    )
    state, first = fnllm.add(engine.init(), engine.request(GOOD[0], greedy(60)))
    while len(fnllm.tokens(state, first)) == 3:
        state, _ = engine.step(state)
    long = [5 + index % 30 for index in range(100)]
    state, _ = fnllm.add(state, engine.request(long, greedy(2)))
    for _ in range(20):
        before = len(fnllm.tokens(state, first))
        state, step = engine.step(state)
        assert len(fnllm.tokens(state, first)) == before + 1
        assert int(step.plan.query_lens.sum()) <= 8
    read = 100 if setting["max_chunk"] is None else 20 * setting["max_chunk"]
    assert state.scheduler.counters.prefill_tokens - 3 >= min(read, 100)


@pytest.mark.parametrize(
    ("option", "value"),
    [("top_k", 0.5), ("top_p", 1.4), ("temperature", -1), ("top_k", -7), ("temprature", 1), ("logprobs", 42), ("n", 0)],
)
def test_fault_29_wrong_sampling_values_are_named(option, value):
    with pytest.raises((TypeError, ValueError), match=option):
        fnllm.generate(tiny(), GOOD, fnllm.Sampling(**{option: value}), **SIZES)


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_fault_30_as_many_settings_as_prompts(count):
    with pytest.raises(ValueError, match=f"3 prompts and {count}"):
        fnllm.generate(tiny(), [*GOOD, [1]], [greedy(2)] * count, **SIZES)


@pytest.mark.parametrize("bad", [41, -1, 2**40])
def test_fault_31_ids_outside_the_vocabulary(bad):
    calls = {
        "prompts": lambda ids: fnllm.generate(tiny(), ids, greedy(2), **SIZES),
        "sequences": lambda ids: fnllm.score(tiny(), ids),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=rf"{name}\[1\].*{bad}.*position 1.*0 to 40"):
            call([[1], [3, bad]])
