"""The layer plan: which stage runs which layers, and how much KV cache there is. A pure function.

Layers go to the stages in ring order so that the slowest window takes as little time as can be for a decode
row, since a full pipeline advances at its pace; among such plans the one whose windows and hops take the
least together, which is one token's way round. Memory is a cap, never an aim. What a stage needs is what it
measured (`ProfileResponse`); how it is reached, loaded and linked is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from common.errors import NotReadyError, OutOfCapacityError

# Of the memory that weights leave, what the KV cache takes beyond one sequence's need: activations and
# whatever else runs there want some too.
KV_SHARE = 0.8
# A context chosen by itself costs no speed down to the first of these, and is refused below the last.
AUTO_CONTEXT_FLOORS = (4096, 512)
_AUTO_CONTEXT_STEP = 256
# One window more costs a token a hop of about this (a gRPC round trip of 8 KiB takes 0.4 to 0.7 ms).
_HOP_S = 4e-4
_ROUNDING = 1 + 1e-9  # window times are differences of sums


@dataclass(frozen=True)
class ModelCosts:
    """What does not depend on the stage."""

    num_layers: int
    context_length: int  # the model's own limit


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


@dataclass(frozen=True)
class PlanSettings:
    context_length: int  # 0: the model's limit, or what fits
    kv_block_size: int  # where the stages do not mind
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


class _Stage:
    """A stage's costs as running sums over layers, so that a window [a, b) costs sums[b] - sums[a]; what the
    first and the last window carry besides is folded into the sums' ends."""

    def __init__(self, costs: StageCosts) -> None:
        self.costs = costs
        self.seconds = np.arange(len(costs.layer_weight_bytes) + 1) * max(costs.layer_decode_s, 1e-12)
        self.seconds[0] -= costs.embedding_s
        self.seconds[-1] += costs.head_s
        self.weights = _sums(costs.layer_weight_bytes, costs.embedding_bytes, costs.head_bytes)
        self.kv_per_token = _sums(costs.layer_kv_bytes_per_token)


class _Pool:
    """Stages that share one memory, neighbours in the ring. They were measured one by one, so the most that
    one of them may take is what all of them may take; each layer counts as where it is largest."""

    def __init__(self, stages: Sequence[_Stage]) -> None:
        self.stages = stages
        costs = [stage.costs for stage in stages]
        self.budget = max(each.memory_budget_bytes for each in costs)
        self.weights = _sums(
            [max(layer) for layer in zip(*(each.layer_weight_bytes for each in costs), strict=True)],
            max(each.embedding_bytes for each in costs),
            max(each.head_bytes for each in costs),
        )
        self.kv_per_token = _sums(
            [max(layer) for layer in zip(*(each.layer_kv_bytes_per_token for each in costs), strict=True)]
        )


_Split = list[tuple[_Stage, int, int]]  # stage, first layer, layer after the last; in ring order


def plan(model: ModelCosts, stages: Sequence[StageCosts], settings: PlanSettings) -> Plan:
    """Splits layers [0, num_layers) over the stages; a stage that would not help gets no window.

    Stages of one host are neighbours in the ring, else they are ordered by stage_id. The KV cache holds at
    least one sequence of the context's length, at most `max_sequences` of them, and between these KV_SHARE of
    the memory that is left. A context length of 0 becomes the model's limit, or as much as fits without
    slowing the plan down.

    NotReadyError: no stages, or stages that contradict one another. OutOfCapacityError: does not fit.
    """
    _check(model, stages)
    pools = _pools_in_ring_order(stages)
    block_size = _block_size(stages, settings)

    def tokens(context: int) -> int:
        return -(-context // block_size) * block_size

    def split_for(context: int, limit_s: float | None = None) -> _Split | None:
        if limit_s is None:
            return _best_split(pools, tokens(context))
        return _cheapest_split(pools, tokens(context), limit_s)

    context = min(settings.context_length, model.context_length)
    if settings.context_length == 0:
        context = _auto_context(model.context_length, split_for)
    split = split_for(context) if context else None
    if split is None:
        wanted = context or min(AUTO_CONTEXT_FLOORS[-1], model.context_length)
        raise OutOfCapacityError(_does_not_fit(pools, wanted, tokens, split_for))
    least = tokens(context) // block_size
    num_blocks = max(least, min(least * settings.max_sequences, _blocks_that_fit(pools, split, block_size)))
    windows = tuple(
        Window(
            stage_id=stage.costs.stage_id,
            layer_start=start,
            layer_end=end,
            embedding=start == 0,
            head=end == model.num_layers,
            predicted_s=float(stage.seconds[end] - stage.seconds[start]),
            layer_decode_s=stage.costs.layer_decode_s,
        )
        for stage, start, end in split
    )
    return Plan(windows, num_blocks, block_size, context)


def _auto_context(limit: int, split_for: Callable[..., _Split | None]) -> int:
    """The longest context up to the model's limit whose plan is as fast as at the first floor that fits;
    0 if none does."""
    for floor in AUTO_CONTEXT_FLOORS:
        shortest = min(floor, limit)
        split = split_for(shortest)
        if split is None:
            continue
        slowest_s = _slowest_s(split)
        if split_for(limit, slowest_s) is not None:
            return limit
        low, high = shortest // _AUTO_CONTEXT_STEP, -(-limit // _AUTO_CONTEXT_STEP)
        while high - low > 1:
            middle = (low + high) // 2
            fits = split_for(middle * _AUTO_CONTEXT_STEP, slowest_s) is not None
            low, high = (middle, high) if fits else (low, middle)
        return max(shortest, low * _AUTO_CONTEXT_STEP)
    return 0


def _best_split(pools: Sequence[_Pool], kv_tokens: int) -> _Split | None:
    """The split with the fastest slowest window, and of those the cheapest; None if none fits."""
    stages = [stage for pool in pools for stage in pool.stages]
    limits = np.unique(
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
    # No limit can be met below which the stages' layers, ends and memory left aside, are too few.
    per_layer = np.array([max(stage.costs.layer_decode_s, 1e-12) for stage in stages])
    num_layers = len(stages[0].seconds) - 1

    def too_low(index: int) -> bool:
        return bool(np.floor(limits[index] * _ROUNDING / per_layer).sum() < num_layers)

    low, high = -1, len(limits)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if too_low(middle) else (low, middle)
    # The best limit is close above as a rule, and a trial costs more the higher it is: stride, then bisect.
    stride = 1
    while (split := _cheapest_split(pools, kv_tokens, limits[high])) is None:
        if high == len(limits) - 1:
            return None
        low, high, stride = high, min(high + stride, len(limits) - 1), stride * 2
    while high - low > 1:
        middle = (low + high) // 2
        other = _cheapest_split(pools, kv_tokens, limits[middle])
        low, high, split = (middle, high, split) if other is None else (low, middle, other)
    return split


def _cheapest_split(pools: Sequence[_Pool], kv_tokens: int, limit_s: float) -> _Split | None:
    """Of the splits whose windows all take `limit_s` at most and fit, one with the least sum of times.

    Dynamic programming over stages: the cheapest way to cover layers [0, end) for every end. Where stages
    share memory it is kept apart by the layer at which their pool begins, as that decides what fits.
    """
    num_layers = len(pools[0].weights) - 1
    best = np.full(num_layers + 1, np.inf)
    best[0] = 0.0
    taken: list[tuple[_Pool, np.ndarray, list[np.ndarray]]] = []
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
    split: _Split = []
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
    costs: np.ndarray, stage: _Stage, kv_tokens: int, limit_s: float
) -> tuple[np.ndarray, np.ndarray]:
    """Costs [rows, layers + 1] with one more stage, which may take nothing; and how many layers it takes."""
    needed = stage.weights + stage.kv_per_token * kv_tokens
    new, choice = costs.copy(), np.zeros(costs.shape, dtype=np.int32)
    for count in range(1, costs.shape[1]):
        seconds = stage.seconds[count:] - stage.seconds[:-count]
        fits = needed[count:] - needed[:-count] <= stage.costs.memory_budget_bytes
        allowed = fits & (seconds <= limit_s * _ROUNDING)
        if not allowed.any():
            break  # nor will any with more layers
        candidates = costs[:, :-count] + np.where(allowed, seconds + _HOP_S, np.inf)
        better = candidates < new[:, count:]
        new[:, count:][better] = candidates[better]
        choice[:, count:][better] = count
    return new, choice


def _blocks_that_fit(pools: Sequence[_Pool], split: _Split, block_size: int) -> int:
    """KV blocks that KV_SHARE of what the weights leave has room for, on every stage and in every pool."""
    ranges = {stage.costs.stage_id: (start, end) for stage, start, end in split}
    blocks = []
    for pool in pools:
        used = [ranges[stage.costs.stage_id] for stage in pool.stages if stage.costs.stage_id in ranges]
        if not used:
            continue
        whole = (used[0][0], used[-1][1])
        holders: list[tuple[_Pool | _Stage, int, tuple[int, int]]] = [(pool, pool.budget, whole)]
        for stage in pool.stages:
            if stage.costs.stage_id in ranges:
                holders.append((stage, stage.costs.memory_budget_bytes, ranges[stage.costs.stage_id]))
        for holder, budget, (start, end) in holders:
            left = budget - int(holder.weights[end] - holder.weights[start])
            per_block = int(holder.kv_per_token[end] - holder.kv_per_token[start]) * block_size
            blocks.append(int(KV_SHARE * left) // max(1, per_block))
    return min(blocks)


def _does_not_fit(
    pools: Sequence[_Pool],
    context: int,
    tokens: Callable[[int], int],
    split_for: Callable[[int], _Split | None],
) -> str:
    weights = min(int(pool.weights[-1] - pool.weights[0]) for pool in pools)
    per_token = min(int(pool.kv_per_token[-1]) for pool in pools)
    needed, available = weights + per_token * tokens(context), sum(pool.budget for pool in pools)
    fitting, too_long = 0, context
    while too_long - fitting > 1:
        middle = (fitting + too_long) // 2
        fitting, too_long = (fitting, middle) if split_for(middle) is None else (middle, too_long)
    message = (
        f"the model does not fit: {_gib(weights)} of weights and {_gib(needed - weights)} of KV cache for one"
        f" sequence of {context} tokens make {_gib(needed)}, the stages have {_gib(available)}"
    )
    if needed <= available:
        message += ", but in parts that no split of whole layers fits"
    if fitting:
        return f"{message}; a context of {fitting} tokens would fit, or add a stage or free memory"
    return f"{message}; add a stage, free memory, or take a smaller quantisation of the model"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 / 10 else f"{num_bytes / 2**20:.2f} MiB"


def _sums(per_layer: Sequence[int], first: int = 0, last: int = 0) -> np.ndarray:
    sums = np.concatenate([[0], np.cumsum(per_layer, dtype=np.int64)])
    sums[0] -= first
    sums[-1] += last
    return sums


def _slowest_s(split: _Split) -> float:
    return max(float(stage.seconds[end] - stage.seconds[start]) for stage, start, end in split)


def _pools_in_ring_order(stages: Sequence[StageCosts]) -> list[_Pool]:
    """Hosts in order of their first stage_id, within them pools likewise, within them stages."""
    ordered = sorted(stages, key=lambda stage: stage.stage_id)
    hosts: dict[str, int] = {}
    pools: dict[str, int] = {}
    for stage in ordered:
        hosts.setdefault(stage.host, len(hosts))
        pools.setdefault(stage.memory_pool, len(pools))
    ordered.sort(key=lambda stage: (hosts[stage.host], pools[stage.memory_pool]))
    return [
        _Pool([_Stage(costs) for costs in group])
        for _, group in groupby(ordered, key=lambda stage: stage.memory_pool)
    ]


def _block_size(stages: Sequence[StageCosts], settings: PlanSettings) -> int:
    asked = {stage.kv_block_size: stage.stage_id for stage in stages if stage.kv_block_size}
    if len(asked) > 1:
        (one, first), (other, second) = sorted(asked.items())[:2]
        raise NotReadyError(
            f"stage {first!r} works in KV blocks of {one} tokens, stage {second!r} of {other}; give both the"
            " same backend"
        )
    return next(iter(asked), settings.kv_block_size)


def _check(model: ModelCosts, stages: Sequence[StageCosts]) -> None:
    if not stages:
        raise NotReadyError("no stage is registered; start a stage daemon and try again")
    for stage in stages:
        if not len(stage.layer_weight_bytes) == len(stage.layer_kv_bytes_per_token) == model.num_layers:
            raise NotReadyError(
                f"stage {stage.stage_id!r} measured {len(stage.layer_weight_bytes)} layers, the model has"
                f" {model.num_layers}; do all stages have the same file?"
            )
