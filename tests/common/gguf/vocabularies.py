"""Small vocabularies for tests, trained here, as the metadata a GGUF file would hold."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import sentencepiece
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from common.gguf.vocabulary import TokenType

_SENTENCES = (
    "The quick brown fox jumps over the lazy dog. ",
    "I don't know 1234567 things, but I'll count them: 12, 34 and 567!\n",
    "def add(a, b):\n    return a + b\n\n",
    "Ein großes Äpfelchen, нещо на Български, 我想在苹果工作。 🦙🚀\n",
    "HTTPServer camelCase  two   three    spaces\t\ttabs >  </p>",
)
CORPUS = [*_SENTENCES * 20, *(f"{a} {b}" for a in _SENTENCES for b in _SENTENCES)]
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@cache
def trained_bpe() -> tokenizers.Tokenizer:
    """A byte-level BPE with GPT-2's words, trained on CORPUS."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=sorted(alphabet), show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def bpe_metadata(
    pre: str | None = "gpt-2",
    *,
    control: Sequence[str] = CHATML,
    user_defined: Sequence[str] = (),
    **extra: Any,
) -> dict[str, Any]:
    """The vocabulary of `trained_bpe`, then `control` and `user_defined` tokens.

    `extra` adds tokenizer.ggml keys or replaces them (None: as if it were missing).
    """
    model = json.loads(trained_bpe().to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    types = [TokenType.NORMAL] * len(pieces)
    pieces += [*control, *user_defined]
    types += [TokenType.CONTROL] * len(control) + [TokenType.USER_DEFINED] * len(user_defined)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    keys = {"model": "gpt2", "tokens": pieces, "token_type": np.array(types, np.int32), "merges": merges}
    return _with_prefix({**keys, **({} if pre is None else {"pre": pre}), **extra})


@cache
def trained_sentencepiece(user_defined: tuple[str, ...] = ()) -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece BPE with byte fallback, trained on CORPUS, with the library's leading space."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        user_defined_symbols=list(user_defined),
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_metadata(
    user_defined: tuple[str, ...] = (), *, control: Sequence[str] = (), **extra: Any
) -> dict[str, Any]:
    """The vocabulary of `trained_sentencepiece`, then `control` tokens; `extra` as for `bpe_metadata`."""
    trained = trained_sentencepiece(user_defined)
    count = trained.get_piece_size()

    def kind(i: int) -> TokenType:
        if trained.is_unknown(i):
            return TokenType.UNKNOWN
        if trained.is_control(i):
            return TokenType.CONTROL
        if trained.is_byte(i):
            return TokenType.BYTE
        return TokenType.USER_DEFINED if trained.id_to_piece(i) in user_defined else TokenType.NORMAL

    types = [kind(i) for i in range(count)] + [TokenType.CONTROL] * len(control)
    scores = [trained.get_score(i) for i in range(count)] + [0.0] * len(control)
    keys = {
        "model": "llama",
        "tokens": [trained.id_to_piece(i) for i in range(count)] + list(control),
        "scores": np.array(scores, np.float32),
        "token_type": np.array(types, np.int32),
        "bos_token_id": trained.bos_id(),
        "eos_token_id": trained.eos_id(),
        "unknown_token_id": trained.unk_id(),
    }
    return _with_prefix({**keys, **extra})


def _with_prefix(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {"tokenizer.ggml." + key: value for key, value in keys.items()}
