"""The layer plan: which stage runs which layers, and how much KV cache there is. A pure function.

Layers go to the stages in ring order so that two times of a decode row are short, in proportion to one
another: one token's way round all windows and hops, which is what a single stream waits for, and the slowest
window, since a ring that is full advances at its pace (`layer_split.cost`). A stage that would lengthen the
one by more than it shortens the other gets layers only where the model does not fit otherwise. Memory is a
cap, never an aim. What a stage needs is what it measured (`ProfileResponse`); how it is reached, loaded and
linked is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.errors import NotReadyError, OutOfCapacityError
from common.sizes import gib
from coordinator.layer_split import (
    ROUNDING,
    Pool,
    Split,
    Stage,
    StageCosts,
    best_split,
    cost,
    pools_in_ring_order,
)

# Of the memory that weights leave, what the KV cache takes beyond one sequence's need: activations and
# whatever else runs there want some too.
KV_SHARE = 0.8
# A context chosen by itself costs no speed down to the first of these, and is refused below the last.
AUTO_CONTEXT_FLOORS = (4096, 512)
_AUTO_CONTEXT_STEP = 256


@dataclass(frozen=True)
class ModelCosts:
    """What does not depend on the stage."""

    num_layers: int
    context_length: int  # the model's own limit


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


def plan(model: ModelCosts, stages: Sequence[StageCosts], settings: PlanSettings) -> Plan:
    """Splits layers [0, num_layers) over the stages; a stage that would not help gets no window.

    Stages of one host are neighbours in the ring, else they are ordered by stage_id. The KV cache holds at
    least one sequence of the context's length, at most `max_sequences` of them, and between these KV_SHARE of
    the memory that is left. A context length of 0 becomes the model's limit, or as much as fits without
    slowing the plan down.

    NotReadyError: no stages, or stages that contradict one another. OutOfCapacityError: does not fit.
    """
    _check(model, stages)
    pools = pools_in_ring_order(stages)
    block_size = _block_size(stages, settings)

    def tokens(context: int) -> int:
        return -(-context // block_size) * block_size

    def split_for(context: int) -> Split | None:
        return best_split(pools, tokens(context))

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


def _auto_context(limit: int, split_for: Callable[[int], Split | None]) -> int:
    """The longest context up to the model's limit whose plan is as fast as at the first floor that fits;
    0 if none does."""
    for floor in AUTO_CONTEXT_FLOORS:
        shortest = min(floor, limit)
        split = split_for(shortest)
        if split is None:
            continue
        least = cost(split)

        def slows_nothing(context: int, least: float = least) -> bool:
            other = split_for(context)
            return other is not None and cost(other) <= least * ROUNDING

        if slows_nothing(limit):
            return limit
        low, high = shortest // _AUTO_CONTEXT_STEP, -(-limit // _AUTO_CONTEXT_STEP)
        while high - low > 1:
            middle = (low + high) // 2
            longer = slows_nothing(middle * _AUTO_CONTEXT_STEP)
            low, high = (middle, high) if longer else (low, middle)
        return max(shortest, low * _AUTO_CONTEXT_STEP)
    return 0


def _blocks_that_fit(pools: Sequence[Pool], split: Split, block_size: int) -> int:
    """KV blocks that KV_SHARE of what the weights leave has room for, on every stage and in every pool."""
    blocks = []
    for pool in pools:
        windows = [window for window in split if window[0] in pool.stages]
        if not windows:
            continue
        together = (pool, windows[0][1], windows[-1][2])
        holders: list[tuple[Pool | Stage, int, int]] = [together, *windows]
        for holder, start, end in holders:
            left = holder.budget - int(holder.weights[end] - holder.weights[start])
            per_block = int(holder.kv_per_token[end] - holder.kv_per_token[start]) * block_size
            blocks.append(int(KV_SHARE * left) // max(1, per_block))
    return min(blocks)


def _does_not_fit(
    pools: Sequence[Pool],
    context: int,
    tokens: Callable[[int], int],
    split_for: Callable[[int], Split | None],
) -> str:
    weights = min(int(pool.weights[-1] - pool.weights[0]) for pool in pools)
    per_token = min(int(pool.kv_per_token[-1]) for pool in pools)
    needed, available = weights + per_token * tokens(context), sum(pool.budget for pool in pools)
    fitting, too_long = 0, context
    while too_long - fitting > 1:
        middle = (fitting + too_long) // 2
        fitting, too_long = (fitting, middle) if split_for(middle) is None else (middle, too_long)
    message = (
        f"the model does not fit: {gib(weights)} of weights and {gib(needed - weights)} of KV cache for one"
        f" sequence of {context} tokens make {gib(needed)}, the {_stages(pools)} {gib(available)}"
    )
    if needed <= available:
        message += ", but in parts that no split of whole layers fits"
    else:
        message += f": {gib(needed - available)} are missing"
    remedies = [f"a context of {fitting} tokens would fit"] if fitting else []
    remedies.append(
        f"add a stage with {gib(needed - available)} free" if needed > available else "add a stage"
    )
    remedies.append("free memory")
    smaller = available - (needed - weights)
    room = f" whose weights take at most {gib(smaller)}" if needed > available and smaller > 0 else ""
    remedies.append(f"take a smaller quantisation of the model{room}")
    return f"{message}; {', or '.join(remedies)}"


def _stages(pools: Sequence[Pool]) -> str:
    """Whose memory it is, named where there are few."""
    ids = [stage.costs.stage_id for pool in pools for stage in pool.stages]
    if len(ids) == 1:
        return f"only stage, {ids[0]!r}, has"
    named = (
        f" ({', '.join(f'{_name(pool)} {gib(pool.budget)}' for pool in pools)})" if len(pools) <= 8 else ""
    )
    return f"{len(ids)} stages{named} have"


def _name(pool: Pool) -> str:
    return " and ".join(repr(stage.costs.stage_id) for stage in pool.stages)


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
