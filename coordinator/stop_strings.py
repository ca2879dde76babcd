"""Finds the first stop string in an answer's text, however the text is cut into pieces."""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """Text goes in as it comes; what can be no part of a stop string comes out at once.

    The string that is completed first ends the answer (the longest, if several end with one character), just
    as if the text came character by character.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]
        self._held = ""  # may begin a stop string

    def push(self, text: str) -> tuple[str, str]:
        """The text to give out, and the stop string that ends it ("" if none has been found)."""
        if not self._patterns:
            return text, ""
        self._held += text
        for index, character in enumerate(text, len(self._held) - len(text)):
            found = [pattern.stop for pattern in self._patterns if pattern.advance(character)]
            if found:
                stop = max(found, key=len)
                released, self._held = self._held[: index + 1 - len(stop)], ""
                return released, stop
        keep = max(pattern.matched for pattern in self._patterns)
        released = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return released, ""

    def finish(self) -> str:
        """What was held back: no stop string came of it."""
        held, self._held = self._held, ""
        return held


class _Pattern:
    """How much of one string the text's end matches: the automaton of Knuth, Morris and Pratt."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._borders = [0]  # by length: the longest proper prefix that is also the end of that much of it
        for character in stop[1:]:
            self._borders.append(self._next(self._borders[-1], character))

    def advance(self, character: str) -> bool:
        """Whether this character completes the string."""
        self.matched = self._next(self.matched, character)
        return self.matched == len(self.stop)

    def _next(self, matched: int, character: str) -> int:
        while matched and self.stop[matched] != character:
            matched = self._borders[matched - 1]
        return matched + (self.stop[matched] == character)
