"""SentencePiece BPE (`tokenizer.ggml.model` "llama") through the `sentencepiece` library.

Owns the way from a GGUF vocabulary back to the ModelProto the library loads. Control tokens are taken out of
the text by the caller; user-defined pieces are the library's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import sentencepiece
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

from common.errors import CorruptDataError
from common.gguf.vocabulary import TokenType, Vocabulary

SPACE = "▁"  # how a piece spells a space


class SentencePieceEncoder:
    """Text without control tokens to ids; each text gets the vocabulary's space prefix."""

    # The library's time grows faster than the text, so a text is handed over in pieces of about this size.
    CHUNK_CHARS = 16384

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._prefix = " " if vocabulary.add_space_prefix else ""
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(_model_proto(vocabulary))
        except Exception as error:
            raise CorruptDataError(f"{vocabulary.where}: the tokenizer cannot be built: {error}") from error

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for chunk in self._chunks(self._prefix + text):
            ids += self._processor.encode(chunk)
        known = len(self._vocabulary)
        return ids if not ids or max(ids) < known else [i for i in ids if i < known]

    def _chunks(self, text: str) -> Iterator[str]:
        """Cut before spaces that no piece reaches over, so that the ids are those of the whole text."""
        start = 0
        position = self.CHUNK_CHARS
        while (cut := text.find(" ", position)) != -1:
            if text[cut - 1] in self._joined_to_space:
                position = cut + 1
                continue
            yield text[start:cut]
            start = cut
            position = start + self.CHUNK_CHARS
        yield text[start:]

    @cached_property
    def _joined_to_space(self) -> frozenset[str]:
        """The characters that stand before a space inside some piece, and the space in both its spellings."""
        spelled = (piece.replace(" ", SPACE) for piece in self._vocabulary.pieces)
        inner = (piece for piece in spelled if SPACE in piece[1:])
        before = (a for piece in inner for a, b in pairwise(piece) if b == SPACE)
        return frozenset((" ", SPACE, *before))


def _model_proto(vocabulary: Vocabulary) -> bytes:
    """The serialised sentencepiece.ModelProto of `vocabulary`.

    Pieces that no text may become (control tokens, and what the library would refuse: empty, repeated or
    invalid ones) go in as control pieces under their number, which keeps the ids.
    """
    model = _model_class()()
    byte_pieces = set(vocabulary.ids_of_type(TokenType.BYTE))
    has_all_bytes = {vocabulary.pieces[i] for i in byte_pieces} == {f"<0x{byte:02X}>" for byte in range(256)}
    unknown_id = vocabulary.unknown_id
    if unknown_id is None:
        unknown_id = next(iter(vocabulary.ids_of_type(TokenType.UNKNOWN)), len(vocabulary))
    seen: set[str] = set()
    add = model.pieces.add
    entries = zip(vocabulary.pieces, vocabulary.scores, vocabulary.types, strict=True)
    for token_id, (spelling, score, kind) in enumerate(entries):
        piece = spelling.replace(" ", SPACE)
        if token_id == unknown_id:
            add(piece=f"<{token_id}>", score=score, type=TokenType.UNKNOWN)
        elif (
            kind in (TokenType.CONTROL, TokenType.UNKNOWN)
            or token_id in vocabulary.special_ids
            or (kind == TokenType.BYTE and not has_all_bytes)
            or not piece
            or piece in seen
            or not _is_unicode(piece)
        ):
            add(piece=f"<{token_id}>", score=score, type=TokenType.CONTROL)
        else:
            seen.add(piece)
            if kind == TokenType.NORMAL:
                add(piece=piece, score=score)
            else:
                add(piece=piece, score=score, type=kind)
    if unknown_id == len(vocabulary):
        add(piece=f"<{unknown_id}>", type=TokenType.UNKNOWN)  # the library insists on one
    model.trainer_spec.model_type = 2  # BPE
    model.trainer_spec.byte_fallback = has_all_bytes
    # The prefix is ours: it comes after a special token too, not only where the text begins.
    model.normalizer_spec.add_dummy_prefix = False
    model.normalizer_spec.remove_extra_whitespaces = False
    serialized: bytes = model.SerializeToString()
    return serialized


def _is_unicode(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text)


# The fields used here of sentencepiece_model.proto, described again in a pool of their own: the generated
# module inside the sentencepiece package needs a newer protobuf than gRPC's.
_DESCRIPTION = """
name: "sentencepiece_model.proto" package: "sentencepiece"
message_type { name: "ModelProto"
  field { number: 1 name: "pieces" type: TYPE_MESSAGE type_name: "SentencePiece" label: LABEL_REPEATED }
  field { number: 2 name: "trainer_spec" type: TYPE_MESSAGE type_name: "TrainerSpec" }
  field { number: 3 name: "normalizer_spec" type: TYPE_MESSAGE type_name: "NormalizerSpec" } }
message_type { name: "SentencePiece"
  field { number: 1 name: "piece" type: TYPE_STRING }
  field { number: 2 name: "score" type: TYPE_FLOAT }
  field { number: 3 name: "type" type: TYPE_INT32 } }
message_type { name: "TrainerSpec"
  field { number: 3 name: "model_type" type: TYPE_INT32 }
  field { number: 35 name: "byte_fallback" type: TYPE_BOOL } }
message_type { name: "NormalizerSpec"
  field { number: 3 name: "add_dummy_prefix" type: TYPE_BOOL }
  field { number: 4 name: "remove_extra_whitespaces" type: TYPE_BOOL } }
"""


@cache
def _model_class() -> Any:
    """The message class of sentencepiece.ModelProto."""
    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_DESCRIPTION, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("sentencepiece.ModelProto"))
