"""From new ids to a request's text: stop strings across tokens, special tokens, the end of a request."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fnllm.sampling import Sampling
from fnllm.text import output


def run(tokenizer, ids, sampling, groups=1, stop_id=None):
    """(pieces shown, ids kept, stop string): as a stream, `groups` ids at a time."""
    state, shown, kept = output.begin(tokenizer, sampling), [], []
    for at in range(0, len(ids), groups):
        state, text, used = output.feed(state, ids[at : at + groups])
        shown.append(text)
        kept += ids[at : at + used]
        if state.matched is not None:
            break
    state, text = output.finish(state, stop_id)
    return [*shown, text], kept, state.matched


def ids_of(tokenizer, *tokens):
    return [tokenizer.token_id(token) for token in tokens]


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_fault_46_a_stop_string_across_tokens_is_found_and_never_shown(byte_level, groups):
    ids = ids_of(byte_level, "x", "ab", "cd", "e")
    shown, kept, matched = run(byte_level, ids, Sampling(stop="bc"), groups)
    assert "".join(shown) == "xa"
    assert not any("b" in piece for piece in shown)
    assert matched == "bc"
    assert kept == ids[:3]  # up to and including the token that completed it


@pytest.mark.parametrize(("include", "text"), [(False, "xa"), (True, "xabc")])
def test_fault_47_text_and_ids_agree_with_and_without_include(byte_level, include, text):
    ids = ids_of(byte_level, "x", "ab", "cd", "e")
    for groups in (1, 3):
        shown, kept, _ = run(byte_level, ids, Sampling(stop="bc", include_stop=include), groups)
        assert ("".join(shown), kept) == (text, ids[:3])


@pytest.mark.parametrize(("include", "text"), [(False, "xab"), (True, "xabe")])
def test_fault_47_the_same_rule_for_stop_ids(byte_level, include, text):
    *ids, last = ids_of(byte_level, "x", "ab", "e")
    shown, _, _ = run(byte_level, ids, Sampling(include_stop=include, stop_token_ids=[last]), stop_id=last)
    assert "".join(shown) == text


def test_a_special_stop_token_never_shows(byte_level):
    shown, _, _ = run(
        byte_level, ids_of(byte_level, "x"), Sampling(include_stop=True), stop_id=byte_level.token_id("<|im_end|>")
    )
    assert "".join(shown) == "x"


@pytest.mark.parametrize(("include", "text"), [(False, "xb"), (True, "xb<|im_end|>")])
def test_a_special_token_named_as_stop_string_stops_though_it_never_shows(byte_level, include, text):
    ids = ids_of(byte_level, "x", "b", "<|im_end|>", "e")
    for stops in ("<|im_end|>", ["bc", "<|im_end|>"]):  # with and without text held back before it
        shown, kept, matched = run(byte_level, ids, Sampling(stop=stops, include_stop=include))
        assert ("".join(shown), kept, matched) == (text, ids[:3], "<|im_end|>")
    shown, kept, matched = run(byte_level, ids, Sampling(stop="<|im_end|>", min_tokens=4))
    assert ("".join(shown), kept, matched) == ("xbe", ids, None)


def test_fault_48_hold_back_neither_loses_text_nor_splits_a_special_token(byte_level):
    ids = ids_of(byte_level, "a", "b", ",", "<|im_start|>", "b", ",", "<think>", "b", ",")
    shown, kept, matched = run(byte_level, ids, Sampling(stop="b,c"))
    assert "".join(shown) == byte_level.decode(ids) == "ab,b,<think>b,"
    assert (kept, matched) == (ids, None)
    assert [piece for piece in shown if "think" in piece] == ["b,<think>"]  # it came whole, with what waited


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    stops=st.lists(st.text("abcdhé ", min_size=1, max_size=3), max_size=3),
    include=st.booleans(),
    groups=st.integers(1, 5),
)
def test_text_is_the_decoded_ids_cut_at_the_stop_string(any_tiny, data, stops, include, groups):
    ids = data.draw(st.lists(st.integers(0, any_tiny.num_ids - 1), max_size=25))
    shown, kept, matched = run(any_tiny, ids, Sampling(stop=stops, include_stop=include), groups)
    text, whole = "".join(shown), any_tiny.decode(kept)
    assert kept == ids[: len(kept)]
    if matched is None:
        assert (text, kept) == (whole, ids)
        assert not any(s in whole for s in stops)
    else:
        assert matched in whole
        assert whole.startswith(text)
        assert text.endswith(matched) if include else whole.startswith(text + matched)
        assert not any(s in (text[:-1] if include else text) for s in stops)
    assert (text, kept, matched) == (
        "".join(run(any_tiny, ids, Sampling(stop=stops, include_stop=include))[0]),
        *run(any_tiny, ids, Sampling(stop=stops, include_stop=include))[1:],
    )


def test_no_stop_string_ends_the_request_before_min_tokens(byte_level):
    ids = ids_of(byte_level, "x", "e", "x", "e", "x")
    shown, kept, matched = run(byte_level, ids, Sampling(stop="e", min_tokens=3))
    assert ("".join(shown), kept, matched) == ("xex", ids[:4], "e")
    shown, kept, matched = run(byte_level, ids, Sampling(stop="e", min_tokens=2))
    assert ("".join(shown), kept, matched) == ("x", ids[:2], "e")


def test_held_text_comes_out_at_the_end(byte_level):
    shown, _, matched = run(byte_level, ids_of(byte_level, "x", "ab"), Sampling(stop="bc"))
    assert (shown, matched) == (["x", "a", "b"], None)


def test_a_stop_string_in_the_text_that_waited_for_the_end(byte_fallback):
    ids = ids_of(byte_fallback, "a", "<0x62>", "<0x63>")  # "abc", of which the last two wait for more bytes
    shown, kept, matched = run(byte_fallback, ids, Sampling(stop="bc"))
    assert ("".join(shown), kept, matched) == ("a", ids, "bc")
    ended = [*ids, *ids_of(byte_fallback, "</s>")]
    shown, kept, matched = run(byte_fallback, ended, Sampling(stop=["</s>", "bc"]))
    assert ("".join(shown), kept, matched) == ("a", ended, "bc"), "it ended before the special token came"


def test_without_a_tokenizer_there_are_ids_and_no_text():
    assert run(None, [3, 1, 2], Sampling(), groups=2) == (["", "", ""], [3, 1, 2], None)


def test_after_a_match_no_id_is_used(byte_level):
    state, _, used = output.feed(output.begin(byte_level, Sampling(stop="x")), ids_of(byte_level, "x", "e"))
    assert (state.matched, used) == ("x", 1)
    assert output.feed(state, ids_of(byte_level, "e")) == (state, "", 0)
    assert output.finish(state) == (state, "")
