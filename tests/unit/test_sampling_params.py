"""Sampling settings: every field checked, every error names the field and what is allowed."""

import dataclasses
import inspect
import math
import pickle

import numpy as np
import pytest
import torch

from fnllm.sampling import Sampling, check_sampling, from_defaults


def test_defaults_are_valid_and_values_are_plain():
    sampling = Sampling(
        temperature=np.float32(0.5),
        top_k=np.int64(3),
        seed=torch.tensor(7),
        stop="x",
        stop_token_ids=np.array([5, 2, 5]),
        logit_bias={np.int32(4): 1, 2: np.float32(-np.inf)},
        ignore_eos=np.bool_(True),
    )
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.5, 3, 7)
    assert [type(v) for v in (sampling.temperature, sampling.top_k, sampling.seed)] == [float, int, int]
    assert (sampling.stop, sampling.stop_token_ids) == (("x",), (2, 5))
    assert sampling.logit_bias == ((2, -math.inf), (4, 1.0))
    assert sampling.ignore_eos is True


def test_without_settings_the_model_s_own_distribution_is_drawn_from():
    plain = Sampling()
    assert (plain.temperature, plain.top_k, plain.top_p, plain.min_p) == (1, 0, 1, 0)
    assert (plain.repetition_penalty, plain.presence_penalty, plain.frequency_penalty) == (1, 0, 0)
    assert (plain.logit_bias, plain.logits_fn, plain.min_tokens, plain.n, plain.seed) == ((), None, 0, 1, None)
    assert (plain.stop, plain.stop_token_ids, plain.ignore_eos, plain.include_stop) == ((), (), False, False)


def test_it_is_a_value():
    one, two = Sampling(stop=["a"], logit_bias={3: 1}), Sampling(stop=("a",), logit_bias=[(3, 1.0)])
    assert one == two and hash(one) == hash(two)
    assert pickle.loads(pickle.dumps(one)) == one
    assert dataclasses.replace(one, n=2).stop == ("a",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.n = 3


WRONG = [
    ("temperature", -1, ValueError),
    ("temperature", math.nan, ValueError),
    ("temperature", math.inf, ValueError),
    ("temperature", "1", TypeError),
    ("temperature", True, TypeError),
    ("temperature", None, TypeError),
    ("temperature", [0.5], TypeError),
    ("temperature", np.bool_(True), TypeError),
    ("top_k", 0.5, ValueError),
    ("top_k", -7, ValueError),
    ("top_k", -1, ValueError),
    ("top_k", "5", TypeError),
    ("top_k", np.float64(2), ValueError),
    ("top_p", 1.4, ValueError),
    ("top_p", 0, ValueError),
    ("top_p", math.nan, ValueError),
    ("min_p", 1.1, ValueError),
    ("min_p", -0.1, ValueError),
    ("repetition_penalty", 0, ValueError),
    ("repetition_penalty", -1, ValueError),
    ("presence_penalty", math.inf, ValueError),
    ("frequency_penalty", "x", TypeError),
    ("logit_bias", {-1: 1.0}, ValueError),
    ("logit_bias", {1: math.nan}, ValueError),
    ("logit_bias", {1: math.inf}, ValueError),
    ("logit_bias", {"a": 1}, TypeError),
    ("logit_bias", [3], TypeError),
    ("logit_bias", 3, TypeError),
    ("logit_bias", [(3, 1), (3, 2)], ValueError),
    ("logit_bias", {1: True}, TypeError),
    ("seed", -1, ValueError),
    ("seed", 2**63, ValueError),
    ("seed", 1.0, ValueError),
    ("max_tokens", -2, ValueError),
    ("max_tokens", 2.5, ValueError),
    ("max_tokens", True, TypeError),
    ("max_tokens", None, TypeError),
    ("max_tokens", math.inf, ValueError),
    ("min_tokens", -1, ValueError),
    ("stop", "", ValueError),
    ("stop", ["a", ""], ValueError),
    ("stop", 5, TypeError),
    ("stop", [5], TypeError),
    ("stop", b"x", TypeError),
    ("stop_token_ids", 5, TypeError),
    ("stop_token_ids", "5", TypeError),
    ("stop_token_ids", [-1], ValueError),
    ("stop_token_ids", [True], TypeError),
    ("ignore_eos", 1, TypeError),
    ("include_stop", "yes", TypeError),
    ("n", 0, ValueError),
    ("n", 1.5, ValueError),
    ("logprobs", -1, ValueError),
    ("logprobs", True, TypeError),
    ("prompt_logprobs", 1.5, ValueError),
    ("logits_fn", 3, TypeError),
]


@pytest.mark.parametrize(("name", "value", "error"), WRONG)
def test_fault_17_and_29_wrong_values_are_named(name, value, error):
    with pytest.raises(error, match=name):
        Sampling(**{name: value})


def test_the_message_says_what_was_found_and_what_is_allowed():
    with pytest.raises(ValueError, match=r"^max_tokens must be an integer of 0 or more, found float 2\.5$"):
        Sampling(max_tokens=2.5)
    with pytest.raises(ValueError, match=r"^top_p must be a finite number > 0 and <= 1, found 1\.4$"):
        Sampling(top_p=1.4)
    with pytest.raises(ValueError, match=r"^min_tokens=200 is more than max_tokens=5; lower"):
        Sampling(min_tokens=200, max_tokens=5)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"),
        ("max_new_tokens", "max_tokens"),
        ("topk", "top_k"),
        ("Top_P", "top_p"),
        ("stops", "stop"),
        ("num_return_sequences", "n"),
        ("do_sample", "temperature"),
        ("eos_token_id", "stop_token_ids"),
    ],
)
def test_fault_29_a_misspelt_option_is_an_error_with_a_suggestion(name, meant):
    with pytest.raises(TypeError, match=f"Sampling has no option '{name}'; did you mean {meant}"):
        Sampling(**{name: 1})


def test_an_option_like_no_other_lists_them_all():
    with pytest.raises(TypeError, match="no option 'qqq'; allowed are: temperature, top_k"):
        Sampling(qqq=1)


def test_positional_values_are_refused_and_help_still_shows_the_options():
    with pytest.raises(TypeError, match=r"named options only, as in Sampling\(temperature=\.\.\.\); found 0\.7"):
        Sampling(0.7)
    assert "top_p" in inspect.signature(Sampling).parameters


def test_limits_themselves_are_allowed():
    Sampling(temperature=0, top_p=1, min_p=0, max_tokens=0, logprobs=0, n=1, seed=0)
    Sampling(top_p=1e-9, min_p=1, seed=2**63 - 1, min_tokens=3, max_tokens=3)


def test_what_a_model_cannot_do():
    check_sampling(Sampling(stop_token_ids=[9], logit_bias={9: 1}, logprobs=10), vocab_size=10)
    for wrong, name in [
        ({"stop_token_ids": [10]}, "stop_token_ids has 10"),
        ({"logit_bias": {10: 1}}, "logit_bias has id 10"),
        ({"logprobs": 11}, "logprobs=11"),
        ({"prompt_logprobs": 11}, "prompt_logprobs=11"),
    ]:
        with pytest.raises(ValueError, match=name):
            check_sampling(Sampling(**wrong), vocab_size=10)
    with pytest.raises(ValueError, match=r"stop=\('a',\) needs text and these params have no tokenizer"):
        check_sampling(Sampling(stop="a"), vocab_size=10, has_tokenizer=False)
    with pytest.raises(TypeError, match="must be a Sampling"):
        check_sampling({"temperature": 1}, vocab_size=10)


def test_a_checkpoints_own_defaults():
    defaults = (("temperature", 0.6), ("top_k", 20), ("top_p", None), ("do_sample", True), ("pad_token_id", 3))
    assert from_defaults(defaults, max_tokens=5) == Sampling(temperature=0.6, top_k=20, max_tokens=5)
    assert from_defaults(defaults, temperature=0).temperature == 0
    assert from_defaults((("do_sample", False), ("temperature", 0.6))).temperature == 0
