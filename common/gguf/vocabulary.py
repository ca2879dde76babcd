"""The vocabulary of a GGUF file: pieces, types, scores, special ids and flags, read and checked.

It knows the `tokenizer.ggml.*` keys and nothing of how text becomes tokens; `bpe`, `spm` and `tokenizer`
build on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from common.errors import CorruptDataError, UnsupportedModelError

_PREFIX = "tokenizer.ggml."


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`, the piece types of SentencePiece."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Names that end a turn or a text whatever key names them: models are converted with one EOS, but many stop
# with another token (Llama 3 has <|eot_id|> beside <|end_of_text|>).
_END_NAMES = frozenset(
    {
        "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|end|>", "<|endoftext|>",
        "<end_of_turn>", "<|end_of_turn|>", "<end_of_utterance>", "<｜end▁of▁sentence｜>",
        "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
    }
)  # fmt: skip
# These are also ordinary text ("</s>" is an HTML tag, and a plain piece of Qwen2 and Gemma 3): they count
# only where the file marks them as control tokens.
_END_NAMES_IF_CONTROL = frozenset({"</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"})


@dataclass(frozen=True)
class Vocabulary:
    """Pieces by token id, and the flags that steer encoding. Ids are checked to lie inside the vocabulary."""

    where: str
    """What to call the file in messages."""
    model: str
    """`tokenizer.ggml.model`: "llama" (SentencePiece BPE) or "gpt2" (byte-level BPE)."""
    pre: str | None
    """`tokenizer.ggml.pre`, the pre-tokenizer of a byte-level BPE."""
    pieces: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]
    """Empty for "gpt2"."""
    merges: Sequence[str]
    """Empty for "llama"."""
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    eog_ids: frozenset[int]
    add_bos: bool | None
    """None where the file does not say; the default depends on the tokenizer."""
    add_eos: bool
    add_space_prefix: bool
    special_ids: frozenset[int]
    """Control and unknown pieces and all that end a generation: they stand for no text."""

    def __len__(self) -> int:
        return len(self.pieces)

    def ids_of_type(self, token_type: TokenType) -> list[int]:
        return [i for i, t in enumerate(self.types) if t == token_type]

    def spellings(self, ids: Iterable[int]) -> dict[str, int]:
        """The pieces of `ids` to look for in text, each with its lowest id; none are empty or very long."""
        longest = 256  # of real ones: about 50
        return {self.pieces[i]: i for i in sorted(ids, reverse=True) if 0 < len(self.pieces[i]) <= longest}


def vocabulary_from_metadata(metadata: Mapping[str, Any], where: str) -> Vocabulary:
    """Read and check the `tokenizer.ggml.*` keys.

    Raises UnsupportedModelError for a tokenizer model this build does not know, CorruptDataError for arrays
    of unequal length, values of the wrong kind or ids outside the vocabulary.
    """
    keys = _Keys(metadata, where)
    model = keys.get("model", str)
    if model not in ("llama", "gpt2"):
        raise UnsupportedModelError(
            f"{where}: {_PREFIX}model is {model!r}; this build reads 'llama' (SentencePiece) and 'gpt2' "
            "(byte-level BPE)"
        )
    pieces = keys.array("tokens", str)
    if not pieces:
        raise CorruptDataError(f"{where}: {_PREFIX}tokens is missing or empty")
    types = keys.array("token_type", int, len(pieces)) or [int(TokenType.NORMAL)] * len(pieces)
    if min(types) < TokenType.NORMAL or max(types) > TokenType.BYTE:
        bad = next(i for i, t in enumerate(types) if not TokenType.NORMAL <= t <= TokenType.BYTE)
        raise CorruptDataError(f"{where}: {_PREFIX}token_type of token {bad} is {types[bad]}, not 1 to 6")
    sentencepiece = model == "llama"
    scores = keys.array("scores", float, len(pieces)) if sentencepiece else []
    if sentencepiece and not scores:
        raise CorruptDataError(f"{where}: {_PREFIX}scores is missing; a SentencePiece vocabulary needs it")

    # A Llama 2 file may leave these two out.
    has_llama_ids = sentencepiece and list(pieces[1:3]) == ["<s>", "</s>"]
    bos_id = keys.token_id("bos_token_id", len(pieces), 1 if has_llama_ids else None)
    eos_id = keys.token_id("eos_token_id", len(pieces), 2 if has_llama_ids else None)
    ends = {eos_id, keys.token_id("eot_token_id", len(pieces)), keys.token_id("eom_token_id", len(pieces))}
    eog_ids = frozenset(i for i in ends if i is not None) | {
        i
        for i, piece in enumerate(pieces)
        if piece in _END_NAMES or (piece in _END_NAMES_IF_CONTROL and types[i] == TokenType.CONTROL)
    }
    unspoken = (TokenType.CONTROL, TokenType.UNKNOWN)
    space_prefix = keys.get("add_space_prefix", bool)
    return Vocabulary(
        where=where,
        model=model,
        pre=keys.get("pre", str),
        pieces=pieces,
        types=types,
        scores=scores,
        merges=[] if sentencepiece else keys.array("merges", str),
        bos_id=bos_id,
        eos_id=eos_id,
        unknown_id=keys.token_id("unknown_token_id", len(pieces)),
        eog_ids=eog_ids,
        add_bos=keys.get("add_bos_token", bool),
        add_eos=bool(keys.get("add_eos_token", bool)),
        add_space_prefix=sentencepiece and space_prefix is not False,
        special_ids=eog_ids | {i for i, t in enumerate(types) if t in unspoken},
    )


class _Keys:
    """`tokenizer.ggml.*` with the kind of each value checked."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self._metadata = metadata
        self._where = where

    def get(self, name: str, kind: type) -> Any:
        value = self._metadata.get(_PREFIX + name)
        if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise CorruptDataError(
                f"{self._where}: {_PREFIX}{name} should be {kind.__name__}, not {type(value).__name__}"
            )
        return value

    def array(self, name: str, kind: type, length: int | None = None) -> list[Any]:
        """The array as a list (empty where the key is absent), all of `kind`, of `length` where given."""
        value = self._metadata.get(_PREFIX + name)
        if value is None:
            return []
        if isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
            raise CorruptDataError(f"{self._where}: {_PREFIX}{name} should be an array")
        values = value if isinstance(value, list) else value.tolist()
        if not all(isinstance(v, kind) for v in values):
            raise CorruptDataError(f"{self._where}: {_PREFIX}{name} should hold {kind.__name__} values")
        if length is not None and len(values) != length:
            raise CorruptDataError(
                f"{self._where}: {_PREFIX}{name} has {len(values)} entries for {length} tokens"
            )
        return values

    def token_id(self, name: str, vocab_size: int, default: int | None = None) -> int | None:
        value = self.get(name, int)
        if value is not None and not 0 <= value < vocab_size:
            raise CorruptDataError(
                f"{self._where}: {_PREFIX}{name} is {value}, outside the vocabulary of {vocab_size} tokens"
            )
        return default if value is None else int(value)
