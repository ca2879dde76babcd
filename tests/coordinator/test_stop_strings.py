"""Stop strings are found the same however the text is cut, and no more is held back than must be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.stop_strings import StopStrings


def test_a_stop_string_across_pieces_is_found_and_not_given_out() -> None:
    stops = StopStrings(["###"])
    assert stops.push("one #") == ("one ", "")
    assert stops.push("#") == ("", "")
    assert stops.push("# two") == ("", "###")


def test_text_is_released_as_soon_as_it_can_begin_nothing() -> None:
    stops = StopStrings(["</end>"])
    assert stops.push("a </en") == ("a ", "")
    assert stops.push("x <") == ("</enx ", "")
    assert stops.finish() == "<"
    assert stops.finish() == ""


def test_a_match_may_begin_inside_a_failed_one() -> None:
    stops = StopStrings(["aab"])
    assert stops.push("aa") == ("", "")
    assert stops.push("a") == ("a", "")
    assert stops.push("b") == ("", "aab")


def test_the_string_completed_first_wins_and_of_those_the_longest() -> None:
    assert StopStrings(["abcd", "bc"]).push("abcd") == ("a", "bc")
    assert StopStrings(["c", "abc", "bc"]).push("xabc") == ("x", "abc")


def test_without_stop_strings_all_passes() -> None:
    stops = StopStrings([])
    assert stops.push("any text") == ("any text", "")
    assert stops.finish() == ""


def by_hand(text: str, stops: list[str]) -> tuple[str, str]:
    """What is given out of the whole text, and the stop string that ends it."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, ""


@given(
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_any_cut_gives_what_the_whole_text_gives(pieces: list[str], wanted: list[str]) -> None:
    stops = StopStrings(wanted)
    released, given_in = "", ""
    for piece in pieces:
        given_in += piece
        text, stop = stops.push(piece)
        released += text
        if stop:
            assert (released, stop) == by_hand(given_in, wanted)
            return
        held = given_in.removeprefix(released)
        assert given_in == released + held
        longest = max(
            (n for n in range(len(given_in) + 1) if n and any(s.startswith(given_in[-n:]) for s in wanted)),
            default=0,
        )
        assert len(held) == longest
    assert (released + stops.finish(), "") == by_hand(given_in, wanted)


@pytest.mark.parametrize("length", [1, 2, 1000])
def test_long_repetitive_strings(length: int) -> None:
    stops = StopStrings(["a" * length])
    released, stop = stops.push("a" * (length - 1) + "b" + "a" * length + "tail")
    assert (released, stop) == ("a" * (length - 1) + "b", "a" * length)
