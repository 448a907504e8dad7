"""Prompts in every form to ids, and every wrong form to an error that names its place."""

import json

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers, processors

from fnllm.prompts import normalise, pair_sampling
from fnllm.sampling import Sampling
from fnllm_weights.tokenizer import make_tokenizer

V = 9
CHAT = [{"role": "user", "content": "a b"}]


def make(bos=False):
    words = ["<s>", "a", "b", "c", "user"]
    backend = tokenizers.Tokenizer(models.WordLevel(vocab={w: i for i, w in enumerate(words)}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}{% if shout %} c{% endif %}"
    config = {"chat_template": template}
    if bos:
        config["bos_token"] = "<s>"
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return make_tokenizer(backend, {"tokenizer_config.json": json.dumps(config)})


PLAIN, BOS = make(), make(bos=True)


def ids(prompts, tokenizer=PLAIN, **options):
    return normalise(prompts, tokenizer, V, **options)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a b", (1, 2)),
        ([1, 2, 3], (1, 2, 3)),
        ((4, 5), (4, 5)),
        (CHAT, (4, 1, 2)),
        (range(3), (0, 1, 2)),
        (np.array([3, 1]), (3, 1)),
        (torch.tensor([3, 1]), (3, 1)),
        (np.array([8], np.uint8), (8,)),
        ([np.int64(3), 1], (3, 1)),
        ([torch.tensor(3)], (3,)),
        (list(np.array([2, 1])), (2, 1)),
    ],
)
def test_one_prompt_alone_and_in_a_list(prompt, expected):
    assert ids(prompt) == (expected,)
    assert ids([prompt, "c"]) == (expected, (3,))
    assert all(type(i) is int for i in ids(prompt)[0])


def test_forms_may_be_mixed_and_an_empty_list_is_no_prompt():
    assert ids(["c", [7], CHAT, np.array([0])]) == ((3,), (7,), (4, 1, 2), (0,))
    assert ids([CHAT, CHAT]) == ((4, 1, 2), (4, 1, 2))
    assert ids([]) == ()
    assert ids(np.array(["a", "b"])) == ((1,), (2,))


def test_chat_options_reach_the_template():
    assert ids(CHAT, chat={"shout": True}) == ((4, 1, 2, 3),)


def test_fault_18_empty_prompts_are_named_before_anything_runs():
    for wrong in ("", [], np.array([], int)):
        with pytest.raises(ValueError, match=r"prompts\[1\]: is empty"):
            ids(["a", wrong, "b"])
    assert ids(["a", "", "b"], BOS) == ((0, 1), (0,), (0, 2))  # a BOS is something to continue


@pytest.mark.parametrize("bad", [V, -1, 2**40, -(2**40)])
def test_fault_31_ids_outside_the_vocabulary(bad):
    with pytest.raises(ValueError, match=rf"prompts\[1\]: token id {bad} at position 1 is outside .* 0 to {V - 1}$"):
        ids(["a", [3, bad]])
    with pytest.raises(ValueError, match=rf"^prompt: token id {bad} at position 1"):
        ids(np.array([3, bad]))


@pytest.mark.parametrize(
    ("prompt", "error", "match"),
    [
        (3, TypeError, "must be text, a list of token ids, or a chat .* found int 3"),
        (None, TypeError, "found NoneType"),
        (b"a", TypeError, "found bytes"),
        ({"role": "user"}, TypeError, "found dict"),
        ([1, "a"], TypeError, "token ids must be integers, found str 'a' at position 1"),
        ([1, True], TypeError, "found bool True at position 1"),
        ([1, 2.0], TypeError, "found float 2.0 at position 1"),
        ([[1, 2]], TypeError, "token ids must be integers, found list"),
        (np.array([1.5]), TypeError, "found float 1.5 at position 0"),
        (torch.tensor([True]), TypeError, "found bool True at position 0"),
        (np.ones((2, 2), int), TypeError, r"one axis, found shape \(2, 2\)"),
        ([{"role": "user"}], ValueError, "message 0 needs content"),
        ([*CHAT, "x"], TypeError, "message 1 must be a dict"),
        ("a\udc80", ValueError, "lone surrogate"),
    ],
)
def test_wrong_prompts_are_named(prompt, error, match):
    with pytest.raises(error, match=r"^prompts\[1\]: .*" + match):
        ids(["a", prompt])


@pytest.mark.parametrize(
    ("prompts", "match"),
    [
        (None, "found NoneType None"),
        (5, "found int 5"),
        (b"abc", "decode it to text"),
        ({"role": "user", "content": "x"}, "put a message into a list"),
        (np.ones((2, 3), int), r"shape \(2, 3\)"),
        (iter(["a"]), "found list_iterator"),
    ],
)
def test_what_is_no_list_of_prompts_is_always_raised(prompts, match):
    with pytest.raises(TypeError, match=match):
        ids(prompts, errors="return")


@pytest.mark.parametrize("prompt", [[True, 1], [1.0, 2], [1, "a"]])
def test_a_list_of_numbers_is_one_prompt_even_when_wrong(prompt):
    with pytest.raises(TypeError, match="^prompt: token ids must be integers"):
        ids(prompt)


def test_errors_can_be_returned_in_place():
    found = ids(["a", "", [3, V], 5, [2]], errors="return")
    assert (found[0], found[4]) == ((1,), (2,))
    assert [type(e) for e in found[1:4]] == [ValueError, ValueError, TypeError]
    assert str(found[2]).startswith(f"prompts[2]: token id {V} at position 1")
    with pytest.raises(ValueError, match="errors must be 'raise' or 'return', found 'ignore'"):
        ids(["a"], errors="ignore")


def test_without_a_tokenizer_only_ids():
    assert ids([1, 2], None) == ((1, 2),)
    for prompt in ("a", CHAT):
        with pytest.raises(ValueError, match="no tokenizer, so a prompt must be a list of token ids"):
            ids(prompt, None)


def test_many_prompts_take_linear_time():
    assert len(ids([[1, 2, 3]] * 20_000 + ["a b"] * 2_000)) == 22_000


def test_the_callers_list_is_not_kept():
    mine = [1, 2]
    found = ids([mine])
    mine.append(3)
    assert found == ((1, 2),)


def test_fault_30_as_many_settings_as_prompts():
    one, two = Sampling(seed=1), Sampling(seed=2)
    assert pair_sampling(2, None) == (Sampling(), Sampling())
    assert pair_sampling(2, one) == (one, one)
    assert pair_sampling(2, [one, two]) == (one, two)
    for wrong in ([one, two], [one] * 4, []):
        with pytest.raises(ValueError, match=f"3 prompts and {len(wrong)} sampling settings"):
            pair_sampling(3, wrong)
    for wrong, match in [
        ({"temperature": 1}, "found dict"),
        ("x", "found str"),
        ([one, {}], r"sampling\[1\]"),
        (0.5, "found float"),
    ]:
        with pytest.raises(TypeError, match=match):
            pair_sampling(2, wrong)
