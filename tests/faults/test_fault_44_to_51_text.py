"""Reported faults of stopping, text and chat, through `generate` and `stream` on a model that spells."""

import dataclasses
import json

import pytest
import tokenizers
from tiny_models import WORDS, speller
from tokenizers import processors

import fnllm
from fnllm import Sampling
from fnllm_weights.tokenizer import make_tokenizer

SIZES = {"num_blocks": 40, "block_size": 4, "max_model_len": 40, "max_num_seqs": 4}
GREEDY = Sampling(temperature=0, max_tokens=8)
ROUND = (3, 1, 2, 4, 5, 6, 3)  # x ab cd e x ...
AB, CD, E = 4, 5, 6


def both(params: fnllm.Params, prompt, setting: Sampling) -> tuple[fnllm.Completion, list[str]]:
    """The completion, the same from both calls, and the pieces that the stream showed."""
    whole = fnllm.generate(params, prompt, setting, **SIZES)[0]
    chunks = list(fnllm.stream(params, prompt, setting, **SIZES))
    last = chunks[-1].completion
    for field in ("text", "token_ids", "finish_reason", "stop_reason"):
        assert getattr(last, field) == getattr(whole, field)
    assert sum((chunk.token_ids for chunk in chunks), ()) == whole.token_ids
    return whole, [chunk.text for chunk in chunks]


def test_fault_44_every_eos_id_ends(tmp_path):
    """config.json says one, generation_config.json says two; the toy emits the second of them."""
    fnllm.save(speller(ROUND, eos=(1,)), tmp_path)
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps({**json.loads(generation.read_text()), "eos_token_id": [3, E]}))
    params = fnllm.load(tmp_path, device="cpu")
    assert set(params.config.eos_token_ids) == {1, 3, E}
    whole, _ = both(params, [AB], GREEDY)
    assert (whole.token_ids, whole.finish_reason, whole.stop_reason) == ((CD, E), "stop", E)


def test_fault_46_a_stop_string_over_several_tokens():
    whole, pieces = both(speller(ROUND), "e", dataclasses.replace(GREEDY, stop="bc"))
    assert (whole.text, whole.stop_reason) == ("xa", "bc")
    assert "".join(pieces) == "xa" and not any("b" in piece for piece in pieces)
    assert whole.token_ids == (3, AB, CD), "up to the token that completed it"


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("tokenizer", [True, False])
def test_fault_47_text_and_ids_stop_alike(include, tokenizer):
    params = speller(ROUND)
    setting = dataclasses.replace(GREEDY, stop_token_ids=[CD], include_stop=include)
    if not tokenizer:
        params = params._replace(tokenizer=None, workspace={})
    whole, _ = both(params, [E], setting)
    assert whole.token_ids == (3, AB, CD) and whole.stop_reason == CD
    assert whole.text == ("" if not tokenizer else "xabcd" if include else "xab")


@pytest.mark.parametrize(("include", "text"), [(False, "xa"), (True, "xabc")])
def test_fault_47_stop_strings_with_and_without(include, text):
    whole, pieces = both(speller(ROUND), "e", dataclasses.replace(GREEDY, stop=("bc", "cd"), include_stop=include))
    assert whole.text == "".join(pieces) == text and whole.stop_reason == "bc"
    with pytest.raises(ValueError, match="tokenizer"):
        fnllm.generate(speller(ROUND)._replace(tokenizer=None, workspace={}), [E], Sampling(stop="bc"), **SIZES)


def test_fault_48_hold_back_around_a_special_token():
    """b , <end> c: the special token does not show, so "b,c" is complete; without the last letter all comes out."""
    b, comma, end, c, d = (WORDS.index(word) for word in ("b", ",", "<end>", "c", "d"))
    follow = list(range(len(WORDS)))
    for token, successor in ((3, b), (b, comma), (comma, end), (end, c), (c, d), (d, d)):
        follow[token] = successor
    whole, pieces = both(speller(tuple(follow)), "x", dataclasses.replace(GREEDY, stop="b,c"))
    assert whole.text == "".join(pieces) == "" and whole.stop_reason == "b,c"
    short = dataclasses.replace(GREEDY, stop="b,c", max_tokens=2)
    whole, pieces = both(speller(tuple(follow)), "x", short)
    assert whole.text == "".join(pieces) == "b," and whole.finish_reason == "length"
    whole, _ = both(speller(tuple(follow)), "x", dataclasses.replace(GREEDY, stop="b,d", max_tokens=6))
    assert whole.text == "b,cdd"


def with_bos(params: fnllm.Params) -> fnllm.Params:
    """The same model with a tokenizer that puts a BOS in front, and a template that writes it too."""
    backend = tokenizers.Tokenizer.from_str(params.tokenizer.backend.to_str())
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    template = "<s>{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}e{% endif %}"
    side = {"tokenizer_config.json": json.dumps({"bos_token": "<s>", "chat_template": template})}
    return params._replace(tokenizer=make_tokenizer(backend, side), workspace={})


def test_fault_51_one_bos_however_the_prompt_comes():
    params = with_bos(speller(ROUND))
    chat = [{"role": "user", "content": "xab"}]
    rendered = params.tokenizer.chat_text(chat)
    assert rendered == "<s>xabe"
    done = fnllm.generate(params, [rendered, chat, "xabe"], GREEDY, **SIZES)
    assert [one.prompt_tokens for one in done] == [4, 4, 4]
    assert len({one.token_ids for one in done}) == 1


def test_fault_18_an_empty_text_with_a_bos_is_a_prompt():
    done = fnllm.generate(with_bos(speller(ROUND)), ["", "x"], GREEDY, **SIZES)
    assert [one.prompt_tokens for one in done] == [1, 2]
    assert done[0].token_ids[:3] == (3, AB, CD)


def test_a_character_over_two_tokens_is_never_shown_by_half():
    """The Hugging Face streaming example decodes the newest id alone and shows two replacement characters."""
    first, second = WORDS.index("Ã"), WORDS.index("©")
    follow = list(range(len(WORDS)))
    follow[3], follow[first], follow[second] = first, second, first
    whole, pieces = both(speller(tuple(follow)), "x", dataclasses.replace(GREEDY, max_tokens=5))
    assert pieces[:4] == ["", "é", "", "é"]
    assert whole.text == "éé\ufffd" == "".join(pieces), "a character cut short shows at the end"


def test_eos_stops_without_being_asked_and_n_and_stop_are_used():
    """One engine went past eos outside its interactive mode; another took `stop` and `n` and used neither."""
    params = speller((3, 1, 2, 4, 5, 6, 1))
    done = fnllm.generate(params, ["x", "x"], [GREEDY, dataclasses.replace(GREEDY, n=3, stop="d")], **SIZES)
    assert [one.text for one in done] == ["abcde", "abc", "abc", "abc"]
    assert [one.stop_reason for one in done] == [1, "d", "d", "d"]


def test_a_prompt_too_long_is_an_error_and_no_empty_answer():
    with pytest.raises(ValueError, match="41 tokens"):
        fnllm.generate(speller(ROUND), [[3], [3] * 41], GREEDY, **SIZES)
    done = fnllm.generate(speller(ROUND), [[3], [3] * 41], GREEDY, errors="return", **SIZES)
    assert done[1].finish_reason == "error" and "41 tokens" in str(done[1].error) and done[0].text


def test_fault_89_a_plain_loop_reads_a_stream():
    text = ""
    for chunk in fnllm.stream(speller(ROUND), "x", GREEDY, **SIZES):
        text += chunk.text
    assert text == "abcdexabcdex"


def test_fault_90_different_prompts_in_one_call():
    settings = [GREEDY, dataclasses.replace(GREEDY, max_tokens=1), GREEDY]
    done = fnllm.generate(speller(ROUND), ["x", [CD], "abcd"], settings, **SIZES)
    assert [one.text for one in done] == ["abcdexabcdex", "e", "exabcdexabcd"]
