"""The planner against brute force, and its rules one by one."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import NotReadyError, OutOfCapacityError
from coordinator.layer_split import StageCosts
from coordinator.planner import KV_SHARE, ModelCosts, Plan, PlanSettings, plan

MIB = 1 << 20
MODEL = ModelCosts(num_layers=8, context_length=8192)
SETTINGS = PlanSettings(context_length=1024, kv_block_size=16, max_sequences=4)


def stage(stage_id: str, **changes: object) -> StageCosts:
    """A stage that takes 1 ms and 1 MiB a layer, 1 KiB of KV a token and layer, on a host of its own."""
    costs = StageCosts(
        stage_id=stage_id,
        memory_pool=f"memory of {stage_id}",
        host=f"host of {stage_id}",
        layer_decode_s=0.001,
        embedding_s=0.0,
        head_s=0.0,
        layer_weight_bytes=(MIB,) * 8,
        layer_kv_bytes_per_token=(1024,) * 8,
        embedding_bytes=0,
        head_bytes=0,
        memory_budget_bytes=1000 * MIB,
    )
    return replace(costs, **changes)  # type: ignore[arg-type]


def layers(made: Plan) -> list[tuple[str, int, int]]:
    return [(window.stage_id, window.layer_start, window.layer_end) for window in made.windows]


def check(made: Plan, model: ModelCosts, stages: list[StageCosts]) -> None:
    """All layers once and in order, ends in their place, no memory over its budget."""
    starts, ends = ([getattr(w, name) for w in made.windows] for name in ("layer_start", "layer_end"))
    assert starts == [0, *ends[:-1]]
    assert ends[-1] == model.num_layers
    assert all(start < end for start, end in zip(starts, ends, strict=True))
    assert [w.embedding for w in made.windows] == [True] + [False] * (len(starts) - 1)
    assert [w.head for w in made.windows] == [False] * (len(starts) - 1) + [True]
    assert made.num_kv_blocks * made.kv_block_size >= made.context_length
    by_id = {each.stage_id: each for each in stages}
    used: dict[str, int] = {}
    for window in made.windows:
        costs = by_id[window.stage_id]
        needed = need(costs, window.layer_start, window.layer_end, made.num_kv_blocks * made.kv_block_size)
        assert needed <= costs.memory_budget_bytes
        used[costs.memory_pool] = used.get(costs.memory_pool, 0) + needed
    for pool, needed in used.items():
        assert needed <= max(each.memory_budget_bytes for each in stages if each.memory_pool == pool)


def need(costs: StageCosts, start: int, end: int, kv_tokens: int) -> int:
    return (
        sum(costs.layer_weight_bytes[start:end])
        + kv_tokens * sum(costs.layer_kv_bytes_per_token[start:end])
        + costs.embedding_bytes * (start == 0)
        + costs.head_bytes * (end == len(costs.layer_weight_bytes))
    )


def window_s(costs: StageCosts, start: int, end: int) -> float:
    ends_s = costs.embedding_s * (start == 0) + costs.head_s * (end == len(costs.layer_weight_bytes))
    return (end - start) * costs.layer_decode_s + ends_s


def cost(times: list[float]) -> float:
    return max(times) * (sum(times) + 4e-4 * len(times))


def brute_force(num_layers: int, ring: list[StageCosts], kv_tokens: int) -> float | None:
    """The cost of the best split there is, by trying every one."""
    results = []
    for counts in product(range(num_layers + 1), repeat=len(ring)):
        if sum(counts) != num_layers:
            continue
        start, times, used, fits = 0, [], dict.fromkeys((each.memory_pool for each in ring), 0), True
        for costs, count in zip(ring, counts, strict=True):
            if count:
                needed = need(costs, start, start + count, kv_tokens)
                fits &= needed <= costs.memory_budget_bytes
                used[costs.memory_pool] += needed
                times.append(window_s(costs, start, start + count))
            start += count
        for pool, needed in used.items():
            fits &= needed <= max(each.memory_budget_bytes for each in ring if each.memory_pool == pool)
        if fits:
            results.append(cost(times))
    return min(results, default=None)


@st.composite
def meshes(draw: st.DrawFn) -> tuple[ModelCosts, list[StageCosts]]:
    num_layers = draw(st.integers(1, 6))
    model = ModelCosts(num_layers, context_length=512)
    per_layer = st.lists(st.integers(1, 9), min_size=num_layers, max_size=num_layers).map(tuple)
    weights, kv = draw(per_layer), draw(per_layer)
    ends = draw(st.tuples(st.integers(0, 9), st.integers(0, 9)))
    stages = []
    for index in range(draw(st.integers(1, 4))):
        pool = draw(st.sampled_from("abc"))
        stages.append(
            StageCosts(
                stage_id=str(index),
                memory_pool=pool,
                host=pool if pool != "c" else "b",
                layer_decode_s=draw(st.sampled_from([0.001, 0.002, 0.0031, 0.01])),
                embedding_s=draw(st.sampled_from([0.0, 0.0005, 0.004])),
                head_s=draw(st.sampled_from([0.0, 0.003, 0.02])),
                layer_weight_bytes=weights,
                layer_kv_bytes_per_token=kv,
                embedding_bytes=ends[0],
                head_bytes=ends[1],
                memory_budget_bytes=draw(st.integers(0, 200)),
            )
        )
    return model, stages


def ring_order(stages: list[StageCosts]) -> list[StageCosts]:
    first: dict[str, str] = {}
    for each in sorted(stages, key=lambda each: each.stage_id):
        first.setdefault(f"host {each.host}", each.stage_id)
        first.setdefault(f"pool {each.memory_pool}", each.stage_id)

    def place(each: StageCosts) -> tuple[str, str, str]:
        return first[f"host {each.host}"], first[f"pool {each.memory_pool}"], each.stage_id

    return sorted(stages, key=place)


@given(meshes())
@settings(max_examples=150, deadline=None)
def test_as_good_as_brute_force(mesh: tuple[ModelCosts, list[StageCosts]]) -> None:
    model, stages = mesh
    wanted = PlanSettings(context_length=4, kv_block_size=2, max_sequences=3)
    best = brute_force(model.num_layers, ring_order(stages), kv_tokens=4)
    if best is None:
        with pytest.raises(OutOfCapacityError):
            plan(model, stages, wanted)
        return
    made = plan(model, stages, wanted)
    check(made, model, stages)
    assert cost([window.predicted_s for window in made.windows]) == pytest.approx(best)
    order = [each.stage_id for each in ring_order(stages)]
    places = [order.index(window.stage_id) for window in made.windows]
    assert places == sorted(places)
    for window in made.windows:
        costs = next(each for each in stages if each.stage_id == window.stage_id)
        assert window.predicted_s == pytest.approx(window_s(costs, window.layer_start, window.layer_end))


@given(meshes(), st.integers(16, 64))
@settings(max_examples=50, deadline=None)
def test_an_automatic_context_fits_and_slows_nothing(
    mesh: tuple[ModelCosts, list[StageCosts]], limit: int
) -> None:
    model, stages = replace(mesh[0], context_length=limit), mesh[1]
    stages = [replace(each, memory_budget_bytes=each.memory_budget_bytes * 50) for each in stages]
    automatic = PlanSettings(context_length=0, kv_block_size=16, max_sequences=1)
    try:
        made = plan(model, stages, automatic)
    except OutOfCapacityError:
        assert brute_force(model.num_layers, ring_order(stages), kv_tokens=-(-limit // 16) * 16) is None
        return
    check(made, model, stages)
    assert made.context_length == limit  # below every floor, so it is all or nothing


# --- rules ------------------------------------------------------------------------------------------------


def test_equal_stages_share_equally_in_order_of_their_names() -> None:
    made = plan(MODEL, [stage("b"), stage("a")], SETTINGS)
    assert layers(made) == [("a", 0, 4), ("b", 4, 8)]
    assert [window.predicted_s for window in made.windows] == pytest.approx([0.004, 0.004])


def test_embedding_and_head_count() -> None:
    stages = [stage(name, head_s=0.003, embedding_s=0.001) for name in "ab"]
    assert layers(plan(MODEL, stages, SETTINGS)) == [("a", 0, 5), ("b", 5, 8)]


def test_a_faster_stage_takes_more() -> None:
    made = plan(MODEL, [stage("a"), stage("b", layer_decode_s=0.0015)], SETTINGS)
    assert layers(made) == [("a", 0, 5), ("b", 5, 8)]


def test_memory_caps_a_fast_stage() -> None:
    small = stage("a", memory_budget_bytes=5 * MIB)  # a layer and 1024 tokens of its KV take 2 MiB
    made = plan(MODEL, [small, stage("b", layer_decode_s=0.01)], SETTINGS)
    assert layers(made) == [("a", 0, 2), ("b", 2, 8)]
    check(made, MODEL, [small, stage("b", layer_decode_s=0.01)])


def test_a_stage_that_does_not_help_is_left_out() -> None:
    made = plan(MODEL, [stage("a"), stage("b", layer_decode_s=1.0)], SETTINGS)
    assert layers(made) == [("a", 0, 8)]


@pytest.mark.parametrize("slow_layer_s", [0.003, 0.0078])
def test_a_slow_stage_is_left_out_even_where_the_slowest_window_would_gain(slow_layer_s: float) -> None:
    """A CPU beside a GPU: one layer there makes the pace a little faster, and a stream far slower."""
    gpu, cpu = stage("gpu"), stage("cpu", layer_decode_s=slow_layer_s)
    assert layers(plan(MODEL, [gpu, cpu], SETTINGS)) == [("gpu", 0, 8)]
    small = replace(gpu, memory_budget_bytes=13 * MIB)  # 2 MiB a layer: six of eight
    made = plan(MODEL, [small, cpu], SETTINGS)
    assert sorted(layers(made), key=lambda window: window[0]) == [("cpu", 0, 2), ("gpu", 2, 8)]


def test_a_stage_is_of_use_up_to_about_two_and_a_half_times_the_time() -> None:
    """Of many layers and short hops: the pace gains what the way loses where it is 1 + sqrt(2) times."""
    model = replace(MODEL, num_layers=400)
    many = {"layer_weight_bytes": (1,) * 400, "layer_kv_bytes_per_token": (1,) * 400}
    for slowness, num_windows in ((2.3, 2), (2.5, 1)):
        stages = [stage("a", **many), stage("b", **many, layer_decode_s=0.001 * slowness)]
        assert len(plan(model, stages, SETTINGS).windows) == num_windows


def test_a_stage_beside_one_of_its_kind_shares_a_model_that_fits_on_one() -> None:
    """Many streams gain twofold; a single one loses a hop."""
    made = plan(MODEL, [stage("a"), stage("b"), stage("c", layer_decode_s=0.01)], SETTINGS)
    assert layers(made) == [("a", 0, 4), ("b", 4, 8)]


def test_no_more_windows_than_needed() -> None:
    three_layers = replace(MODEL, num_layers=3)
    stages = [
        stage(name, layer_weight_bytes=(MIB,) * 3, layer_kv_bytes_per_token=(1024,) * 3, head_s=0.002)
        for name in "abcd"
    ]
    assert layers(plan(three_layers, stages, SETTINGS)) == [("a", 0, 2), ("b", 2, 3)]


def test_stages_of_one_host_are_neighbours() -> None:
    stages = [stage("a", host="x"), stage("b", host="y"), stage("c", host="x"), stage("d", host="y")]
    assert [window.stage_id for window in plan(MODEL, stages, SETTINGS).windows] == ["a", "c", "b", "d"]


def test_shared_memory_is_counted_once() -> None:
    fast = [stage(name, memory_pool="x", host="x", memory_budget_bytes=8 * MIB) for name in "ab"]
    slow = stage("c", layer_decode_s=0.01)
    made = plan(MODEL, [*fast, slow], SETTINGS)
    assert layers(made) == [("a", 0, 4), ("c", 4, 8)]  # 2 MiB a layer: half of the model
    with pytest.raises(OutOfCapacityError):
        plan(MODEL, fast, SETTINGS)


# --- KV cache and context ---------------------------------------------------------------------------------


def test_kv_cache_holds_all_sequences_where_memory_allows() -> None:
    made = plan(MODEL, [stage("a")], SETTINGS)
    assert (made.context_length, made.kv_block_size) == (1024, 16)
    assert made.num_kv_blocks == 4 * 1024 // 16


def test_kv_cache_takes_its_share_of_what_is_left() -> None:
    made = plan(MODEL, [stage("a", memory_budget_bytes=38 * MIB)], SETTINGS)  # 8 of weights
    assert made.num_kv_blocks == int(KV_SHARE * 30 * MIB) // (16 * 8 * 1024)


def test_one_sequence_may_take_all_that_is_left() -> None:
    made = plan(MODEL, [stage("a", memory_budget_bytes=16 * MIB)], SETTINGS)
    assert made.num_kv_blocks == 1024 // 16


def test_block_size_is_the_stages_where_they_have_one() -> None:
    made = plan(MODEL, [stage("a"), stage("b", kv_block_size=32)], SETTINGS)
    assert made.kv_block_size == 32
    with pytest.raises(NotReadyError, match="'a' works in KV blocks of 16 tokens, stage 'b' of 32"):
        plan(MODEL, [stage("a", kv_block_size=16), stage("b", kv_block_size=32)], SETTINGS)


def test_a_context_is_never_longer_than_the_models_own() -> None:
    made = plan(replace(MODEL, context_length=100), [stage("a")], SETTINGS)
    assert made.context_length == 100
    assert made.num_kv_blocks == 4 * 7


def test_automatic_context_is_the_models_limit_or_what_fits() -> None:
    automatic = replace(SETTINGS, context_length=0)
    assert plan(MODEL, [stage("a")], automatic).context_length == 8192
    made = plan(MODEL, [stage("a", memory_budget_bytes=50 * MIB)], automatic)  # 42 MiB are 5376 tokens
    assert made.context_length == 5376
    made = plan(MODEL, [stage("a", memory_budget_bytes=15 * MIB)], automatic)  # 7 MiB are 896 tokens
    assert made.context_length == 768


def test_automatic_context_does_not_move_layers_to_a_slow_stage() -> None:
    stages = [stage("a", memory_budget_bytes=50 * MIB), stage("b", layer_decode_s=0.1)]
    made = plan(MODEL, stages, replace(SETTINGS, context_length=0))
    assert layers(made) == [("a", 0, 8)]
    assert made.context_length == 5376
    asked_for = plan(MODEL, stages, replace(SETTINGS, context_length=8192))
    assert (asked_for.context_length, len(asked_for.windows)) == (8192, 2)


def refusal(stages: list[StageCosts], settings: PlanSettings = SETTINGS) -> str:
    with pytest.raises(OutOfCapacityError) as caught:
        plan(MODEL, stages, settings)
    return str(caught.value)


def test_what_does_not_fit_is_refused_with_what_is_missing_and_what_would_help() -> None:
    said = refusal([stage("a", memory_budget_bytes=12 * MIB)])
    assert (
        "8.00 MiB of weights and 8.00 MiB of KV cache for one sequence of 1024 tokens make 16.00 MiB" in said
    )
    assert (
        "the only stage, 'a', has 12.00 MiB: 4.00 MiB are missing; a context of 512 tokens would fit" in said
    )
    assert "add a stage with 4.00 MiB free" in said
    assert "take a smaller quantisation of the model whose weights take at most 4.00 MiB" in said

    said = refusal([stage("a", memory_budget_bytes=3 * MIB), stage("b", memory_budget_bytes=1 * MIB)])
    assert "the 2 stages ('a' 3.00 MiB, 'b' 1.00 MiB) have 4.00 MiB: 12.00 MiB are missing" in said
    assert "would fit" not in said  # not even the weights do
    assert said.endswith("take a smaller quantisation of the model")

    unasked = replace(SETTINGS, context_length=0)
    assert "one sequence of 512 tokens" in refusal([stage("a", memory_budget_bytes=9 * MIB)], unasked)

    said = refusal([stage(str(index), memory_budget_bytes=3 * MIB) for index in range(6)])
    assert "no split of whole layers fits" in said and "missing" not in said


def test_stages_that_contradict_the_model_are_refused() -> None:
    with pytest.raises(NotReadyError, match="no stage is registered"):
        plan(MODEL, [], SETTINGS)
    with pytest.raises(NotReadyError, match="'a' measured 3 layers, the model has 8"):
        plan(MODEL, [stage("a", layer_weight_bytes=(1, 1, 1))], SETTINGS)


def test_large_meshes_are_planned_quickly() -> None:
    model = ModelCosts(num_layers=200, context_length=4096)
    stages = [
        stage(
            f"{index:02d}",
            layer_decode_s=0.001 + 0.0001 * (index % 5),
            layer_weight_bytes=(MIB,) * 200,
            layer_kv_bytes_per_token=(1024,) * 200,
            head_s=0.002,
        )
        for index in range(64)
    ]
    began = time.perf_counter()
    made = plan(model, stages, SETTINGS)
    assert time.perf_counter() - began < 5  # tens of milliseconds; room for a busy machine
    check(made, model, stages)
