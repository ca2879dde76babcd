"""The device draws what the host's sampler draws, whatever the options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from stage.sampler import Drawn, SamplingOptions, sample

pytestmark = pytest.mark.gpu

PLAIN = SamplingOptions(
    temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0, repeat_penalty=1.0, repeat_last_n=64,
    presence_penalty=0.0, frequency_penalty=0.0, seed=7,
)  # fmt: skip
DEFAULTS = replace(PLAIN, temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)
PENALTIES: dict[str, Any] = {"repeat_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
CASES = {
    "greedy": replace(PLAIN, temperature=0.0),
    "greedy with penalties": replace(PLAIN, temperature=0.0, **PENALTIES),
    "defaults": DEFAULTS,
    "hot": replace(DEFAULTS, temperature=3.0, top_p=1.0, min_p=0.0),
    "cold": replace(DEFAULTS, temperature=0.01),
    "everything kept": PLAIN,
    "everything kept, hot": replace(PLAIN, temperature=2.5),
    "top-k 1": replace(PLAIN, top_k=1),
    "top-k 1000": replace(PLAIN, top_k=1000, temperature=2.0),
    "top-k 1500": replace(PLAIN, top_k=1500, temperature=2.0),
    "top-p": replace(PLAIN, top_p=0.7),
    "top-p 0": replace(PLAIN, top_p=0.0),
    "min-p": replace(PLAIN, min_p=0.2),
    "typical": replace(PLAIN, typical_p=0.6),
    "typical of 40": replace(DEFAULTS, typical_p=0.5),
    "penalties": replace(DEFAULTS, **PENALTIES),
    "long penalties": replace(DEFAULTS, **PENALTIES, repeat_last_n=2**32 - 1),
    "biases": replace(DEFAULTS, logit_bias=((3, 4.0), (9, -2.5)), banned_token_ids=(1, 2, 17)),
    "logprobs": replace(DEFAULTS, logprobs=True, top_logprobs=20, logit_bias=((3, 4.0),), **PENALTIES),
    "greedy logprobs": replace(PLAIN, temperature=0.0, logprobs=True, top_logprobs=3),
}

Sampler = Callable[[torch.Tensor, list[SamplingOptions], list[list[int]]], list[Drawn]]


@pytest.fixture(scope="module")
def on_device() -> Sampler:
    from stage.backends.cuda.backend import CudaBackend

    backend = CudaBackend(torch.device("cuda", 0))
    samplers: dict[int, CudaBackend] = {}

    def run(logits: torch.Tensor, options: list[SamplingOptions], histories: list[list[int]]) -> list[Drawn]:
        vocabulary = logits.shape[1]
        if vocabulary not in samplers:  # a backend serves one model
            samplers[vocabulary] = CudaBackend(backend.device) if samplers else backend
        return samplers[vocabulary].sample(logits.to(backend.device), options, histories)

    return run


def random_rows(seed: int, rows: int, vocabulary: int, spread: float) -> tuple[torch.Tensor, list[list[int]]]:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, spread, (rows, vocabulary)).astype(np.float32))
    histories = [rng.integers(0, vocabulary, rng.integers(1, 200)).tolist() for _ in range(rows)]
    for row, history in enumerate(histories):  # penalties must meet likely tokens
        history[-1] = int(logits[row].argmax())
    return logits, histories


def agree(got: list[Drawn], want: list[Drawn]) -> int:
    """How many rows differ in the token; what else is told must be alike where they agree."""
    different = 0
    for one, other in zip(got, want, strict=True):
        if one.token_id != other.token_id:
            different += 1
            continue
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert [p for _, p in one.top] == pytest.approx([p for _, p in other.top], abs=1e-4)
    return different


@pytest.mark.parametrize("vocabulary", [300, 2049, 32000, 151_936])
@pytest.mark.parametrize("name", CASES)
def test_the_same_token_as_on_the_host(on_device: Sampler, name: str, vocabulary: int) -> None:
    rows = 64 if vocabulary < 100_000 else 8
    for seed, spread in enumerate((1.0, 3.0, 12.0)):
        logits, histories = random_rows(seed, rows, vocabulary, spread)
        options = [replace(CASES[name], seed=row) for row in range(rows)]
        want = sample(logits, options, histories)
        # A draw within rounding of the border between two tokens may take either.
        assert agree(on_device(logits, options, histories), want) <= rows // 32


def test_rows_of_all_kinds_at_once(on_device: Sampler) -> None:
    logits, histories = random_rows(5, 2 * len(CASES), 5000, 4.0)
    options = [*CASES.values(), *CASES.values()]
    assert agree(on_device(logits, options, histories), sample(logits, options, histories)) <= 1


def test_ties_go_to_the_lowest_ids(on_device: Sampler) -> None:
    """More equal logits than candidates are sorted: the lowest ids are kept."""
    logits = torch.zeros((4, 9000))
    logits[:, 8000] = 0.5
    options = [replace(PLAIN, top_k=k, temperature=5.0, seed=k) for k in (2, 40, 700, 1024)]
    histories = [[1]] * 4
    for seed in range(20):
        drawn = on_device(logits, [replace(one, seed=seed) for one in options], histories)
        for one, chosen in zip(options, drawn, strict=True):
            assert chosen.token_id in {*range(one.top_k - 1), 8000}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["greedy", "defaults", "everything kept"])
def test_logits_that_are_not_numbers_give_no_token(on_device: Sampler, name: str, bad: float) -> None:
    logits = torch.randn((2, 5000), generator=torch.Generator().manual_seed(1))
    logits[1, 4321] = bad
    sound, broken = on_device(logits, [CASES[name]] * 2, [[1], [2]])
    assert broken.failure and not sound.failure


def test_what_is_counted_is_forgotten(on_device: Sampler) -> None:
    """Penalties of one launch leave nothing for the next one."""
    logits, histories = random_rows(3, 4, 1000, 3.0)
    options = [CASES["penalties"]] * 4
    first = on_device(logits, options, histories)
    for _ in range(3):
        assert on_device(logits, options, histories) == first
