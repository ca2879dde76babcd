from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequestError
from common.gguf.tokenizer import Tokenizer
from tests.common.gguf.vocabularies import CHATML, bpe_metadata, sentencepiece_metadata

K = "tokenizer.ggml."
KINDS = ["bpe", "spm"]


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    bpe = bpe_metadata(user_defined=("<tool>",), add_bos_token=True, add_eos_token=True)
    bpe[K + "bos_token_id"] = bpe[K + "tokens"].index("<|endoftext|>")
    bpe[K + "eos_token_id"] = bpe[K + "tokens"].index("<|im_end|>")
    spm = sentencepiece_metadata(("<tool>",), control=CHATML, add_eos_token=True)
    spm[K + "eos_token_id"] = spm[K + "tokens"].index("<|im_end|>")
    return {
        "bpe": Tokenizer.from_metadata(bpe, "bpe.gguf"),
        "spm": Tokenizer.from_metadata(spm, "spm.gguf"),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_bos_and_eos(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    plain = tokenizer.encode("the fox", add_special=False)
    assert tokenizer.encode("the fox") == [tokenizer.bos_id, *plain, tokenizer.eos_id]
    assert tokenizer.encode("") == [tokenizer.bos_id, tokenizer.eos_id]
    assert tokenizer.encode("", add_special=False) == []


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_parsed_only_when_asked(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    text = "<|im_start|>the fox<|im_end|>\n"
    as_text = tokenizer.encode(text, add_special=False)
    assert not {tokenizer.piece(i) for i in as_text} & set(CHATML)
    parsed = tokenizer.encode(text, add_special=False, parse_special=True)
    assert [tokenizer.piece(i) for i in parsed if tokenizer.piece(i) in CHATML] == [
        "<|im_start|>",
        "<|im_end|>",
    ]
    assert tokenizer.decode(as_text) == text
    assert tokenizer.decode(parsed) == "the fox\n"
    assert tokenizer.decode(parsed, skip_special=False) == text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("added", ["x", "▁" * 9, "é" * 7, "<0x41>" * 4])
def test_the_most_bytes_of_a_token(kind: str, added: str) -> None:
    metadata = bpe_metadata(user_defined=[added]) if kind == "bpe" else sentencepiece_metadata((added,))
    tokenizer = Tokenizer.from_metadata(metadata, "model.gguf")
    every = (tokenizer.token_bytes(i, special=True) for i in range(tokenizer.vocab_size))
    assert tokenizer.max_token_bytes() == max(map(len, every))


@pytest.mark.parametrize("kind", KINDS)
def test_a_bos_in_the_text_is_not_doubled(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    assert tokenizer.bos_id is not None
    ids = tokenizer.encode_segments([tokenizer.piece(tokenizer.bos_id) + "the fox"])
    assert ids.count(tokenizer.bos_id) == 1


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(segments=st.lists(st.text("the fox<|im_end|>é🦙\n")))
def test_segments_encode_as_their_whole_text(
    tokenizers: dict[str, Tokenizer], kind: str, segments: list[str]
) -> None:
    whole = tokenizers[kind].encode("".join(segments), add_special=False)
    if not any(token in segment for segment in segments for token in (*CHATML, "<s>", "</s>", "<unk>")):
        assert tokenizers[kind].encode_segments(segments, add_bos=False) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_do_not_reach_over_segments(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    text = "<|im_end|>the<|im_end|>"
    cut = tokenizer.encode_segments(["<|im", "_end|>the<|im_end|>"], add_bos=False)
    assert [tokenizer.piece(i) for i in cut].count("<|im_end|>") == 1
    assert tokenizer.decode(cut, skip_special=False) == text


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_special_and_user_defined_tokens(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    (end,) = tokenizer.encode("<|im_end|>", add_special=False, parse_special=True)
    assert tokenizer.token_bytes(end) == b""
    assert tokenizer.token_bytes(end, special=True) == b"<|im_end|>"
    tool = next(i for i in tokenizer.encode("a<tool>") if tokenizer.piece(i) == "<tool>")
    assert tokenizer.token_bytes(tool) == b"<tool>"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("token_id", [-1, 10**9])
def test_ids_outside_the_vocabulary(tokenizers: dict[str, Tokenizer], kind: str, token_id: int) -> None:
    tokenizer = tokenizers[kind]
    for use in (tokenizer.piece, tokenizer.token_bytes, tokenizer.stream_decoder().push):
        with pytest.raises(InvalidRequestError, match=rf"token id {token_id} is outside the vocabulary of"):
            use(token_id)
    with pytest.raises(InvalidRequestError):
        tokenizer.decode([token_id])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁")))
def test_a_stream_gives_whole_characters(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = tokenizers[kind]
    stream = tokenizer.stream_decoder()
    ids = tokenizer.encode(text)
    deltas = [stream.push(i) for i in ids]
    assert "".join(deltas) + stream.finish() == text
    assert text.startswith("".join(deltas))
    # Each delta is all the text its tokens complete: what comes later cannot be part of it.
    done = b"".join(map(tokenizer.token_bytes, ids))
    assert "".join(deltas).encode() == done.removeprefix(b" " if kind == "spm" and text else b"")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_tokens_decode_alike_at_once_and_streamed(
    tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer = tokenizers[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1)))
    skip_special = data.draw(st.booleans())
    stream = tokenizer.stream_decoder(skip_special=skip_special)
    text = "".join(map(stream.push, ids)) + stream.finish()
    assert text == tokenizer.decode(ids, skip_special=skip_special)
    if kind == "bpe" and not skip_special:
        whole = b"".join(tokenizer.token_bytes(i, special=True) for i in ids)
        assert text == whole.decode("utf-8", "replace")


def test_half_a_character_at_the_end(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["bpe"]
    ids = tokenizer.encode("a\U0001f40d", add_special=False)
    stream = tokenizer.stream_decoder()
    assert [stream.push(i) for i in ids[:-1]] == ["a", *[""] * (len(ids) - 2)]
    assert stream.finish() == "\ufffd"
    assert tokenizer.decode(ids[:-1]) == "a\ufffd"


def test_a_stream_that_continues_keeps_its_space(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["spm"]
    prompt, answer = (
        tokenizer.encode("the fox", add_special=False),
        tokenizer.encode("dog", add_special=False),
    )

    def first_delta(after: int | None) -> str:
        stream = tokenizer.stream_decoder(after=after)
        return "".join(map(stream.push, answer))

    assert first_delta(after=prompt[-1]) == " dog"
    assert first_delta(after=None) == "dog"
    assert first_delta(after=tokenizer.bos_id) == "dog"
