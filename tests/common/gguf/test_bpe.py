"""Byte-level BPE against the tokenizers library's own, separately written rules."""

from __future__ import annotations

import time

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from common.errors import InvalidRequestError
from common.gguf import bpe
from common.gguf.tokenizer import Tokenizer
from tests.common.gguf.vocabularies import CORPUS, bpe_metadata, trained_bpe

TEXT = st.lists(
    st.sampled_from(
        [*"aAbzZ 019\n\r\t.,!?'\"<>/_é你ß\u3000\xa0🦙\u0301ǅ", "  ", "don't", "'LL", "12345", "ab Cd", "\n\n"]
    )
    | st.characters(exclude_categories=["Cs"])
).map("".join)
# The rules as the models' own tokenizer.json files spell them.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def library(*rules: pre_tokenizers.PreTokenizer) -> tokenizers.Tokenizer:
    """The trained vocabulary behind other rules."""
    tokenizer = tokenizers.Tokenizer.from_str(trained_bpe().to_str())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(rules))
    return tokenizer


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
REFERENCES = {
    "gpt-2": library(GPT2),
    "smollm": library(pre_tokenizers.Digits(individual_digits=True), GPT2),
    "dbrx": library(split(LLAMA3), BYTES),
    "qwen2": library(split(LLAMA3.replace("{1,3}", "")), BYTES),
}


@pytest.fixture(scope="module")
def encoders() -> dict[str, Tokenizer]:
    return {pre: Tokenizer.from_metadata(bpe_metadata(pre), pre) for pre in bpe.PRE_TOKENIZERS}


@pytest.mark.parametrize("pre", REFERENCES)
@settings(max_examples=60, deadline=None)
@given(text=TEXT)
def test_same_ids_as_the_library(encoders: dict[str, Tokenizer], pre: str, text: str) -> None:
    assert encoders[pre].encode(text) == REFERENCES[pre].encode(text).ids


@pytest.mark.parametrize("pre", {rule: pre for pre, rule in bpe.PRE_TOKENIZERS.items()}.values())
@settings(max_examples=30, deadline=None)
@given(text=TEXT, chunk=st.integers(1, 20))
def test_round_trip_and_chunks(encoders: dict[str, Tokenizer], pre: str, text: str, chunk: int) -> None:
    ids = encoders[pre].encode(text)
    assert encoders[pre].decode(ids) == text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpe.BytePairEncoder, "CHUNK_CHARS", chunk)
        assert encoders[pre].encode(text) == ids


def words(pre: str, text: str) -> list[str]:
    """`text` as cut by a rule: no merges, so that each word shows as one vocabulary entry."""
    rule = bpe.PRE_TOKENIZERS[pre]
    splitter = pre_tokenizers.Sequence([split(pattern) for pattern in rule.patterns])
    return [word for word, _ in splitter.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("llama-bpe", "I'LL  pay 12345€\n\n ok", ["I", "'LL", " ", " pay", " ", "123", "45", "€\n\n", " ok"]),
        ("qwen2", "a 123", ["a", " ", "1", "2", "3"]),
        ("smollm", "a 123 b", ["a", " ", "1", "2", "3", " b"]),
        ("gpt-2", "it's  1234!?", ["it", "'s", " ", " 1234", "!?"]),
        ("default", "a+b=12345 c.", ["a", "+", "b", "=", "123", "45", " c", "."]),
        ("deepseek-llm", "ab cd,\n12 我a  ", ["ab", " cd", ",", "\n", "1", "2", " ", "我", "a", "  "]),
        ("tekken", "camelCase HTTPServer 12", ["camel", "Case", " HTTPServer", " ", "1", "2"]),
        ("gpt-4o", "We'Ve camelCase 1234", ["We'Ve", " camel", "Case", " ", "123", "4"]),
    ],
)
def test_words_of_each_rule(pre: str, text: str, expected: list[str]) -> None:
    assert words(pre, text) == expected


def test_aliases_share_a_rule() -> None:
    assert bpe.PRE_TOKENIZERS["llama3"] is bpe.PRE_TOKENIZERS["llama-bpe"]
    assert bpe.PRE_TOKENIZERS["deepseek-r1-qwen"] is bpe.PRE_TOKENIZERS["qwen2"]


def test_whole_words_are_taken_before_merging() -> None:
    # "Ġfoxes" is in the vocabulary but no merge makes it.
    metadata = bpe_metadata("dbrx", control=())
    metadata["tokenizer.ggml.tokens"].append("Ġfoxes")
    metadata["tokenizer.ggml.token_type"] = None
    whole_id = len(metadata["tokenizer.ggml.tokens"]) - 1
    assert whole_id not in Tokenizer.from_metadata(metadata, "m.gguf").encode("ten foxes")
    metadata["tokenizer.ggml.pre"] = "llama-bpe"
    assert Tokenizer.from_metadata(metadata, "m.gguf").encode("ten foxes")[-1] == whole_id


def test_user_defined_tokens_are_kept_whole_in_any_text() -> None:
    tokenizer = Tokenizer.from_metadata(bpe_metadata(user_defined=("<tool>", "<tool>>", "ø")), "m.gguf")
    tool, longer, letter = range(tokenizer.vocab_size - 3, tokenizer.vocab_size)
    ids = tokenizer.encode("a<tool>b<tool>>ø")
    assert [i for i in ids if i >= tool] == [tool, longer, letter]
    assert tokenizer.decode(ids) == "a<tool>b<tool>>ø"


def test_a_merge_into_a_user_defined_token_is_harmless() -> None:
    metadata = bpe_metadata()
    metadata["tokenizer.ggml.merges"] = [*metadata["tokenizer.ggml.merges"], "Q Z"]
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "QZ"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"].tolist(), 4]
    tokenizer = Tokenizer.from_metadata(metadata, "m.gguf")
    assert tokenizer.encode("QZ") == [tokenizer.vocab_size - 1]


def test_bytes_the_vocabulary_lacks_are_left_out() -> None:
    metadata = bpe_metadata()
    position = metadata["tokenizer.ggml.tokens"].index("ñ")  # the byte F1: characters from U+40000 on
    metadata["tokenizer.ggml.tokens"][position] = "nothing"
    tokenizer = Tokenizer.from_metadata(metadata, "m.gguf")
    assert tokenizer.decode(tokenizer.encode("a\U0001f999b")) == "a\U0001f999b"
    assert tokenizer.encode("\U00040000") == tokenizer.encode("\U00000000\U00040000")[1:]


@pytest.mark.parametrize("run", [" ", "\n", "A", "7", " \n", "  x", "!", "你"])
@pytest.mark.parametrize("pre", ["llama-bpe", "deepseek-llm", "default", "gpt-4o"])
def test_long_runs_take_linear_time(encoders: dict[str, Tokenizer], pre: str, run: str) -> None:
    text = run * (50_000 // len(run)) + "5"
    start = time.process_time()
    ids = encoders[pre].encode(text)
    assert (
        time.process_time() - start < 5
    )  # a rule that tries a run again from each of its characters: minutes
    assert len(ids) <= len(text.encode())


def test_lone_surrogates_are_refused(encoders: dict[str, Tokenizer]) -> None:
    with pytest.raises(InvalidRequestError, match="lone surrogate at character 2"):
        encoders["gpt-2"].encode("ab\udc80")


def test_the_corpus_is_compressed(encoders: dict[str, Tokenizer]) -> None:
    text = "".join(CORPUS)
    assert len(encoders["gpt-2"].encode(text)) < len(text) / 2
