"""Token ids to text: what bytes a token stands for, and how a stream of them becomes text.

Text never splits a UTF-8 character; bytes that are not UTF-8 become U+FFFD.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from common.errors import InvalidRequestError
from common.gguf.spm import SPACE
from common.gguf.vocabulary import TokenType, Vocabulary


def _byte_characters() -> dict[int, str]:
    """GPT-2's spelling of bytes as visible characters, as a `str.translate` table back to Latin-1."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    table = {byte: chr(byte) for byte in visible}
    table |= {0x100 + i: chr(byte) for i, byte in enumerate(hidden)}
    return table


_BYTE_CHARACTERS = _byte_characters()


class Detokenizer:
    """The bytes and the text of tokens of one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._byte_level = vocabulary.model == "gpt2"

    def piece(self, token_id: int) -> str:
        """The spelling in the vocabulary, with U+FFFD for bytes that are not UTF-8."""
        return _literal(self._vocabulary.pieces[self._checked(token_id)]).decode("utf-8", "replace")

    def token_bytes(self, token_id: int, *, special: bool = False) -> bytes:
        """The bytes a token stands for in text: none for a special token, or with `special` its spelling."""
        vocabulary = self._vocabulary
        kind = vocabulary.types[self._checked(token_id)]
        piece = vocabulary.pieces[token_id]
        if token_id in vocabulary.special_ids or kind == TokenType.UNUSED:
            return _literal(piece) if special else b""
        if self._byte_level:
            return _literal(piece) if kind == TokenType.USER_DEFINED else _from_byte_level(piece)
        if kind == TokenType.BYTE:
            return _from_byte_piece(piece)
        return _literal(piece.replace(SPACE, " "))

    def max_token_bytes(self) -> int:
        """The most bytes that `token_bytes` gives for a token, special ones spelt out."""
        # No token stands for more bytes than its piece has in the vocabulary: the longest pieces will do.
        sizes = [len(_literal(piece)) for piece in self._vocabulary.pieces]
        most = 0
        for token_id in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
            if sizes[token_id] <= most:
                break
            most = max(most, len(self.token_bytes(token_id, special=True)))
        return most

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`, taken as a whole text: the space that encoding put first is taken away."""
        stream = StreamDecoder(self, skip_special=skip_special)
        return "".join([*map(stream.push, ids), stream.finish()])

    def has_space_prefix_after(self, token_id: int | None) -> bool:
        """Whether encoding puts a space before text that follows this token (None: that begins)."""
        begins_text = token_id is None or self._checked(token_id) in self._vocabulary.special_ids
        return self._vocabulary.add_space_prefix and begins_text

    def _checked(self, token_id: int) -> int:
        if not 0 <= token_id < len(self._vocabulary):
            raise InvalidRequestError(
                f"token id {token_id} is outside the vocabulary of {len(self._vocabulary)} tokens"
            )
        return token_id


class StreamDecoder:
    """Text of tokens as they come. A character is given out with the token that completes it."""

    def __init__(
        self, detokenizer: Detokenizer, *, skip_special: bool = True, after: int | None = None
    ) -> None:
        self._detokenizer = detokenizer
        self._special = not skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = detokenizer.has_space_prefix_after(after)

    def push(self, token_id: int) -> str:
        """The text this token completes, perhaps none."""
        data = self._detokenizer.token_bytes(token_id, special=self._special)
        if self._detokenizer.has_space_prefix_after(token_id):
            self._drop_space = True
        elif data:
            data = data.removeprefix(b" ") if self._drop_space else data
            self._drop_space = False
        return self._utf8.decode(data)

    def finish(self) -> str:
        """U+FFFD for a character that was begun and never completed; else nothing."""
        return self._utf8.decode(b"", final=True)


def _literal(piece: str) -> bytes:
    # A piece that is not UTF-8 comes with surrogates for its bytes (PEP 383).
    return piece.encode("utf-8", "surrogateescape")


def _from_byte_level(piece: str) -> bytes:
    try:
        return piece.translate(_BYTE_CHARACTERS).encode("latin-1")
    except UnicodeEncodeError:
        return _literal(piece)  # not spelled in byte characters: it stands for itself


def _from_byte_piece(piece: str) -> bytes:
    try:
        return bytes.fromhex(piece.removeprefix("<0x").removesuffix(">"))
    except ValueError:
        return _literal(piece)
