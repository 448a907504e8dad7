"""Features and rows made from requests' settings."""

import functools
import itertools
import math

import pytest
import torch
from unit.sampler.settings import Settings

from fnllm.sampler import (
    SamplerFeatures,
    child_seed,
    default_rows,
    features_of,
    prompt_seed,
    rounded,
    rows_from_sampling,
    take_rows,
    union,
    widen_rows,
)


def hook(logits, history):
    return logits


def test_features_are_the_smallest_that_serve():
    assert features_of([]) == features_of([Settings(temperature=0, top_k=5, top_p=0.5)]) == SamplerFeatures()
    assert features_of([Settings()]) == SamplerFeatures(noise=True)
    assert features_of([Settings(top_k=128)]) == SamplerFeatures(noise=True, top_k=True, candidates=True)
    assert not features_of([Settings(top_k=129)]).candidates
    mixed = features_of([Settings(top_k=5), Settings(top_p=0.5)])
    assert mixed == SamplerFeatures(noise=True, top_k=True, top_p=True)
    assert features_of([Settings(presence_penalty=0.1)]).penalties
    assert features_of([Settings(logprobs=0), Settings(logprobs=None)]).logprobs == 0
    assert features_of([Settings(logits_fn=hook), Settings(logits_fn=hook)]).logits_fns == (hook,)
    assert features_of([Settings(logit_bias={1: 1.0, 2: 1.0, 3: 1.0})]).bias == 4
    assert features_of([Settings(min_tokens=1, stop_token_ids=(4,))], eos_token_ids=(1, 2)).stops == 4
    assert features_of([Settings(stop_token_ids=(4,))], eos_token_ids=(1, 2)).stops == 0
    assert hash(mixed) == hash(features_of([Settings(top_k=5), Settings(top_p=0.5)]))


def test_logits_fns_have_one_order_whatever_that_of_the_rows():
    def banning(number):
        return lambda logits, history: logits - number  # functions of one name

    functions = [banning(1), banning(2), hook, min]
    wanted = features_of([Settings(logits_fn=one) for one in functions])
    assert set(wanted.logits_fns) == set(functions)
    for others in itertools.permutations(functions):
        each = [features_of([Settings(logits_fn=one)]) for one in others]
        assert functools.reduce(union, each) == features_of([Settings(logits_fn=one) for one in others]) == wanted


STOPS = Settings(min_tokens=1, stop_token_ids=(4, 5))


@pytest.mark.parametrize(
    "a", [Settings(temperature=0), Settings(top_k=3), Settings(min_p=0.1), Settings(logprobs=1), STOPS]
)
@pytest.mark.parametrize("b", [Settings(), Settings(top_p=0.2), Settings(logit_bias={1: 2.0}), Settings(top_k=500)])
def test_union_serves_both(a, b):
    assert union(features_of([a]), features_of([b])) == features_of([a, b])


def test_rounded_is_a_superset_out_of_few():
    assert rounded(SamplerFeatures()) == SamplerFeatures()
    filters = {"noise": True, "top_k": True, "top_p": True, "min_p": True}
    assert rounded(features_of([Settings(top_p=0.9)])) == SamplerFeatures(**filters)
    assert rounded(features_of([Settings(top_k=9)])) == SamplerFeatures(**filters, candidates=True)
    assert rounded(features_of([Settings(min_p=0.9)])) == SamplerFeatures(**filters, candidates=True)
    assert rounded(features_of([Settings(logprobs=5)])).logprobs == 8
    assert rounded(features_of([Settings(logprobs=0)])).logprobs == 0


def test_rows_hold_the_settings():
    settings = [
        Settings(temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, seed=2**63, min_tokens=2, stop_token_ids=(5, 4)),
        Settings(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={7: -1.5, 2: 3.0}),
    ]
    features = features_of(settings, eos_token_ids=(9,))
    rows = rows_from_sampling(settings, features=features, prompt_lengths=[10, 20], eos_token_ids=(9,))
    assert rows.temperature.tolist() == [0.5, 1.0] and rows.top_k.tolist() == [3, 0]
    assert rows.top_p.tolist() == [0.25, 1.0] and rows.min_p.tolist() == [0.125, 0.0]
    assert rows.repetition_penalty.tolist() == [1.0, 2.0] and rows.frequency_penalty.tolist() == [0.0, 0.25]
    assert rows.seed.tolist() == [-(2**63), 0] and rows.min_position.tolist() == [12, 20]
    assert rows.stop_ids.tolist() == [[4, 5, 9, -1], [-1] * 4]
    assert rows.bias_ids.tolist() == [[-1, -1], [7, 2]] and rows.bias_values.tolist() == [[0.0, 0.0], [-1.5, 3.0]]
    assert [x.dtype for x in rows] == [x.dtype for x in default_rows(2, features=features)]
    assert [x.shape for x in rows] == [x.shape for x in default_rows(2, features=features)]
    table = default_rows(4, features=features)
    for column, values in zip(table, rows, strict=True):
        column[torch.tensor([3, 1])] = values
    assert all(torch.equal(x, y) for x, y in zip(take_rows(table, torch.tensor([3, 1])), rows, strict=True))
    wide = widen_rows(rows, SamplerFeatures(bias=4, stops=8))
    assert wide.bias_ids.tolist() == [[-1] * 4, [7, 2, -1, -1]] and wide.stop_ids.shape == (2, 8)


def test_settings_beyond_float32_stay_finite_and_what_forbids_stays():
    far = Settings(temperature=1e300, presence_penalty=-1e300, repetition_penalty=1e-300, logit_bias={1: 1e300})
    rows = rows_from_sampling([far, Settings(logit_bias={1: -math.inf})], features=SamplerFeatures(bias=1))
    for column in (rows.temperature, rows.presence_penalty, rows.repetition_penalty, 1 / rows.repetition_penalty):
        assert column.isfinite().all()
    assert rows.bias_values[0].isfinite() and rows.bias_values[1] == -math.inf


def test_rows_that_features_do_not_serve_are_refused():
    with pytest.raises(ValueError, match=r"a row needs 1 entries of features\.bias=0"):
        rows_from_sampling([Settings(logit_bias={1: 1.0})], features=SamplerFeatures())
    with pytest.raises(ValueError, match="not among features.logits_fns"):
        rows_from_sampling([Settings(logits_fn=hook)], features=SamplerFeatures())
    with pytest.raises(ValueError, match="seeds holds 1 values for 2 samplings"):
        rows_from_sampling([Settings(), Settings()], features=SamplerFeatures(), seeds=[1])
    assert rows_from_sampling([], features=SamplerFeatures(bias=2)).bias_ids.shape == (0, 2)


def test_calls_and_prompts_with_close_seeds_share_none():
    seeds = [
        child_seed(prompt_seed(seed, prompt), sample) for seed in range(4) for prompt in range(4) for sample in range(4)
    ]
    assert len(set(seeds)) == 64 and prompt_seed(5, 0) == 5


def test_child_seeds_differ_and_repeat():
    seeds = [child_seed(seed, i) for seed in (0, 1, 2**63 - 1) for i in range(4)]
    assert len(set(seeds)) == 12 and child_seed(5, 0) == 5 and child_seed(5, 3) == child_seed(5, 3)
    assert all(-(2**63) <= s < 2**63 for s in seeds)
