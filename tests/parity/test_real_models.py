"""Greedy continuations of real models, computed in float32 elsewhere, with the gap at every token.

Where the two best log-probabilities lie less than `NEAR_TIE` apart, another rounding may choose the other
token. Everywhere else the top token must be the listed one, with the earlier ones as listed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from tests.parity.running import Ring

NEAR_TIE = 0.05
MODELS = {
    "smollm2-135m-instruct-q4_1": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma-3-270m-q4_k_m": "gemma-3-270m-q4_k_m.gguf",
}
CONTEXT = 2304
# More than a window of 512, and no divisor of the prompts' lengths.
CHUNK = 600
DRAWN = 12


@dataclass
class Model:
    ring: Ring
    short: list[dict[str, Any]]
    long: list[dict[str, Any]]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, cases: Path, real_model: Callable[[str], Path]) -> Iterator[Model]:
    path = real_model(MODELS[request.param])
    short, long = (
        json.loads((cases / "greedy" / f"{request.param}{kind}.json").read_text()) for kind in ("", ".long")
    )
    # Two stages, so that what real models give is also what a ring gives.
    ring = Ring(path, CONTEXT, cuts=(7,), num_sequences=len(short))
    yield Model(ring, short, long)
    for runner in ring.runners:
        runner.close()


def assert_agrees(case: dict[str, Any], drawn: list[int]) -> None:
    places = zip(drawn, case["greedy_ids"], case["logprob_gap"], strict=True)
    wrong = [
        (place, token, listed, gap)
        for place, (token, listed, gap) in enumerate(places)
        if token != listed and gap >= NEAR_TIE
    ]
    assert not wrong, f"{case.get('prompt', 'long prompt')}: (place, token, listed token, gap) {wrong}"


def up_to_a_near_tie(case: dict[str, Any]) -> list[int]:
    places = zip(case["greedy_ids"], case["logprob_gap"], strict=True)
    return [token for token, _ in takewhile(lambda place: place[1] >= NEAR_TIE, places)]


def test_forced_along_the_list_the_top_token_agrees(model: Model) -> None:
    """All prompts in one batch, each with its continuation."""
    rows = [(s, 0, case["prompt_ids"] + case["greedy_ids"][:-1]) for s, case in enumerate(model.short)]
    top = model.ring.forward(rows).argmax(-1).tolist()
    end = 0
    for case, (_, _, ids) in zip(model.short, rows, strict=True):
        end += len(ids)
        assert_agrees(case, top[end - len(case["greedy_ids"]) : end])


def test_drawn_token_by_token_the_list_is_followed(model: Model) -> None:
    """Prompts decode side by side, each up to its first near-tie, or `DRAWN` tokens."""
    ids = [list(case["prompt_ids"]) for case in model.short]
    wanted = [up_to_a_near_tie(case)[:DRAWN] for case in model.short]
    running = [(s, 0, ids[s]) for s in range(len(ids)) if wanted[s]]
    for step in range(1, DRAWN + 1):
        top = model.ring.forward(running, last=1).argmax(-1).tolist()
        for (s, _, _), token in zip(running, top, strict=True):
            ids[s].append(token)
        running = [(s, len(ids[s]) - 1, ids[s][-1:]) for s, _, _ in running if step < len(wanted[s])]
    for case, sequence, tokens in zip(model.short, ids, wanted, strict=True):
        assert sequence[len(case["prompt_ids"]) :] == tokens


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1], ids=["700 tokens", "2100 tokens"])
def test_long_prompts_in_chunks(model: Model, index: int) -> None:
    """Past Gemma's window of 512; the continuation is forced in one chunk, its last tokens one by one."""
    case = model.long[index]
    prompt, greedy = case["prompt_ids"], case["greedy_ids"]
    ids = prompt + greedy[:-1]
    forced = len(ids) - 5
    for start in range(0, len(prompt) - 1, CHUNK):
        model.ring.forward([(0, start, ids[start : min(start + CHUNK, len(prompt) - 1)])], last=1)
    top = model.ring.forward([(0, len(prompt) - 1, ids[len(prompt) - 1 : forced])]).argmax(-1).tolist()
    for position in range(forced, len(ids)):
        top.append(int(model.ring.forward([(0, position, ids[position : position + 1])]).argmax()))
    assert_agrees(case, top)
