"""Byte-level BPE (`tokenizer.ggml.model` "gpt2") through the `tokenizers` library.

Owns the table of pre-tokenizers: how text is cut into words before merging. Special and user-defined tokens
are taken out of the text by the caller.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import tokenizers
from tokenizers import models, pre_tokenizers

from common.errors import CorruptDataError, InvalidRequestError, UnsupportedModelError
from common.gguf.special_tokens import SpecialTokens
from common.gguf.vocabulary import TokenType, Vocabulary


@dataclass(frozen=True)
class PreTokenizer:
    """How one family of models cuts text into words (Oniguruma patterns, applied one after the other)."""

    patterns: tuple[str, ...]
    ends: str = ""
    """Characters that end a word whatever follows (a regex class; only needed to cut long texts)."""
    whole_words: bool = False
    """A word that is in the vocabulary is taken as it is, before any merge (as tiktoken does)."""
    add_bos: bool = False
    """Whether a BOS is added where the file does not say."""


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# `\s*[\r\n]+` (white space up to the last line break of a run) without its backtracking, which gives up with
# an error on ten million blanks.
_LINE_BREAKS = r"(?:[^\S\r\n]*+[\r\n]++)++"
_TAIL = rf"{_LINE_BREAKS}|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _tiktoken(digits: str) -> str:
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"


def _cased_words(suffix: str, digits: str) -> str:
    """Words of capitals and then small letters: "someHTTPError" is some|HTTPError."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    words = rf"{lead}{upper}*{lower}+{suffix}|{lead}{upper}+{lower}*{suffix}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"


# The cased letters DeepSeek's tokenizer.json lists (the Unicode category LC of its day, Georgian aside).
_DEEPSEEK_LETTERS = (
    r"A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}"
    r"\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}"
    r"\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}"
    r"\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}"
    r"\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}"
    r"\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}"
    r"\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}"
    r"\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}"
    r"\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}"
    r"\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}"
    r"\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}"
    r"\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}"
    r"\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}"
    r"\x{1E900}-\x{1E943}"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
    r"(?<!\s)\s++$",  # `\s+$`, tried once for a run of blanks and not once for each blank
    r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+",
    r"\p{N}",
)
_DEFAULT = (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

_LLAMA3 = PreTokenizer((_tiktoken(r"\p{N}{1,3}"),), whole_words=True, add_bos=True)
_CL100K = PreTokenizer((_tiktoken(r"\p{N}{1,3}"),))
_QWEN2 = PreTokenizer((_tiktoken(r"\p{N}"),), ends="0-9")
_SMOLLM = PreTokenizer((r"\p{N}", _GPT2), ends="0-9")

# By `tokenizer.ggml.pre`. The names of one row are other models with the same rule.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _CL100K),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("smollm", "minerva-7b"), _SMOLLM),
    **dict.fromkeys(("gpt-2", "mellum", "a.x-4.0"), PreTokenizer((_GPT2,))),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM, ends=r"0-9\r\n"),
    "default": PreTokenizer(_DEFAULT),
    "tekken": PreTokenizer((_cased_words("", r"\p{N}"),), ends="0-9", whole_words=True, add_bos=True),
    "gpt-4o": PreTokenizer((_cased_words(_CONTRACTIONS + "?", r"\p{N}{1,3}"),)),
}


def pre_tokenizer(vocabulary: Vocabulary) -> PreTokenizer:
    """The rule the file names. Raises UnsupportedModelError for one that is unknown or missing."""
    if vocabulary.pre is None:
        raise UnsupportedModelError(
            f"{vocabulary.where}: has no tokenizer.ggml.pre, so how its text is split is unknown; "
            "convert the model again with a current converter"
        )
    if vocabulary.pre not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{vocabulary.where}: tokenizer.ggml.pre {vocabulary.pre!r} is a pre-tokenizer this build does "
            f"not know; it knows {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return PRE_TOKENIZERS[vocabulary.pre]


class BytePairEncoder:
    """Text without special tokens to ids. Characters the vocabulary has no bytes for are left out."""

    # Text is handed over in pieces of about this size: the library keeps some 150 bytes per byte of a text.
    CHUNK_CHARS = 16384

    def __init__(self, vocabulary: Vocabulary) -> None:
        rule = pre_tokenizer(vocabulary)
        self._tokenizer = tokenizers.Tokenizer(_model(vocabulary, rule.whole_words))
        splits = [pre_tokenizers.Split(tokenizers.Regex(p), "isolated") for p in rule.patterns]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
        # Places where the rule begins a new word, whatever stands around them: every rule does before white
        # space that follows a letter or digit.
        after_end = f"(?<=[{rule.ends}])|" if rule.ends else ""
        self._cut = re.compile(after_end + r"(?<=[A-Za-z0-9])(?=\s)")
        self._user_defined = SpecialTokens(
            vocabulary.spellings(vocabulary.ids_of_type(TokenType.USER_DEFINED)), vocabulary.where
        )

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self._user_defined.split(text):
            if isinstance(part, int):
                ids.append(part)
                continue
            for chunk in self._chunks(part):
                ids += self._encode(chunk)
        return ids

    def _chunks(self, text: str) -> Iterator[str]:
        start = 0
        while start + self.CHUNK_CHARS < len(text):
            cut = self._cut.search(text, start + self.CHUNK_CHARS)
            if cut is None:
                break
            yield text[start : cut.start()]
            start = cut.start()
        yield text[start:]

    def _encode(self, text: str) -> list[int]:
        try:
            ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except BaseException as error:
            # The library panics where its regex engine gives up; the class is no Exception and has no name.
            if type(error).__name__ != "PanicException":
                raise
            raise InvalidRequestError(
                f"the text has a run of {len(text)} characters that cannot be split into words: {error}"
            ) from None
        return ids


def _model(vocabulary: Vocabulary, whole_words: bool) -> models.BPE:
    pieces = {
        piece: i
        for i, (piece, kind) in enumerate(zip(vocabulary.pieces, vocabulary.types, strict=True))
        if kind == TokenType.NORMAL and i not in vocabulary.special_ids
    }
    try:
        merges = [(left, right) for left, right in (merge.split(" ", 1) for merge in vocabulary.merges)]
        try:
            return models.BPE(vocab=pieces, merges=merges, ignore_merges=whole_words)
        except Exception:
            # The library wants every merge to make a piece. One that makes a user-defined piece does not
            # (such pieces are taken out of the text before), and nothing could come of it.
            merges = [(a, b) for a, b in merges if a in pieces and b in pieces and a + b in pieces]
            return models.BPE(vocab=pieces, merges=merges, ignore_merges=whole_words)
    except Exception as error:
        raise CorruptDataError(
            f"{vocabulary.where}: tokenizer.ggml.merges or tokens is damaged: {error}"
        ) from error
