"""Values on a command line, for argparse: a wrong one is told in words, with what would be right."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable


def whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text[:60]!r} is not a whole number, such as 8") from None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text[:60]!r} is not a number, such as 0.5") from None


def at_least(least: int) -> Callable[[str], int]:
    """Whole numbers from `least` on."""

    def read(text: str) -> int:
        value = whole_number(text)
        if value < least:
            raise ArgumentTypeError(f"{text[:60]} is not at least {least}")
        return value

    return read
