"""Text to token ids and back, as the vocabulary inside a GGUF file says.

Brings together the parts: `vocabulary` (what the file holds), `bpe` and `spm` (text to ids), `special_tokens`
(taking control tokens out of text) and `detokenizer` (ids to text). Knows nothing of chat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from common.errors import InvalidRequestError
from common.gguf.bpe import BytePairEncoder, pre_tokenizer
from common.gguf.detokenizer import Detokenizer, StreamDecoder
from common.gguf.special_tokens import SpecialTokens
from common.gguf.spm import SentencePieceEncoder
from common.gguf.vocabulary import Vocabulary, vocabulary_from_metadata

__all__ = ["StreamDecoder", "Tokenizer"]

# Phi-3's special tokens swallow the white space after them; a GGUF file has no field that says so.
_STRIPPING_ARCHITECTURE = "phi3"
_NOT_STRIPPING = ("<unk>", "<s>", "<|endoftext|>")


class Tokenizer:
    """The tokenizer of one model. Methods may be called from several threads."""

    def __init__(self, vocabulary: Vocabulary, *, strips_after_special: bool = False) -> None:
        self._vocabulary = vocabulary
        self._detokenizer = Detokenizer(vocabulary)
        self._encoder: BytePairEncoder | SentencePieceEncoder
        if vocabulary.model == "gpt2":
            default_add_bos = pre_tokenizer(vocabulary).add_bos
            self._encoder = BytePairEncoder(vocabulary)
        else:
            default_add_bos = True
            self._encoder = SentencePieceEncoder(vocabulary)
        self.vocab_size = len(vocabulary)
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.eog_ids = vocabulary.eog_ids
        wants_bos = default_add_bos if vocabulary.add_bos is None else vocabulary.add_bos
        self.add_bos = wants_bos and self.bos_id is not None
        self.add_eos = vocabulary.add_eos and self.eos_id is not None
        self.add_space_prefix = vocabulary.add_space_prefix
        # One character alone is never taken for a special token: a border inside it could not be drawn.
        spellings = {s: i for s, i in vocabulary.spellings(vocabulary.special_ids).items() if len(s) > 1}
        self.special_tokens = SpecialTokens(spellings, vocabulary.where)
        self._stripping = (
            frozenset(spellings.values()) - {spellings.get(s) for s in _NOT_STRIPPING}
            if strips_after_special
            else frozenset()
        )

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], where: str) -> Tokenizer:
        """The tokenizer of the file whose metadata this is; `where` names the file in messages.

        Raises UnsupportedModelError for a tokenizer model or pre-tokenizer this build does not know,
        CorruptDataError for a vocabulary that contradicts itself.
        """
        vocabulary = vocabulary_from_metadata(metadata, where)
        strips = (
            metadata.get("general.architecture") == _STRIPPING_ARCHITECTURE and vocabulary.model == "llama"
        )
        return cls(vocabulary, strips_after_special=strips)

    @staticmethod
    def present(metadata: Mapping[str, Any]) -> bool:
        """Whether the file has a tokenizer at all."""
        return metadata.get("tokenizer.ggml.model", "none") not in ("none", "no_vocab")

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """The ids of `text`; with `add_special` between the BOS and EOS the file asks for.

        Spelled-out special tokens ("<|im_end|>") are text unless `parse_special`. Raises InvalidRequestError
        for text that is not Unicode (lone surrogates).
        """
        return self._encode([text], add_bos=add_special, add_eos=add_special, parse_special=parse_special)

    def encode_segments(self, segments: Sequence[str], *, add_bos: bool = True) -> list[int]:
        """The ids of the segments joined into one text, special tokens parsed only inside a segment.

        The border between two segments has no other effect: pieces form across it as in the whole text.
        With `add_bos` the ids begin with one BOS if the file asks for one.
        """
        return self._encode(segments, add_bos=add_bos, add_eos=False, parse_special=True)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; InvalidRequestError for an id outside the vocabulary."""
        return self._detokenizer.decode(ids, skip_special=skip_special)

    def piece(self, token_id: int) -> str:
        """The vocabulary's spelling of a token."""
        return self._detokenizer.piece(token_id)

    def token_bytes(self, token_id: int, *, special: bool = False) -> bytes:
        """The bytes a token stands for in text; those of a special token only with `special`."""
        return self._detokenizer.token_bytes(token_id, special=special)

    def max_token_bytes(self) -> int:
        """The most bytes that `token_bytes` gives for a token, special ones spelt out."""
        return self._detokenizer.max_token_bytes()

    def stream_decoder(self, *, skip_special: bool = True, after: int | None = None) -> StreamDecoder:
        """A decoder for tokens that come one by one, after the token `after` (None: at a text's beginning).

        Where a SentencePiece text begins, the space that encoding puts there is taken away; text that goes
        on from a prompt keeps its space, so give the prompt's last token.
        """
        return StreamDecoder(self._detokenizer, skip_special=skip_special, after=after)

    def _encode(
        self, segments: Sequence[str], *, add_bos: bool, add_eos: bool, parse_special: bool
    ) -> list[int]:
        for segment in segments:
            _check_unicode(segment)
        parts = chain.from_iterable(map(self.special_tokens.split, segments)) if parse_special else segments
        ids: list[int] = []
        text: list[str] = []  # since the last special token

        def flush() -> None:
            joined = "".join(text)
            text.clear()
            if ids and ids[-1] in self._stripping:
                joined = joined.lstrip()
            if joined:
                ids.extend(self._encoder.encode(joined))

        for part in parts:
            if isinstance(part, str):
                text.append(part)
            else:
                flush()
                ids.append(part)
        flush()
        if add_bos and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        if add_eos and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the text is not valid Unicode: it has a lone surrogate at character {error.start}"
        ) from None
