"""Draws tokens from logits: a pure function of logits, earlier tokens, options, seed and position.

The chain and its defaults are llama.cpp's: logit bias, penalties, top-k, typical-p, top-p, min-p,
temperature, draw. Because the draw at a position depends on nothing else, batching, replays, recomputation
after pre-emption and speculation change nothing but near-ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

NOT_NUMBERS = (
    "the model's logits are not numbers (NaN or infinite): the model file's weights are damaged, a value was "
    "too large for f16, or the request's logit_bias or penalties are beyond all bounds; check the file and "
    "the backend with `pipellm-stage verify`"
)

_MASK64 = (1 << 64) - 1


@dataclass(frozen=True)
class SamplingOptions:
    """All options resolved; meanings as in protos/model.proto."""

    temperature: float
    top_k: int  # 0 keeps all
    top_p: float
    min_p: float
    typical_p: float
    repeat_penalty: float
    repeat_last_n: int
    presence_penalty: float
    frequency_penalty: float
    seed: int
    logit_bias: tuple[tuple[int, float], ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0

    @property
    def uses_history(self) -> bool:
        return self.repeat_last_n > 0 and (
            self.repeat_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        )

    @property
    def is_plain_greedy(self) -> bool:
        return self.temperature <= 0 and not (
            self.uses_history or self.logit_bias or self.banned_token_ids or self.logprobs
        )


@dataclass(frozen=True)
class Drawn:
    """A drawn token; logprobs are natural logs in the full softmax (after logit bias), where asked for.

    `failure`: why no token can be drawn. The id is then a filler, for steps that were issued ahead."""

    token_id: int
    logprob: float = 0.0
    top: list[tuple[int, float]] = field(default_factory=list)
    failure: str = ""


UNDRAWABLE = Drawn(0, failure=NOT_NUMBERS)


def sample(
    logits: torch.Tensor, options: Sequence[SamplingOptions], histories: Sequence[Sequence[int]]
) -> list[Drawn]:
    """One token a row. logits: float32 [rows, vocab_size] on the CPU; `histories[i]` holds the tokens before
    row i's position, all of them: its length is the position of the drawn token.

    A row whose logits are not numbers (a broken model or kernel) is UNDRAWABLE, and no other row's affair."""
    values = logits.numpy()
    greedy = values.argmax(axis=1)  # of NaN the first, if there is one
    best = values[np.arange(len(values)), greedy]
    drawn: list[Drawn] = []
    for row, (token_id, logit, chosen, history) in enumerate(
        zip(greedy, best, options, histories, strict=True)
    ):
        if not np.isfinite(logit):
            drawn.append(UNDRAWABLE)
        elif chosen.is_plain_greedy:
            drawn.append(Drawn(int(token_id)))
        else:
            drawn.append(_sample_row(logits[row], chosen, history))
    return drawn


def _sample_row(logits: torch.Tensor, options: SamplingOptions, history: Sequence[int]) -> Drawn:
    logits = logits.clone()
    for token_id, bias in options.logit_bias:
        logits[token_id] += bias
    if options.banned_token_ids:
        logits[list(options.banned_token_ids)] = -torch.inf
    logprobs = torch.log_softmax(logits, dim=-1) if options.logprobs else None
    if options.uses_history:
        _penalise(logits, options, history)
    if not torch.isfinite(logits.max()):  # biases and penalties may be as large as a float32 can be
        return UNDRAWABLE
    if options.temperature <= 0:
        token_id = int(torch.argmax(logits))
    else:
        candidates, values = _candidates(logits, options)
        # From the best downwards, so that a tiny temperature cannot make infinities of large logits.
        probabilities = _softmax((values - values[0]) / options.temperature)
        edge = uniform(options.seed, len(history)) * probabilities.sum()
        chosen = np.searchsorted(np.cumsum(probabilities), edge, side="right")
        token_id = int(candidates[min(int(chosen), len(candidates) - 1)])
    if logprobs is None:
        return Drawn(token_id)
    top = torch.topk(logprobs, options.top_logprobs) if options.top_logprobs else None
    pairs = list(zip(top.indices.tolist(), top.values.tolist(), strict=True)) if top is not None else []
    return Drawn(token_id, float(logprobs[token_id]), pairs)


def _penalise(logits: torch.Tensor, options: SamplingOptions, history: Sequence[int]) -> None:
    recent = np.asarray(history[-options.repeat_last_n :], dtype=np.int64)
    ids, counts = np.unique(recent, return_counts=True)
    at = torch.from_numpy(ids)
    values = logits[at]
    values = torch.where(values > 0, values / options.repeat_penalty, values * options.repeat_penalty)
    values -= torch.from_numpy(counts).float() * options.frequency_penalty + options.presence_penalty
    logits[at] = values


def _candidates(logits: torch.Tensor, options: SamplingOptions) -> tuple[np.ndarray, np.ndarray]:
    """What is left after top-k, typical-p, top-p and min-p: token ids and logits (float64), most likely
    first. At least one token stays."""
    k = min(options.top_k or len(logits), len(logits))
    top = torch.topk(logits, k)
    ids, values = top.indices.numpy(), top.values.double().numpy()
    finite = values > -np.inf
    ids, values = ids[finite], values[finite]
    if options.typical_p < 1.0:
        ids, values = _typical(ids, values, options.typical_p)
    if options.top_p < 1.0:
        reached = np.cumsum(_softmax(values)) >= options.top_p
        keep = int(np.argmax(reached)) + 1 if reached.any() else len(values)
        ids, values = ids[:keep], values[:keep]
    if options.min_p > 0.0:
        keep = max(1, int((values >= values[0] + np.log(options.min_p)).sum()))
        ids, values = ids[:keep], values[:keep]
    return ids, values


def _typical(ids: np.ndarray, values: np.ndarray, typical_p: float) -> tuple[np.ndarray, np.ndarray]:
    """Locally typical sampling (arXiv 2202.00666): the tokens whose surprise is nearest the entropy."""
    probabilities = _softmax(values)
    surprise = -np.log(np.maximum(probabilities, 1e-300))
    distance = np.abs(surprise - (probabilities * surprise).sum())
    order = np.argsort(distance, kind="stable")
    reached = np.cumsum(probabilities[order]) > typical_p
    keep = int(np.argmax(reached)) + 1 if reached.any() else len(order)
    kept = np.sort(order[:keep])  # back to most likely first
    return ids[kept], values[kept]


def _softmax(values: np.ndarray) -> np.ndarray:
    weights = np.exp(values - values.max())
    normed: np.ndarray = weights / weights.sum()
    return normed


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on seed and position alone: SplitMix64's finaliser
    (Steele, Lea, Flood 2014) over both."""
    state = (_mix((seed + 0x9E3779B97F4A7C15) & _MASK64) + position * 0x9E3779B97F4A7C15) & _MASK64
    return (_mix(state) >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)
