"""The layer plan: which stage runs which layers, and how much KV cache there is. A pure function.

It minimises the slowest window's time for a decode row, with memory as a cap, from what each stage measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from common.errors import OutOfCapacityError

_KV_SHARE = 0.8  # of what weights leave free; the rest is for activations and the unforeseen
_MIN_CONTEXT = 512


@dataclass(frozen=True)
class ModelCosts:
    """What does not depend on the stage. Sequences have a value a layer."""

    num_layers: int
    context_length: int  # the model's own limit


@dataclass(frozen=True)
class StageCosts:
    """What the model costs on one stage, as `ProfileResponse` tells it."""

    stage_id: str
    memory_pool: str  # stages with the same one share their memory (one host's CPUs, one GPU)
    host: str
    layer_decode_s: float
    embedding_s: float
    head_s: float
    layer_weight_bytes: tuple[int, ...]
    layer_kv_bytes_per_token: tuple[int, ...]
    embedding_bytes: int
    head_bytes: int
    memory_budget_bytes: int


@dataclass(frozen=True)
class PlanSettings:
    context_length: int  # 0: the model's limit, or what fits
    kv_block_size: int
    max_sequences: int


@dataclass(frozen=True)
class Window:
    stage_id: str
    layer_start: int
    layer_end: int
    embedding: bool
    head: bool
    predicted_s: float  # one decode row
    layer_decode_s: float


@dataclass(frozen=True)
class Plan:
    windows: tuple[Window, ...]  # in ring order
    num_kv_blocks: int
    kv_block_size: int
    context_length: int


def plan(model: ModelCosts, stages: Sequence[StageCosts], settings: PlanSettings) -> Plan:
    """Splits the layers over the stages. Raises OutOfCapacityError with the bytes needed and available."""
    ring = sorted(stages, key=lambda stage: (stage.host, stage.stage_id))[: model.num_layers]
    sharing: dict[str, int] = defaultdict(int)
    for stage in ring:
        sharing[stage.memory_pool] += 1
    budgets = [stage.memory_budget_bytes // sharing[stage.memory_pool] for stage in ring]
    wanted = settings.context_length or model.context_length
    context_length = wanted
    while True:
        bounds = _split(model, ring, budgets, _blocks(context_length, settings) * settings.kv_block_size)
        if bounds is not None:
            break
        if settings.context_length or context_length <= min(_MIN_CONTEXT, wanted):
            raise OutOfCapacityError(_does_not_fit(model, ring, budgets, context_length))
        context_length = max(min(_MIN_CONTEXT, wanted), context_length // 2)
    most = _blocks(context_length, settings) * settings.max_sequences
    fitting = [
        int(_KV_SHARE * (budget - _weights(ring, i, bounds[i], bounds[i + 1]))) // max(1, kv * settings.kv_block_size)
        for i, budget in enumerate(budgets)
        for kv in [sum(ring[i].layer_kv_bytes_per_token[bounds[i] : bounds[i + 1]])]
    ]
    num_blocks = max(_blocks(context_length, settings), min(most, *fitting))
    windows = tuple(
        Window(
            stage.stage_id, bounds[i], bounds[i + 1], i == 0, i == len(ring) - 1,
            _time(ring, i, bounds[i], bounds[i + 1]), stage.layer_decode_s,
        )
        for i, stage in enumerate(ring)
    )  # fmt: skip
    return Plan(windows, num_blocks, settings.kv_block_size, context_length)


def _blocks(tokens: int, settings: PlanSettings) -> int:
    return -(-tokens // settings.kv_block_size)


def _time(ring: Sequence[StageCosts], index: int, start: int, end: int) -> float:
    stage = ring[index]
    ends = (stage.embedding_s if index == 0 else 0.0) + (stage.head_s if index == len(ring) - 1 else 0.0)
    return stage.layer_decode_s * (end - start) + ends


def _weights(ring: Sequence[StageCosts], index: int, start: int, end: int) -> int:
    stage = ring[index]
    ends = (stage.embedding_bytes if index == 0 else 0) + (stage.head_bytes if index == len(ring) - 1 else 0)
    return sum(stage.layer_weight_bytes[start:end]) + ends


def _split(
    model: ModelCosts, ring: Sequence[StageCosts], budgets: Sequence[int], kv_tokens: int
) -> list[int] | None:
    """Window borders that minimise (slowest window, sum) among those that fit; None if none does."""
    count = model.num_layers
    infinity = (float("inf"), float("inf"))
    best: list[tuple[float, float]] = [(0.0, 0.0)] + [infinity] * count
    choices: list[list[int]] = []
    for index, stage in enumerate(ring):
        kv = [0, *accumulate(stage.layer_kv_bytes_per_token)]
        new, choice = [infinity] * (count + 1), [0] * (count + 1)
        for start in range(count):
            if best[start] == infinity:
                continue
            for end in range(start + 1, count + 1):
                if _weights(ring, index, start, end) + (kv[end] - kv[start]) * kv_tokens > budgets[index]:
                    break
                time = _time(ring, index, start, end)
                candidate = (max(best[start][0], time), best[start][1] + time)
                if candidate < new[end]:
                    new[end], choice[end] = candidate, start
        best = new
        choices.append(choice)
    if best[count] == infinity:
        return None
    bounds = [count]
    for choice in reversed(choices):
        bounds.append(choice[bounds[-1]])
    return bounds[::-1]


def _does_not_fit(
    model: ModelCosts, ring: Sequence[StageCosts], budgets: Sequence[int], context_length: int
) -> str:
    stage = ring[0]
    needed = (
        sum(stage.layer_weight_bytes) + stage.embedding_bytes + stage.head_bytes
        + sum(stage.layer_kv_bytes_per_token) * context_length
    )  # fmt: skip
    return (
        f"the model does not fit: weights and one sequence of {context_length} tokens need about {needed} bytes, "
        f"the {len(ring)} stage(s) may take {sum(budgets)}; add a stage, free memory, or lower the context length"
    )
