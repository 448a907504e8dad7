"""Streaming text against decoding everything at once, for tiny vocabularies of each kind and published ones."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fnllm.text import detokenize

PER_KIND = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def pieces(tokenizer, ids, skip_special_tokens=True, sizes=()):
    """The streamed pieces, the ids cut into groups of these sizes (then one by one), the flushed rest last."""
    detok, found, at = detokenize.start(tokenizer, skip_special_tokens), [], 0
    sizes = list(sizes)
    while at < len(ids):
        size = sizes.pop(0) if sizes else 1
        detok, text = detokenize.push(detok, ids[at : at + size])
        found.append(text)
        at += size
    return [*found, detokenize.flush(detok)]


def check(tokenizer, ids, skip, sizes=()):
    assert "".join(pieces(tokenizer, ids, skip, sizes)) == tokenizer.decode(ids, skip_special_tokens=skip)


@PER_KIND
@given(data=st.data(), skip=st.booleans(), sizes=st.lists(st.integers(0, 4), max_size=5))
def test_joined_pieces_are_the_text_of_all_ids(any_tiny, data, skip, sizes):
    # past the highest id too: ids that no token has
    ids = data.draw(st.lists(st.integers(0, any_tiny.num_ids + 3), max_size=30))
    check(any_tiny, ids, skip, sizes)


@PER_KIND
@given(text=st.text(max_size=20), skip=st.booleans())
def test_text_comes_back_whole(byte_level, byte_fallback, text, skip):
    for tokenizer in (byte_level, byte_fallback):
        check(tokenizer, tokenizer.encode(text), skip)
    shown = pieces(byte_level, byte_level.encode(text, add_special_tokens=False), False)
    assert "".join(shown) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in shown)


@PER_KIND
@given(raw=st.lists(st.binary(max_size=6), max_size=8), skip=st.booleans())
def test_bytes_that_are_no_text(byte_level, byte_fallback, raw, skip):
    letters = {byte: letter for letter, byte in detokenize.BYTE_LETTERS.items()}
    for chunk in (b"".join(raw), b"a".join(raw), "é".encode().join(raw)):
        check(byte_level, [byte_level.token_id(letters[byte]) for byte in chunk], skip)
        ids = [byte_fallback.token_id(f"<0x{byte:02X}>") for byte in chunk]
        check(byte_fallback, ids, skip)
        check(byte_fallback, [*ids, byte_fallback.token_id("▁a"), *ids], skip)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), skip=st.booleans())
def test_published_tokenizers_random_ids(real, data, skip):
    _, tokenizer = real
    check(tokenizer, data.draw(st.lists(st.integers(0, tokenizer.num_ids + 300), max_size=25)), skip)
    check(tokenizer, tokenizer.encode(data.draw(st.text(max_size=15))), skip)


@pytest.mark.parametrize("text", ["👩‍👩‍👧‍👦", "a🇺🇳b", "e\u0301", "㊙\ufe0f字", "\ufffd", "x\ufffd\ufffdy"])
def test_each_piece_has_whole_characters(byte_level, text):
    shown = pieces(byte_level, byte_level.encode(text))
    assert "".join(shown) == text
    assert sum("\ufffd" in piece for piece in shown) == text.count("\ufffd")


def test_a_character_comes_with_its_last_byte(byte_level):
    ids = byte_level.encode("é!", add_special_tokens=False)
    assert pieces(byte_level, ids) == ["", "é", "!", ""]


def test_a_character_cut_short_shows_at_the_end(byte_level):
    assert pieces(byte_level, byte_level.encode("a👍", add_special_tokens=False)[:3]) == ["a", "", "", "\ufffd"]


def test_a_token_may_end_one_character_and_begin_the_next(byte_level):
    ids = byte_level.encode("éé", add_special_tokens=False)
    assert [byte_level.token(i) for i in ids] == ["Ã", "©Ã", "©"]
    assert pieces(byte_level, ids) == ["", "é", "é", ""]


def test_special_tokens_show_only_when_asked(byte_level):
    ids = byte_level.encode("<|im_start|>he<think><|im_end|>naïve tag", add_special_tokens=False)
    assert "".join(pieces(byte_level, ids)) == "he<think>naïve tag"
    assert "".join(pieces(byte_level, ids, False)) == "<|im_start|>he<think><|im_end|>naïve tag"


def test_the_state_does_not_grow(any_tiny):
    detok = detokenize.start(any_tiny)
    usual = [i for i in range(any_tiny.num_ids) if not any_tiny.token(i).startswith("<0x")]
    replacement = any_tiny.token_id("\ufffd")
    for id in [*usual * 20, *[replacement] * (100 if replacement is not None else 0)]:
        detok, _ = detokenize.push(detok, (id,))
        assert len(detok.tail) <= 3 and len(detok.context) <= 1 and len(detok.waiting) <= detokenize.MAX_WAIT


def test_a_state_can_be_pushed_twice(byte_level):
    before, _ = detokenize.push(detokenize.start(byte_level), byte_level.encode("é", add_special_tokens=False)[:1])
    last = byte_level.encode("é", add_special_tokens=False)[1]
    assert detokenize.push(before, (last,))[1] == "é"
    assert detokenize.push(before, (last,))[1] == "é"
