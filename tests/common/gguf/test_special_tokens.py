from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UnsupportedModelError
from common.gguf.special_tokens import SpecialTokens

WORDS = st.lists(st.text("ab<", min_size=1, max_size=5), unique=True, max_size=8)


def leftmost_longest(words: list[str], text: str) -> list[str | int]:
    """What `split` should give, written the slow way."""
    parts: list[str | int] = []
    plain = ""
    position = 0
    while position < len(text):
        found = max((w for w in words if text.startswith(w, position)), key=len, default="")
        if found:
            parts += [plain, words.index(found)] if plain else [words.index(found)]
            plain = ""
        else:
            plain += text[position]
        position += len(found) or 1
    return [*parts, plain] if plain else parts


@settings(max_examples=60, deadline=None)
@given(WORDS, st.text("ab<", max_size=30))
def test_split_takes_the_leftmost_longest(words: list[str], text: str) -> None:
    tokens = SpecialTokens({word: i for i, word in enumerate(words)}, "m.gguf")
    assert list(tokens.split(text)) == leftmost_longest(words, text)


@settings(max_examples=60, deadline=None)
@given(WORDS, st.text("ab<", max_size=30))
def test_starts_are_all_places(words: list[str], text: str) -> None:
    tokens = SpecialTokens({word: i for i, word in enumerate(words)}, "m.gguf")
    assert list(tokens.starts(text)) == [i for i in range(len(text)) if text.startswith(tuple(words), i)]


@settings(max_examples=60, deadline=None)
@given(WORDS, st.text("ab<", min_size=1, max_size=5))
def test_parts_of_spellings(words: list[str], text: str) -> None:
    tokens = SpecialTokens({word: i for i, word in enumerate(words)}, "m.gguf")
    assert tokens.any_starts_with(text) == any(word.startswith(text) for word in words)
    assert tokens.any_ends_with(text) == any(word.endswith(text) for word in words)
    assert tokens.any_contains(text) == any(text in word for word in words)


def test_thousands_of_tokens_and_pattern_characters() -> None:
    words = [f"<unused{i}>" for i in range(6000)] + ["[.*]", "a|b", "(?:", "\n", "\n\n"]
    tokens = SpecialTokens({word: i for i, word in enumerate(words)}, "m.gguf")
    assert list(tokens.split("x<unused599>y[.*]a|b\n\n\n(?:<unused6000>")) == [
        "x", 599, "y", 6000, 6001, 6004, 6003, 6002, "<unused6000>",
    ]  # fmt: skip


def test_tokens_that_nest_too_deeply_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"^m\.gguf: the special tokens begin with one another"):
        SpecialTokens({"a" * n: n for n in range(1, 2000)}, "m.gguf")
