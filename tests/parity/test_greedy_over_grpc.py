"""SmolLM2 through real daemons, client to last stage: the listed greedy continuations.

The coordinator tokenises, applies the chat template, plans two stages and batches the prompts, which are all
asked at once. Each list is followed up to its first near-tie.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from client.events import Delta, Finished, Started
from tests.e2e.daemons import Mesh

NAME = "smollm2-135m-instruct-q4_1"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NEAR_TIE = 0.05
MAX_TOKENS = 32
PROMPTS, MESSAGES = 3, 2


@pytest.fixture(scope="module")
def listed(cases: Path) -> list[dict[str, Any]]:
    """A handful of prompts and of user messages, none with a near-tie at its start."""
    every = json.loads((cases / "greedy" / f"{NAME}.json").read_text())
    long = [case for case in every if len(up_to_a_near_tie(case)) >= 8]
    prompts = [case for case in long if "user_message" not in case][:PROMPTS]
    messages = [case for case in long if "user_message" in case][:MESSAGES]
    assert (len(prompts), len(messages)) == (PROMPTS, MESSAGES)
    return prompts + messages


@pytest.fixture(scope="module")
def mesh(
    listed: list[dict[str, Any]], real_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mesh]:
    model = real_model(FILE)
    with Mesh(tmp_path_factory.mktemp("mesh"), model, 2, "--context-length", "256") as running:
        yield running


def up_to_a_near_tie(case: dict[str, Any]) -> list[int]:
    places = zip(case["greedy_ids"], case["logprob_gap"], strict=True)
    return [token for token, _ in takewhile(lambda place: place[1] >= NEAR_TIE, places)][:MAX_TOKENS]


def dialogue(case: dict[str, Any]) -> list[dict[str, str]]:
    return [{"role": "user", "content": case["user_message"]}]


def test_prompts_become_the_listed_ids(mesh: Mesh, listed: list[dict[str, Any]]) -> None:
    for case in listed:
        if "user_message" in case:
            assert mesh.client.apply_template(dialogue(case)) == (case["prompt"], case["prompt_ids"])
        else:
            assert mesh.client.tokenize(case["prompt"]) == case["prompt_ids"]


def test_the_lists_are_followed(mesh: Mesh, listed: list[dict[str, Any]]) -> None:
    plan = mesh.client.status(timeout_s=5).plan
    assert plan is not None and len(plan.windows) == 2

    def ask(case: dict[str, Any]) -> tuple[int, list[int], str]:
        count = len(up_to_a_near_tie(case))
        options: Any = {"max_tokens": count, "temperature": 0.0, "return_ids": True, "timeout_s": 120}
        if "user_message" in case:
            events = list(mesh.client.chat(dialogue(case), **options))
        else:
            events = list(mesh.client.generate(case["prompt"], **options))
        assert isinstance(events[0], Started) and isinstance(events[-1], Finished)
        deltas = [event for event in events if isinstance(event, Delta)]
        ids = [token for delta in deltas for token in delta.token_ids]
        return events[0].prompt_tokens, ids, "".join(delta.text for delta in deltas)

    with ThreadPoolExecutor(len(listed)) as pool:
        answers = list(pool.map(ask, listed))
    for case, (prompt_tokens, ids, text) in zip(listed, answers, strict=True):
        assert prompt_tokens == len(case["prompt_ids"])
        assert ids == up_to_a_near_tie(case), case["prompt"]
        assert text and case["text"].startswith(text.rstrip("�"))
