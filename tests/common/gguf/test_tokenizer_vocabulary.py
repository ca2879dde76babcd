from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from common.errors import CorruptDataError, UnsupportedModelError
from common.gguf.tokenizer import Tokenizer
from tests.common.gguf.vocabularies import bpe_metadata, sentencepiece_metadata

K = "tokenizer.ggml."


def test_present() -> None:
    assert Tokenizer.present(bpe_metadata())
    assert not Tokenizer.present({})
    assert not Tokenizer.present({K + "model": "no_vocab"})
    assert not Tokenizer.present({K + "model": "none"})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": "bert"}, UnsupportedModelError, "'bert'"),
        ({"model": 7}, CorruptDataError, "model should be str"),
        ({"pre": "martian"}, UnsupportedModelError, "'martian' is a pre-tokenizer this build does not know"),
        ({"pre": None}, UnsupportedModelError, "has no tokenizer.ggml.pre"),
        ({"tokens": None}, CorruptDataError, "tokens is missing or empty"),
        ({"tokens": "abc"}, CorruptDataError, "tokens should be an array"),
        ({"tokens": np.arange(3)}, CorruptDataError, "tokens should hold str"),
        ({"token_type": np.ones(3, np.int32)}, CorruptDataError, "token_type has 3 entries for 446 tokens"),
        ({"token_type": np.full(446, 9, np.int32)}, CorruptDataError, "token_type of token 0 is 9"),
        ({"eos_token_id": 446}, CorruptDataError, "eos_token_id is 446, outside the vocabulary of 446"),
        ({"bos_token_id": -1}, CorruptDataError, "bos_token_id is -1"),
        ({"bos_token_id": True}, CorruptDataError, "bos_token_id should be int"),
        ({"add_bos_token": 1}, CorruptDataError, "add_bos_token should be bool"),
        ({"merges": ["ab"]}, CorruptDataError, "merges or tokens is damaged"),
    ],
)
def test_a_damaged_vocabulary_is_refused(change: dict[str, Any], error: type, message: str) -> None:
    metadata = bpe_metadata()
    for key, value in change.items():
        metadata[K + key] = value
    with pytest.raises(error) as raised:
        Tokenizer.from_metadata(metadata, "m.gguf")
    assert message in str(raised.value)
    assert str(raised.value).startswith("m.gguf: ")


@pytest.mark.parametrize("scores", [None, np.zeros(3, np.float32)])
def test_sentencepiece_needs_scores(scores: Any) -> None:
    with pytest.raises(CorruptDataError, match="scores"):
        Tokenizer.from_metadata(sentencepiece_metadata(scores=scores), "m.gguf")


def test_all_that_ends_a_generation() -> None:
    control = ("<|endoftext|>", "<|im_end|>", "<eos>", "</s>", "<|turn|>", "<|mid|>")
    metadata = bpe_metadata(control=control, user_defined=("[EOT]", "<|eot_id|>"))
    size = len(metadata[K + "tokens"])
    ids = dict(zip((*control, "[EOT]", "<|eot_id|>"), range(size - 8, size), strict=True))
    metadata[K + "eos_token_id"] = ids["<|turn|>"]
    metadata[K + "eom_token_id"] = 5
    tokenizer = Tokenizer.from_metadata(metadata, "m.gguf")
    # "[EOT]" is a user's text here: it is no control token.
    assert tokenizer.eog_ids == {5, *ids.values()} - {ids["<|mid|>"], ids["[EOT]"]}
    assert tokenizer.eos_id == ids["<|turn|>"]


def test_flags_and_their_defaults() -> None:
    bpe = Tokenizer.from_metadata(bpe_metadata(bos_token_id=3), "m.gguf")
    assert (bpe.add_bos, bpe.add_eos, bpe.add_space_prefix) == (False, False, False)
    assert Tokenizer.from_metadata(bpe_metadata("llama-bpe", bos_token_id=3), "m.gguf").add_bos
    assert not Tokenizer.from_metadata(bpe_metadata("llama-bpe"), "m.gguf").add_bos  # it has none
    spm = Tokenizer.from_metadata(sentencepiece_metadata(), "m.gguf")
    assert (spm.add_bos, spm.add_eos, spm.add_space_prefix) == (True, False, True)
    plain = sentencepiece_metadata(add_bos_token=False, add_eos_token=True, add_space_prefix=False)
    spm = Tokenizer.from_metadata(plain, "m.gguf")
    assert (spm.add_bos, spm.add_eos, spm.add_space_prefix) == (False, True, False)
    assert spm.encode("")[-1:] == [2]


def test_llama_ids_may_be_left_out() -> None:
    metadata = sentencepiece_metadata(bos_token_id=None, eos_token_id=None)
    tokenizer = Tokenizer.from_metadata(metadata, "m.gguf")
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
