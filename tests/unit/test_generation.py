"""`generate` and `stream`: what they promise beyond the right tokens."""

import dataclasses

import pytest
import torch
from tiny_models import GREEDY, WORDS, plain_greedy, speller, tiny

import fnllm
from fnllm import Sampling
from fnllm.generation import longest_first

SMALL = {"max_model_len": 40, "max_num_seqs": 4, "block_size": 4}
PROMPTS = [[5, 6, 7], [8], [5, 6, 7, 9, 10, 11, 12], [3, 1, 2, 4]]
SHORT = dataclasses.replace(GREEDY, max_tokens=6)
# Speaks "x", "ab", "cd", "e", "x", ...
ROUND = speller((3, 1, 2, 4, 5, 6, 3))
ENDS = speller((3, 1, 2, 4, 5, 6, 1))  # "x", "ab", "cd", "e", end


def ids(done) -> list[tuple[int, ...]]:
    return [one.token_ids for one in done]


def machine_of(params: fnllm.Params, **options):
    return fnllm.engine(params, **options).machine


def test_batches_are_the_plain_engine_s():
    expected = [plain_greedy(tiny(), prompt, 6) for prompt in PROMPTS]
    assert ids(fnllm.generate(tiny(), PROMPTS, SHORT, **SMALL)) == expected


def test_the_longest_run_first_where_the_cache_holds_all():
    config = fnllm.scheduler.SchedulerConfig(9, 4, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=40)
    requests = [fnllm.scheduler.Request((1,) * 3, tokens) for tokens in (2, 9, 2, 9, 1)]  # 2, 3, 2, 3 and 1 blocks
    assert longest_first(requests[:3], config) == [1, 0, 2]
    assert longest_first(requests[1:], config) == [0, 2, 1, 3]
    assert longest_first(requests, config) == [0, 1, 2, 3, 4]  # 11 blocks: long ones would push each other out
    beyond = [fnllm.scheduler.Request((1,) * 3, tokens) for tokens in (1, 10**9)]  # ends with the cache: 9 blocks
    assert longest_first(beyond[1:] + beyond[1:], config) == [0, 1]
    roomy = dataclasses.replace(config, num_blocks=20)
    assert longest_first(beyond, roomy) == [1, 0]
    late = [fnllm.scheduler.Request((1,) * length, tokens) for length, tokens in ((30, 10**9), (3, 20))]
    assert longest_first(late, roomy) == [1, 0]  # ends with the model's limit: 10 tokens


@pytest.mark.parametrize(("blocks", "steps"), [(7, 8), (6, 10)])
def test_a_call_takes_as_many_steps_as_its_longest_request(monkeypatch, blocks, steps):
    """Two rows: three requests of 2, 2 and 8 tokens run in 8 steps if the last begins at once, in 10 in their order."""
    launched = []
    usual = fnllm.machine.Machine.execute
    monkeypatch.setattr(fnllm.machine.Machine, "execute", lambda *a: launched.append(a[3]) or usual(*a))
    sampling = [dataclasses.replace(GREEDY, max_tokens=tokens) for tokens in (2, 2, 8)]
    done = fnllm.generate(tiny(), PROMPTS[:3], sampling, **{**SMALL, "max_num_seqs": 2, "num_blocks": blocks})
    assert ids(done) == [plain_greedy(tiny(), PROMPTS[i], one.max_tokens) for i, one in enumerate(sampling)]
    assert len(launched) == steps
    launched.clear()
    chunks = list(fnllm.stream(tiny(), PROMPTS[:3], sampling, **{**SMALL, "max_num_seqs": 2, "num_blocks": blocks}))
    assert len(launched) == 10 and [one.index for one in chunks[:2]] == [0, 1]


def test_one_prompt_is_a_list_of_one():
    assert ids(fnllm.generate(tiny(), PROMPTS[0], SHORT, **SMALL)) == [plain_greedy(tiny(), PROMPTS[0], 6)]
    assert fnllm.generate(tiny(), [], SHORT, **SMALL) == []


def test_a_second_call_builds_nothing():
    params = tiny(7)
    fnllm.generate(params, PROMPTS, SHORT, **SMALL)
    machine = machine_of(params, **SMALL)
    pool, runners = machine.resident.cache.k[0].data_ptr(), dict(machine.runners)
    fnllm.generate(params, PROMPTS[1:], SHORT, **SMALL)
    list(fnllm.stream(params, PROMPTS, SHORT, **SMALL))
    assert list(params.workspace.values()) == [machine]
    assert machine.resident.cache.k[0].data_ptr() == pool
    assert machine.runners == runners


def test_without_settings_the_checkpoint_s_recommendation_holds():
    config = dataclasses.replace(
        tiny().config, generation_defaults=(("do_sample", False), ("temperature", 0.7), ("top_k", 20))
    )
    params = tiny()._replace(config=config, workspace={})
    done = fnllm.generate(params, PROMPTS, seed=3, **SMALL)
    count = 40 - len(PROMPTS[0])
    assert done[0].token_ids == plain_greedy(tiny(), PROMPTS[0], count)
    assert done[0].finish_reason == "length"


@pytest.mark.parametrize("value", [0, 1])
def test_max_tokens_of_zero_and_one(value):
    done = fnllm.generate(tiny(), PROMPTS[0], dataclasses.replace(SHORT, max_tokens=value), **SMALL)[0]
    assert done.token_ids == plain_greedy(tiny(), PROMPTS[0], value)
    assert done.finish_reason == "length" and done.prompt_tokens == 3
    assert (done.timings.first_token is None) == (value == 0)


def test_zero_new_tokens_with_the_prompt_s_log_probabilities():
    setting = Sampling(max_tokens=0, prompt_logprobs=2, logprobs=1)
    done = fnllm.generate(tiny(), PROMPTS[2], setting, **SMALL)[0]
    score = fnllm.score(tiny(), [PROMPTS[2]])[0]
    assert done.prompt_logprobs[0] is None and done.logprobs == ()
    torch.testing.assert_close(torch.tensor([one.logprob for one in done.prompt_logprobs[1:]]), score)
    assert [one.id for one in done.prompt_logprobs[1:]] == PROMPTS[2][1:]
    assert all(len(one.top) == 2 for one in done.prompt_logprobs[1:])


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_logprobs_are_of_the_raw_model(temperature):
    setting = Sampling(temperature=temperature, max_tokens=6, ignore_eos=True, seed=4, logprobs=3, top_k=5)
    plain = dataclasses.replace(SHORT, max_tokens=3)
    done = fnllm.generate(tiny(), PROMPTS[:2], [setting, plain], **SMALL)
    assert done[1].logprobs is None
    text = [*PROMPTS[0], *done[0].token_ids]
    expected = fnllm.score(tiny(), [text])[0][len(PROMPTS[0]) - 1 :]
    torch.testing.assert_close(torch.tensor([one.logprob for one in done[0].logprobs]), expected, atol=1e-4, rtol=0)
    for one, token in zip(done[0].logprobs, done[0].token_ids, strict=True):
        assert one.id == token and len(one.top) == 3
        assert [p for _, p in one.top] == sorted((p for _, p in one.top), reverse=True)
        assert one.top[0][1] >= one.logprob - 1e-6
        if temperature == 0:
            assert one.top[0][0] == token


def test_several_settings_in_one_batch_are_as_if_alone():
    """Penalties, bias, filters and functions of one row leave the others alone, whoever joins or leaves beside it."""

    def never_ten(logits, history):
        return logits.index_fill(1, torch.tensor([10]), -torch.inf)

    def never_even(logits, history):
        return logits.masked_fill(torch.arange(logits.shape[1]) % 2 == 0, -torch.inf)

    base = {"max_tokens": 9, "ignore_eos": True}
    settings = [
        Sampling(temperature=0, **base),
        Sampling(temperature=1, seed=1, repetition_penalty=1.5, **base),
        Sampling(temperature=0, logits_fn=never_ten, **base),
        Sampling(temperature=1, seed=2, logit_bias={4: 3.0, 7: -4.0}, top_p=0.8, max_tokens=3),
        Sampling(temperature=0, logits_fn=never_even, max_tokens=4),
        Sampling(temperature=2, seed=3, min_p=0.1, presence_penalty=0.5, frequency_penalty=0.2, **base),
        Sampling(temperature=1, seed=4, top_k=3, min_tokens=5, stop_token_ids=list(range(20)), max_tokens=12),
        Sampling(temperature=0, logits_fn=never_even, **base),
        Sampling(temperature=0, logits_fn=never_ten, max_tokens=2),
    ]
    prompts = [[5 + index % 4, 6, 7 + index] for index in range(len(settings))]
    alone = [fnllm.generate(tiny(), p, s, **SMALL)[0] for p, s in zip(prompts, settings, strict=True)]
    for order in (range(len(settings)), reversed(range(len(settings))), (2, 7, 8, 4, 0, 6, 5, 1, 3)):
        order = list(order)
        done = fnllm.generate(tiny(), [prompts[i] for i in order], [settings[i] for i in order], **SMALL)
        assert ids(done) == [alone[i].token_ids for i in order]
    assert 10 not in alone[2].token_ids and all(token % 2 for token in alone[4].token_ids)


def test_a_seed_of_the_call_repeats_it_and_none_does_not():
    setting = Sampling(temperature=1.5, max_tokens=12, ignore_eos=True)
    first, again, other = (ids(fnllm.generate(tiny(), PROMPTS, setting, seed=seed, **SMALL)) for seed in (1, 1, 2))
    assert first == again != other
    assert len({ids(fnllm.generate(tiny(), PROMPTS[0], setting, **SMALL))[0] for _ in range(3)}) == 3
    same = ids(fnllm.generate(tiny(), [PROMPTS[0]] * 3, setting, seed=1, **SMALL))
    assert len(set(same)) == 3, "equal prompts of one call draw their own noise"


@pytest.mark.parametrize("seed", [-1, 2.5, "x", 2**63, True])
def test_a_wrong_seed_of_the_call_is_named(seed):
    with pytest.raises((TypeError, ValueError), match="seed"):
        fnllm.generate(tiny(), PROMPTS, SHORT, seed=seed, errors="return", **SMALL)


def test_samples_follow_their_prompt():
    setting = Sampling(temperature=1.5, max_tokens=8, ignore_eos=True, seed=11, n=4)
    done = fnllm.generate(tiny(), PROMPTS[:2], [setting, SHORT], **SMALL)
    assert len(done) == 5 and len(set(ids(done[:4]))) == 4
    assert ids(done) == ids(fnllm.generate(tiny(), PROMPTS[:2], [setting, SHORT], **SMALL))
    chunks = [c for c in fnllm.stream(tiny(), PROMPTS[:2], [setting, SHORT], **SMALL) if c.finished]
    found = {(c.index, c.sample): c.completion.token_ids for c in chunks}
    assert [found[key] for key in sorted(found)] == ids(done)
    one = fnllm.generate(tiny(), PROMPTS[0], dataclasses.replace(setting, n=1), **SMALL)
    assert ids(one) == ids(done[:1]), "the first sample is the one that n=1 gives"


def test_min_tokens_holds_off_eos_stop_ids_and_stop_strings():
    plain = Sampling(temperature=0, max_tokens=9)
    assert fnllm.generate(ENDS, "x", plain, **SMALL)[0].text == "abcde"
    held = fnllm.generate(ENDS, "x", dataclasses.replace(plain, min_tokens=6), **SMALL)[0]
    assert len(held.token_ids) >= 6 and 1 not in held.token_ids[:6]
    stop = dataclasses.replace(plain, stop="cd")
    assert fnllm.generate(ROUND, "x", stop, **SMALL)[0].text == "ab"
    last = fnllm.generate(ROUND, "x", dataclasses.replace(stop, max_tokens=2), **SMALL)[0]
    assert (last.text, last.finish_reason, last.stop_reason) == ("ab", "stop", "cd"), "the last token completes it"
    late = fnllm.generate(ROUND, "x", dataclasses.replace(stop, min_tokens=3), **SMALL)[0]
    assert late.text == "abcdexab" and late.stop_reason == "cd"


def test_stop_ids_and_eos_end_alike():
    eos = fnllm.generate(ENDS, "x", Sampling(temperature=0), **SMALL)[0]
    assert (eos.finish_reason, eos.stop_reason, eos.token_ids[-1]) == ("stop", 1, 1)
    named = fnllm.generate(ENDS, "x", Sampling(temperature=0, stop_token_ids=[6]), **SMALL)[0]
    assert (named.text, named.stop_reason, named.token_ids) == ("abcd", 6, (4, 5, 6))
    shown = fnllm.generate(ENDS, "x", Sampling(temperature=0, stop_token_ids=[6], include_stop=True), **SMALL)[0]
    assert shown.text == "abcde"
    on = fnllm.generate(ENDS, "x", Sampling(temperature=0, ignore_eos=True, max_tokens=6), **SMALL)[0]
    assert on.finish_reason == "length" and len(on.token_ids) == 6


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"stop": "bc"},
        {"stop": ("bc", "de")},
        {"stop": "dex", "include_stop": True},
        {"stop": "zzz"},
        {"stop_token_ids": [6]},
        {"stop": "ex", "stop_token_ids": [5]},
        {"n": 2},
        {"max_tokens": 0},
    ],
)
def test_joined_chunks_are_the_completion(setting):
    setting = Sampling(**{"temperature": 0, "max_tokens": 9, "logprobs": 0, **setting})
    prompts = ["x", "ab", "cdex"]
    done = fnllm.generate(ROUND, prompts, setting, **SMALL)
    pieces: dict[tuple[int, int], list[fnllm.Chunk]] = {}
    for chunk in fnllm.stream(ROUND, prompts, setting, **SMALL):
        pieces.setdefault((chunk.index, chunk.sample), []).append(chunk)
    for key, whole in zip(sorted(pieces), done, strict=True):
        chunks = pieces[key]
        assert [c.finished for c in chunks] == [False] * (len(chunks) - 1) + [True]
        assert all(len(c.token_ids) <= 1 for c in chunks), "each token is shown as it comes"
        last = chunks[-1].completion
        assert "".join(c.text for c in chunks) == last.text == whole.text
        assert sum((c.token_ids for c in chunks), ()) == last.token_ids == whole.token_ids
        assert (last.finish_reason, last.stop_reason) == (whole.finish_reason, whole.stop_reason)
        assert len(last.logprobs) == len(last.token_ids)


def test_prompts_at_exactly_the_limits():
    limit = 12
    prompt = [3 + index % 5 for index in range(limit)]
    options = {"max_model_len": 16, "block_size": 4, "num_blocks": limit // 4, "max_num_seqs": 2}
    done = fnllm.generate(tiny(), [prompt[:-1], prompt, prompt[:1]], SHORT, **options)
    assert [len(one.token_ids) for one in done] == [1, 0, 6]
    assert {one.finish_reason for one in done} == {"length"}
    assert done[0].token_ids == plain_greedy(tiny(), prompt[:-1], 1)
    with pytest.raises(ValueError, match="13 tokens.*at most 12"):
        fnllm.generate(tiny(), [*prompt, 4], SHORT, **options)


def test_timings_are_in_order_and_tell_waiting_from_work():
    options = {**SMALL, "max_num_seqs": 1}
    done = fnllm.generate(tiny(), PROMPTS[:3], dataclasses.replace(SHORT, max_tokens=4), **options)
    for one in done:
        assert 0 <= one.timings.queued < one.timings.first_token <= one.timings.total
    assert done[1].timings.queued >= done[0].timings.total - 0.05, "one row: the second waits for the first"
    assert done[0].timings.queued < done[1].timings.queued < done[2].timings.queued
    assert done[0].prefill_tokens_per_second > 0 and done[0].decode_tokens_per_second > 0


def test_a_refused_request_leaves_the_others():
    prompts = [PROMPTS[0], [], [99], list(range(30)) * 2, PROMPTS[1]]
    done = fnllm.generate(tiny(), prompts, SHORT, errors="return", **SMALL)
    assert [one.finish_reason for one in done] == ["length", "error", "error", "error", "length"]
    assert all(isinstance(one.error, ValueError) for one in done[1:4])
    assert ids((done[0], done[4])) == [plain_greedy(tiny(), p, 6) for p in PROMPTS[:2]]
    settings = [SHORT, dataclasses.replace(SHORT, stop="x"), dataclasses.replace(SHORT, stop_token_ids=[41])]
    done = fnllm.generate(tiny(), PROMPTS[:3], settings, errors="return", **SMALL)
    assert [one.error is None for one in done] == [True, False, False]
    twice = fnllm.generate(tiny(), prompts, dataclasses.replace(SHORT, n=2), errors="return", **SMALL)
    assert [one.finish_reason for one in twice] == ["length"] * 2 + ["error"] * 6 + ["length"] * 2
    chunks = list(fnllm.stream(tiny(), prompts, SHORT, errors="return", **SMALL))
    assert sorted(c.index for c in chunks if c.finished and c.completion.error) == [1, 2, 3]


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"prompts": []}, None, ""),
        ({"prompts": [[]]}, ValueError, r"prompts\[0\]"),
        ({"prompts": [[1], [2, 41]]}, ValueError, r"prompts\[1\].*41.*position 1"),
        ({"sampling": [SHORT]}, ValueError, "2 prompts and 1"),
        ({"sampling": "greedy"}, TypeError, "sampling"),
        ({"block_sise": 4}, TypeError, "block_size"),
        ({"temperature": 0}, TypeError, "temperature"),
        ({"num_blocks": 0}, ValueError, "num_blocks"),
        ({"max_num_seqs": 2.5}, ValueError, "max_num_seqs"),
        ({"max_chunk": 4, "chunked_prefill": False}, ValueError, "max_chunk"),
        ({"errors": "ignore"}, ValueError, "errors"),
        ({"capture": "layers.9.q"}, ValueError, "layers.9.q"),
        ({"compile": "fast"}, ValueError, "compile"),
    ],
)
@pytest.mark.parametrize("call", [fnllm.generate, fnllm.stream])
def test_wrong_arguments_are_named_by_the_call_itself(call, wrong, error, words):
    """Also by `stream`, before anybody iterates."""
    arguments = {"prompts": PROMPTS[:2], "sampling": SHORT, **SMALL, **wrong}
    if error is None:
        call(tiny(), **arguments)
        return
    with pytest.raises(error, match=words):
        call(tiny(), **arguments)


def test_captures_are_measured_by_what_can_be_reached():
    setting = Sampling(temperature=0, max_tokens=10**12, ignore_eos=True)
    done = fnllm.generate(tiny(), PROMPTS[0], setting, capture="logits", **SMALL)[0]
    assert done.captured["logits"].shape == (39, 41), "the last of 40 tokens is never read"


def test_the_text_of_a_completion_has_no_special_tokens():
    done = fnllm.generate(ENDS, "x", Sampling(temperature=0), **SMALL)[0]
    assert WORDS[1] not in done.text and done.token_ids[-1] == 1


def test_the_vocabulary_s_padding_rows_are_never_drawn():
    params = speller((3, 1, 2, 4, 5, 6, 3))
    wide = params._replace(config=dataclasses.replace(params.config, vocab_size=32), workspace={})
    tree = {**wide.tree, "embed": torch.zeros(32, 16), "lm_head": torch.zeros(32, 16)}
    drawn = Sampling(temperature=1, max_tokens=60, ignore_eos=True)
    done = fnllm.generate(wide._replace(tree=tree), [[3]], drawn, seed=0, **{**SMALL, "max_model_len": 64})
    assert max(done[0].token_ids) < len(WORDS)
