"""SentencePiece from GGUF metadata against the model it was taken from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import CorruptDataError
from common.gguf import spm
from common.gguf.tokenizer import Tokenizer
from tests.common.gguf.vocabularies import sentencepiece_metadata, trained_sentencepiece
from tests.gguf_files import tiny_tokenizer

USER_DEFINED = ("<tool>", "\n", "\n\n", "▁▁", "▁▁▁", ">▁▁</")
TEXT = st.lists(
    st.sampled_from([*"aAbz 01\n\t.,>é你🦙▁<", "  ", "   ", "the", " fox", "<tool>", "\n\n", ">  </", "<s>"])
    | st.characters(exclude_categories=["Cs"])
).map("".join)
K = "tokenizer.ggml."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_metadata(sentencepiece_metadata(USER_DEFINED), "m.gguf")


@settings(max_examples=60, deadline=None)
@given(text=TEXT)
def test_same_ids_as_the_original_model(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text, add_special=False) == trained_sentencepiece(USER_DEFINED).encode(text)


@settings(max_examples=60, deadline=None)
@given(text=TEXT)
def test_literal_spaces_in_pieces_mean_the_same(text: str) -> None:
    metadata = sentencepiece_metadata(USER_DEFINED, add_space_prefix=False)
    plain = Tokenizer.from_metadata(metadata, "m.gguf")
    spelled_with_spaces = [piece.replace("▁", " ") for piece in USER_DEFINED]
    metadata[K + "tokens"][3 : 3 + len(USER_DEFINED)] = spelled_with_spaces
    respelled = Tokenizer.from_metadata(metadata, "m.gguf")
    assert respelled.encode(text) == plain.encode(text)
    assert respelled.decode(respelled.encode(text)) == text.replace("▁", " ")


@settings(max_examples=60, deadline=None)
@given(text=TEXT, chunk=st.integers(1, 20))
def test_round_trip_and_chunks(tokenizer: Tokenizer, text: str, chunk: int) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text.replace("▁", " ")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spm.SentencePieceEncoder, "CHUNK_CHARS", chunk)
        assert tokenizer.encode(text) == ids


def test_user_defined_pieces_are_kept_whole(tokenizer: Tokenizer) -> None:
    pieces = [tokenizer.piece(i) for i in tokenizer.encode("a<tool>b\n\n\nc   d", add_special=False)]
    assert [piece for piece in pieces if piece in ("<tool>", "\n\n", "\n", "▁▁▁")] == [
        "<tool>",
        "\n\n",
        "\n",
        "▁▁▁",
    ]


def test_no_control_token_comes_of_text(tokenizer: Tokenizer) -> None:
    assert not {1, 2} & set(tokenizer.encode("<s></s>", add_special=False))
    assert tokenizer.encode("<s>", add_special=False, parse_special=True) == [1]


def test_space_prefix_after_special_tokens_too() -> None:
    tokenizer = Tokenizer.from_metadata(sentencepiece_metadata(control=("<|user|>",)), "m.gguf")
    user = tokenizer.vocab_size - 1
    the = tokenizer.encode("the", add_special=False)
    assert tokenizer.encode("the<|user|>the", parse_special=True) == [1, *the, user, *the]
    assert tokenizer.decode([1, *the, user, *the]) == "thethe"
    assert tokenizer.decode([1, *the, user, *the], skip_special=False) == "<s>the<|user|>the"


def test_phi3_special_tokens_swallow_white_space() -> None:
    metadata = sentencepiece_metadata(control=("<|user|>",))
    metadata["general.architecture"] = "phi3"
    tokenizer = Tokenizer.from_metadata(metadata, "m.gguf")
    user, the = tokenizer.vocab_size - 1, tokenizer.encode("the", add_special=False)
    assert tokenizer.encode("<|user|>\n  the", add_special=False, parse_special=True) == [user, *the]
    spaced = tokenizer.encode(" the", add_special=False)
    assert tokenizer.encode("<s> the", add_special=False, parse_special=True) == [1, *spaced]


def test_characters_without_a_piece_become_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Ж", add_special=False)
    assert [tokenizer.piece(i) for i in ids][-2:] == ["<0xD0>", "<0x96>"]
    assert tokenizer.token_bytes(ids[-1]) == b"\x96"


def test_a_vocabulary_without_bytes_or_unknown_piece_leaves_characters_out() -> None:
    metadata = tiny_tokenizer()
    metadata[K + "token_type"] = metadata[K + "token_type"].copy()
    metadata[K + "token_type"][[0, 10]] = 3  # no unknown piece, and one of the bytes is missing
    del metadata[K + "unknown_token_id"]
    tokenizer = Tokenizer.from_metadata(metadata, "m.gguf")
    assert tokenizer.decode(tokenizer.encode("the你dog")) == "thedog"


def test_repeated_empty_and_broken_pieces_do_no_harm() -> None:
    metadata = tiny_tokenizer()
    metadata[K + "token_type"] = np.where(metadata[K + "token_type"] == 5, 1, metadata[K + "token_type"])
    the = metadata[K + "tokens"].index("▁the")
    for i, piece in enumerate(("▁the", "", "\udcff\udcfe", " the"), start=500):
        metadata[K + "tokens"][i] = piece
    tokenizer = Tokenizer.from_metadata(metadata, "m.gguf")
    assert tokenizer.encode("the", add_special=False) == [the]
    assert tokenizer.token_bytes(502) == b"\xff\xfe"
    assert tokenizer.piece(502) == "\ufffd\ufffd"


def test_broken_byte_pieces_are_not_used() -> None:
    metadata = tiny_tokenizer()
    metadata[K + "tokens"][3:5] = ["<0xZZ>", "\udcff"]
    tokenizer = Tokenizer.from_metadata(metadata, "m.gguf")
    assert tokenizer.encode("Ж", add_special=False)[1:] == [0]
    assert [tokenizer.token_bytes(i) for i in (3, 4, 5)] == [b"<0xZZ>", b"\xff", b"\x02"]


def test_a_piece_the_library_refuses() -> None:
    metadata = tiny_tokenizer()
    metadata[K + "tokens"][300] = "a\0"
    with pytest.raises(CorruptDataError, match=r"^m\.gguf: the tokenizer cannot be built: .*null character"):
        Tokenizer.from_metadata(metadata, "m.gguf")
