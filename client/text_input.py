"""Text that comes from outside: files, standard input, arguments. Invalid UTF-8 is refused with its place."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from common.errors import InvalidRequestError


def decode_utf8(data: bytes, source: str) -> str:
    """`data` as text without a byte order mark. Raises InvalidRequestError naming source and offset."""
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"{source}: invalid UTF-8 at byte {error.start} (0x{data[error.start]:02x}); "
            "convert the text to UTF-8"
        ) from error


def read_file(path: str) -> str:
    """A file's text; "-" is standard input."""
    if path == "-":
        return read_stdin()
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InvalidRequestError(f"cannot read {path}: {error.strerror}") from error
    return decode_utf8(data, path)


def read_stdin() -> str:
    return decode_utf8(sys.stdin.buffer.read(), "standard input")


def argument_text(argument: str) -> str:
    """A command-line argument, whose bytes may be no text at all."""
    return decode_utf8(os.fsencode(argument), "the argument")
