"""Finding special tokens in text: one compiled pattern for all of a vocabulary's spellings.

The leftmost match wins, and of several at one place the longest. What may be looked for, and where, is the
caller's business.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from common.errors import UnsupportedModelError


class SpecialTokens:
    """A set of spellings with their token ids."""

    def __init__(self, ids: Mapping[str, int], where: str) -> None:
        self.max_length = max(map(len, ids), default=0)
        self._ids = dict(ids)
        self._first, self._last = {s[0] for s in ids}, {s[-1] for s in ids}
        self._joined = "\0".join(["", *ids, ""])
        try:
            self._pattern = re.compile(_trie_pattern(sorted(ids)) if ids else r"(?!)")
        except RecursionError:
            raise UnsupportedModelError(
                f"{where}: the special tokens begin with one another more deeply than this build can match"
            ) from None

    def split(self, text: str) -> Iterator[str | int]:
        """`text` in order as plain text (never empty) and token ids."""
        position = 0
        for match in self._pattern.finditer(text):
            if match.start() > position:
                yield text[position : match.start()]
            yield self._ids[match.group()]
            position = match.end()
        if position < len(text):
            yield text[position:]

    def starts(self, text: str) -> Iterator[int]:
        """Every place in `text` where a spelling stands, overlapping ones too."""
        position = 0
        while match := self._pattern.search(text, position):
            yield match.start()
            position = match.start() + 1

    def any_starts_with(self, text: str) -> bool:
        return text[:1] in self._first and "\0" + text in self._joined

    def any_ends_with(self, text: str) -> bool:
        return text[-1:] in self._last and text + "\0" in self._joined

    def any_contains(self, text: str) -> bool:
        return len(text) <= self.max_length and text in self._joined


def _trie_pattern(words: list[str], depth: int = 0) -> str:
    """A pattern for the longest of `words` (sorted, none empty) after the `depth` characters they share.

    A plain alternation would try every word at every "<" of a text, and Gemma 3 has 6,000 of them; as a trie
    each character is looked at once.
    """
    is_word = len(words[0]) == depth
    branches: dict[str, list[str]] = {}
    for word in words[is_word:]:
        branches.setdefault(word[depth], []).append(word)
    patterns = []
    for group in branches.values():
        first, last = group[0], group[-1]  # sorted: what these two share, all share
        shared = depth + 1
        while shared < len(first) and first[shared] == last[shared]:
            shared += 1
        patterns.append(re.escape(first[depth:shared]) + _trie_pattern(group, shared))
    pattern = "|".join(patterns)
    if is_word:
        return f"(?:{pattern})?" if patterns else ""
    return f"(?:{pattern})" if len(patterns) > 1 else pattern
