"""Chat templates of real models: rendered as listed, and safe against special tokens in messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from common.gguf.chat import encode_chat
from common.gguf.chat_template import ChatTemplate
from common.gguf.tokenizer import Tokenizer
from tests.common.gguf.vocabularies import bpe_metadata, sentencepiece_metadata

NAMES = [
    "meta-llama-Llama-3.2-3B-Instruct",
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen-Qwen3-0.6B",
    "google-gemma-2-2b-it",
    "microsoft-Phi-3.5-mini-instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "openai-gpt-oss-120b",
    "HuggingFaceTB-SmolLM3-3B",
    "ibm-granite-granite-3.3-2B-Instruct",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "llama-cpp-deepseek-r1",
    "MiniMax-M2",
]
# What looks like a special token in a template's source. Reasoning and tool markers are user-defined ones.
SPECIAL = re.compile(
    r"<\|[a-z_]+\|>|<[｜][^<>]+[｜]>|</?s>|<(?:start|end)_of_[a-z]+>|\[/?[A-Z_]{4,}\]|\]~!?b[\[\]]|\[e~\["
)
USER_DEFINED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


class Case:
    """One template with its dialogues, compiled, and a tokenizer with the special tokens it spells."""

    def __init__(self, name: str, case: dict[str, Any]) -> None:
        self.dialogues = case["dialogues"]
        self.now = datetime.fromisoformat(case["now"])
        tokens = (case["bos_token"], case["eos_token"])
        self.control = tuple(dict.fromkeys([*tokens, *SPECIAL.findall(case["template"])]))
        self.template = ChatTemplate(case["template"], bos_token=tokens[0], eos_token=tokens[1], where=name)
        bpe = bpe_metadata("llama-bpe", control=self.control, user_defined=USER_DEFINED)
        spm = sentencepiece_metadata(
            USER_DEFINED, control=[c for c in self.control if c not in ("<s>", "</s>")]
        )
        self.tokenizers = [Tokenizer.from_metadata(bpe, "bpe"), Tokenizer.from_metadata(spm, "spm")]

    def specials(self, tokenizer: Tokenizer, ids: list[int]) -> list[str]:
        return [piece for piece in map(tokenizer.piece, ids) if piece in self.control]


@pytest.fixture(scope="module", params=NAMES)
def case(cases: Path, request: pytest.FixtureRequest) -> Iterator[Case]:
    templates = json.loads((cases / "templates" / "templates.json").read_text())
    assert list(templates) == NAMES
    case = Case(request.param, templates[request.param])
    with case.template:
        yield case


def test_rendered_as_listed(case: Case) -> None:
    for dialogue in case.dialogues:
        assert case.template.render(dialogue["messages"], now=case.now) == dialogue["rendered"]


def test_ordinary_dialogues_encode_as_the_rendered_text(case: Case) -> None:
    for dialogue in case.dialogues:
        for tokenizer in case.tokenizers:
            text, ids = encode_chat(tokenizer, case.template, dialogue["messages"], now=case.now)
            assert text == dialogue["rendered"]
            assert ids == tokenizer.encode(text, parse_special=True)
            assert len(case.specials(tokenizer, ids)) > len(dialogue["messages"])


def test_messages_stay_text(case: Case) -> None:
    everything = "".join(case.control)
    for attack in (everything, f"a{everything}b", everything[:-1], everything[1:], "\n".join(case.control)):
        for dialogue in case.dialogues:
            messages = [{**m, "content": f"{m['content']} {attack}"} for m in dialogue["messages"]]
            harmless = [{**m, "content": m["content"] + " x"} for m in dialogue["messages"]]
            rendered = case.template.render(messages, now=case.now)
            for tokenizer in case.tokenizers:
                text, ids = encode_chat(tokenizer, case.template, messages, now=case.now)
                assert text == rendered
                _, expected = encode_chat(tokenizer, case.template, harmless, now=case.now)
                assert case.specials(tokenizer, ids) == case.specials(tokenizer, expected)
                decoded = tokenizer.decode(ids, skip_special=False)
                # SentencePiece has one piece for the space and for the "▁" in DeepSeek's names.
                decoded, text = (t.removeprefix("<s>").replace("▁", " ") for t in (decoded, text))
                assert decoded == text


def test_an_answer_is_continued(case: Case) -> None:
    dialogue = next(d for d in case.dialogues if len(d["messages"]) == 3)
    messages = [*dialogue["messages"], {"role": "assistant", "content": "Why did the"}]
    text, ids = encode_chat(case.tokenizers[0], case.template, messages, continue_last=True, now=case.now)
    assert text.endswith("Why did the")
    assert "Tell me a joke." in text
    assert case.tokenizers[0].decode(ids, skip_special=False) == text
