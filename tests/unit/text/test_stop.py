"""Stop strings against a search that reads the whole text letter by letter."""

from hypothesis import given, settings
from hypothesis import strategies as st

from fnllm.text import stop

LETTERS = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


def cut(text, stops, include=False, free=0):
    """(text up to the stop string, the stop string): the one that ends first after `free` letters, then the longest."""
    for end in range(free + 1, len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[:end] if include else text[: end - len(longest)], longest
    return text, None


def split(text, cuts):
    places = sorted({c % (len(text) + 1) for c in cuts})
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def run(pieces, stops, include=False):
    state, shown = stop.start(stops, include), []
    for piece in pieces:
        state, text = stop.push(state, piece)
        shown.append(text)
    return state, shown


@settings(max_examples=600, deadline=None)
@given(text=LETTERS, stops=STOPS, include=st.booleans(), cuts=st.lists(st.integers(0, 40), max_size=8))
def test_same_as_reading_letter_by_letter(text, stops, include, cuts):
    state, shown = run(split(text, cuts), stops, include)
    assert ("".join(shown) + stop.flush(state), state.matched) == cut(text, stops, include)


@settings(max_examples=300, deadline=None)
@given(text=LETTERS, stops=STOPS, include=st.booleans(), more=LETTERS)
def test_what_is_shown_is_never_taken_back(text, stops, include, more):
    state, shown = run(text, stops, include)
    final, _ = cut(text + more, stops, include)
    assert final.startswith("".join(shown))


@settings(max_examples=300, deadline=None)
@given(text=LETTERS, stops=STOPS)
def test_no_more_is_held_back_than_must_be(text, stops):
    state, shown = run([text], stops)
    if state.matched is None:
        ends = [n for n in range(1, len(text) + 1) if any(s.startswith(text[-n:]) and len(s) > n for s in stops)]
        assert len(state.held) == max(ends, default=0)
        assert "".join(shown) + state.held == text


@settings(max_examples=300, deadline=None)
@given(first=LETTERS, then=LETTERS, stops=STOPS, include=st.booleans())
def test_a_stop_string_that_ends_before_it_is_armed_is_text(first, then, stops, include):
    state, early = stop.push(stop.start(stops, include), first, armed=False)
    assert state.matched is None
    state, late = stop.push(state, then)
    shown, matched = early + late + stop.flush(state), state.matched
    expected, stopped = cut(first + then, stops, include, free=len(first))
    assert matched == stopped
    assert shown == expected


def test_nothing_follows_a_match():
    state, text = stop.push(stop.start(["b"]), "abc")
    assert (state.matched, text, stop.flush(state)) == ("b", "a", "")
    assert stop.push(state, "more") == (state, "")


def test_of_two_stop_strings_the_one_that_ends_first_wins():
    for pieces in (["xabcd"], list("xabcd"), ["xab", "cd"]):
        state, shown = run(pieces, ["abcd", "bc"])
        assert (state.matched, "".join(shown)) == ("bc", "xa")


def test_of_two_that_end_together_the_longer_wins():
    state, shown = run(["xabc"], ["bc", "abc"])
    assert (state.matched, "".join(shown)) == ("abc", "x")


def test_a_state_can_be_pushed_twice():
    state, _ = stop.push(stop.start(["bc"]), "ab")
    assert stop.push(state, "c")[0].matched == "bc"
    assert stop.push(state, "d")[1] == "bd"


def test_long_repetitive_text_costs_little():
    # the beginning of a stop string at every letter is the worst case
    state, shown = run(["a" * 50] * 200, ["a" * 999 + "b"])
    assert (len("".join(shown)), len(state.held)) == (200 * 50 - 999, 999)
