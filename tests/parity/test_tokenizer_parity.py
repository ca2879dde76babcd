"""Token ids against the folder of test cases: six vocabularies, and the prompts of two real models."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from common.gguf.chat import encode_chat
from common.gguf.chat_template import ChatTemplate
from common.gguf.reader import GGUFFile
from common.gguf.tokenizer import Tokenizer

VOCABULARIES = ["deepseek-llm", "gpt-2", "llama-bpe", "llama-spm", "phi-3", "qwen2"]
MODELS = {
    "gemma-3-270m-q4_k_m": "gemma-3-270m-q4_k_m.gguf",
    "smollm2-135m-instruct-q4_1": "SmolLM2-135M-Instruct.Q4_1.gguf",
}


@cache
def load(path: Path) -> Tokenizer:
    with GGUFFile.open(path) as file:
        return Tokenizer.from_metadata(file.metadata, path.name)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_every_listed_text(cases: Path, name: str) -> None:
    path = cases / "tokenizers" / f"ggml-vocab-{name}.gguf"
    tokenizer = load(path)
    texts = path.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = path.with_suffix(".gguf.out").read_text().split("\n")
    assert len(texts) == len(lines) > 40
    for text, line in zip(texts, lines, strict=True):
        ids = [int(word) for word in line.split()]
        assert tokenizer.encode(text, add_special=False) == ids
        assert tokenizer.decode(ids) == text
        stream = tokenizer.stream_decoder()
        assert "".join(map(stream.push, ids)) + stream.finish() == text


def test_a_large_vocabulary_is_built_quickly(cases: Path) -> None:
    with GGUFFile.open(cases / "tokenizers" / "ggml-vocab-qwen2.gguf") as file:
        start = time.process_time()
        tokenizer = Tokenizer.from_metadata(file.metadata, "qwen2")
        assert time.process_time() - start < 1.5
    assert tokenizer.vocab_size == 151936


@pytest.mark.parametrize("name", MODELS)
def test_prompts_and_answers_of_real_models(
    cases: Path, real_model: Callable[[str], Path], name: str
) -> None:
    tokenizer = load(real_model(MODELS[name]))
    for case in json.loads((cases / "greedy" / f"{name}.json").read_text()):
        prompt, ids = case["prompt"], case["prompt_ids"]
        assert tokenizer.encode(prompt, parse_special="user_message" in case) == ids
        stream = tokenizer.stream_decoder(after=ids[-1])
        assert "".join(map(stream.push, case["greedy_ids"])) + stream.finish() == case["text"]


@pytest.mark.parametrize("name", MODELS)
def test_long_prompts_of_real_models(cases: Path, real_model: Callable[[str], Path], name: str) -> None:
    tokenizer = load(real_model(MODELS[name]))
    for case in json.loads((cases / "greedy" / f"{name}.long.json").read_text()):
        # The prompts are cut out of a text; it may have been cut where a tokenizer would not cut.
        ids = case["prompt_ids"]
        assert tokenizer.encode(tokenizer.decode(ids))[: len(ids) - 1] == ids[:-1]


def test_user_messages_through_the_template_of_smollm2(
    cases: Path, real_model: Callable[[str], Path]
) -> None:
    name = "smollm2-135m-instruct-q4_1"
    with GGUFFile.open(real_model(MODELS[name])) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata, name)
        source = file.require("tokenizer.chat_template", str)
    chats = [c for c in json.loads((cases / "greedy" / f"{name}.json").read_text()) if "user_message" in c]
    assert chats
    with ChatTemplate(source, bos_token="<|im_start|>", eos_token="<|im_end|>", where=name) as template:
        for case in chats:
            messages = [{"role": "user", "content": case["user_message"]}]
            assert encode_chat(tokenizer, template, messages) == (case["prompt"], case["prompt_ids"])
