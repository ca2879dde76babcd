"""Splitting a model's layers over stages: what a window costs, what fits, and the best split there is.

Windows are half-open ranges of layers in ring order. Contexts, KV blocks and messages are the planner's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

# One window more costs a token a hop of about this (a gRPC round trip of 8 KiB takes 0.4 to 0.7 ms).
_HOP_S = 4e-4
ROUNDING = 1 + 1e-9  # window times are differences of sums


@dataclass(frozen=True)
class StageCosts:
    """What the model costs on one stage. The tuples have a value a layer."""

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
    kv_block_size: int = 0  # tokens; 0: any


class Stage:
    """A stage's costs as running sums over layers, so that a window [a, b) costs sums[b] - sums[a]; what the
    first and the last window carry besides is folded into the sums' ends."""

    def __init__(self, costs: StageCosts) -> None:
        self.costs = costs
        self.budget = costs.memory_budget_bytes
        self.seconds = np.arange(len(costs.layer_weight_bytes) + 1) * max(costs.layer_decode_s, 1e-12)
        self.seconds[0] -= costs.embedding_s
        self.seconds[-1] += costs.head_s
        self.weights = _sums(costs.layer_weight_bytes, costs.embedding_bytes, costs.head_bytes)
        self.kv_per_token = _sums(costs.layer_kv_bytes_per_token)


class Pool:
    """Stages that share one memory, neighbours in the ring. They were measured one by one, so the most that
    one of them may take is what all of them may take; each layer counts as where it is largest."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = stages
        costs = [stage.costs for stage in stages]
        self.budget = max(stage.budget for stage in stages)
        self.weights = _sums(
            [max(layer) for layer in zip(*(each.layer_weight_bytes for each in costs), strict=True)],
            max(each.embedding_bytes for each in costs),
            max(each.head_bytes for each in costs),
        )
        self.kv_per_token = _sums(
            [max(layer) for layer in zip(*(each.layer_kv_bytes_per_token for each in costs), strict=True)]
        )


Split = list[tuple[Stage, int, int]]  # stage, first layer, layer after the last; in ring order


def pools_in_ring_order(stages: Sequence[StageCosts]) -> list[Pool]:
    """Hosts in order of their first stage_id, within them pools likewise, within them stages."""
    ordered = sorted(stages, key=lambda stage: stage.stage_id)
    hosts: dict[str, int] = {}
    pools: dict[str, int] = {}
    for stage in ordered:
        hosts.setdefault(stage.host, len(hosts))
        pools.setdefault(stage.memory_pool, len(pools))
    ordered.sort(key=lambda stage: (hosts[stage.host], pools[stage.memory_pool]))
    return [
        Pool([Stage(costs) for costs in group])
        for _, group in groupby(ordered, key=lambda stage: stage.memory_pool)
    ]


def slowest_s(split: Split) -> float:
    """The time of the slowest window: a ring that is full advances at its pace."""
    return max(float(stage.seconds[end] - stage.seconds[start]) for stage, start, end in split)


def way_round_s(split: Split) -> float:
    """One token's way round: all windows and hops, since a single stream is in one place at a time."""
    return sum(float(stage.seconds[end] - stage.seconds[start]) + _HOP_S for stage, start, end in split)


def cost(split: Split) -> float:
    """What a split takes from one stream times what it takes from many, in square seconds.

    How many streams there will be is not known, so what one side gains must be worth, in proportion, what the
    other loses. A second stage of the same kind doubles the pace for a hop more; one that takes 1 + sqrt(2)
    times as long for a layer, or longer, gets some only where the model does not fit otherwise."""
    return slowest_s(split) * way_round_s(split)


def best_split(pools: Sequence[Pool], kv_tokens: int) -> Split | None:
    """The split that costs least; None if none fits.

    Of all splits whose windows take `limit_s` at most `cheapest_split` finds the one with the shortest way
    round; so the best is among these, for the limits that a window can take. From the lowest limit that can
    be met upwards the way round gets shorter; between two limits no split costs less than the lower limit
    times the way round at the upper one."""
    limits = _window_times(pools)
    first, best = _fastest_pace(pools, kv_tokens, limits)
    if best is None:
        return None
    shortest_s = _shortest_way_s(pools)
    ranges = [(first, len(limits) - 1)]  # of limits, the lowest left out: its split is known
    while ranges:
        low, high = ranges.pop()
        high = min(high, int(np.searchsorted(limits * shortest_s, cost(best))) - 1)
        split = cheapest_split(pools, kv_tokens, limits[high]) if high > low else None
        if split is None:
            continue
        best = min(best, split, key=cost)
        # No limit down to the pace of this split gives another one.
        high = int(np.searchsorted(limits, slowest_s(split) / ROUNDING)) - 1
        if high > low and limits[low + 1] * way_round_s(split) < cost(best):
            middle = (low + high) // 2
            ranges += [(middle, high), (low, middle)]  # the lower one first
    return best


def _window_times(pools: Sequence[Pool]) -> np.ndarray:
    """Every time that a window of some stage can take, ascending."""
    stages = [stage for pool in pools for stage in pool.stages]
    return np.unique(
        np.concatenate(
            [
                sums
                for stage in stages
                for sums in (
                    np.arange(1, len(stage.seconds)) * stage.costs.layer_decode_s,  # in the middle
                    stage.seconds[1:] - stage.seconds[0],  # first, the last of them alone
                    stage.seconds[-1] - stage.seconds[1:-1],  # last
                )
            ]
        )
    )


def _shortest_way_s(pools: Sequence[Pool]) -> float:
    """No way round is shorter: all layers on the fastest stage, ends and memory left aside."""
    num_layers = len(pools[0].weights) - 1
    return _HOP_S + num_layers * min(stage.costs.layer_decode_s for pool in pools for stage in pool.stages)


def _fastest_pace(
    pools: Sequence[Pool], kv_tokens: int, limits: np.ndarray
) -> tuple[int, Split | None]:
    """The index of the lowest limit that some split meets, and the shortest of those splits."""
    stages = [stage for pool in pools for stage in pool.stages]
    # No limit can be met below which the stages' layers, ends and memory left aside, are too few.
    per_layer = np.array([max(stage.costs.layer_decode_s, 1e-12) for stage in stages])
    num_layers = len(stages[0].seconds) - 1

    def too_low(index: int) -> bool:
        return bool(np.floor(limits[index] * ROUNDING / per_layer).sum() < num_layers)

    low, high = -1, len(limits)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if too_low(middle) else (low, middle)
    # The best limit is close above as a rule, and a trial costs more the higher it is: stride, then bisect.
    stride = 1
    while (split := cheapest_split(pools, kv_tokens, limits[high])) is None:
        if high == len(limits) - 1:
            return high, None
        low, high, stride = high, min(high + stride, len(limits) - 1), stride * 2
    while high - low > 1:
        middle = (low + high) // 2
        other = cheapest_split(pools, kv_tokens, limits[middle])
        low, high, split = (middle, high, split) if other is None else (low, middle, other)
    return high, split


def cheapest_split(pools: Sequence[Pool], kv_tokens: int, limit_s: float) -> Split | None:
    """Of the splits whose windows all take `limit_s` at most and fit, one with the least sum of times.

    Dynamic programming over stages: the cheapest way to cover layers [0, end) for every end. Where stages
    share memory it is kept apart by the layer at which their pool begins, as that decides what fits.
    """
    num_layers = len(pools[0].weights) - 1
    best = np.full(num_layers + 1, np.inf)
    best[0] = 0.0
    taken: list[tuple[Pool, np.ndarray, list[np.ndarray]]] = []
    for pool in pools:
        shared = len(pool.stages) > 1
        costs = np.where(np.eye(num_layers + 1, dtype=bool), best, np.inf) if shared else best[None, :]
        choices = []
        for stage in pool.stages:
            costs, choice = _with_stage(costs, stage, kv_tokens, limit_s)
            choices.append(choice)
        if shared:
            needed = pool.weights + pool.kv_per_token * kv_tokens
            costs = np.where(needed[None, :] - needed[:, None] <= pool.budget, costs, np.inf)
        starts = costs.argmin(axis=0)
        best = costs[starts, np.arange(num_layers + 1)]
        taken.append((pool, starts, choices))
    if not np.isfinite(best[num_layers]):
        return None
    split: Split = []
    end = num_layers
    for pool, starts, choices in reversed(taken):
        row = starts[end]
        for stage, choice in zip(reversed(pool.stages), reversed(choices), strict=True):
            start = end - int(choice[row, end])
            if start < end:
                split.append((stage, start, end))
            end = start
    return split[::-1]


def _with_stage(
    costs: np.ndarray, stage: Stage, kv_tokens: int, limit_s: float
) -> tuple[np.ndarray, np.ndarray]:
    """Costs [rows, layers + 1] with one more stage, which may take nothing; and how many layers it takes."""
    needed = stage.weights + stage.kv_per_token * kv_tokens
    new, choice = costs.copy(), np.zeros(costs.shape, dtype=np.int32)
    for count in range(1, costs.shape[1]):
        seconds = stage.seconds[count:] - stage.seconds[:-count]
        fits = needed[count:] - needed[:-count] <= stage.budget
        allowed = fits & (seconds <= limit_s * ROUNDING)
        if not allowed.any():
            break  # nor will any with more layers
        candidates = costs[:, :-count] + np.where(allowed, seconds + _HOP_S, np.inf)
        better = candidates < new[:, count:]
        new[:, count:][better] = candidates[better]
        choice[:, count:][better] = count
    return new, choice


def _sums(per_layer: Sequence[int], first: int = 0, last: int = 0) -> np.ndarray:
    sums = np.concatenate([[0], np.cumsum(per_layer, dtype=np.int64)])
    sums[0] -= first
    sums[-1] += last
    return sums
