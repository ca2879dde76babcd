"""Placements: within their budgets, never worse for having more, and what predictions are made of."""

from __future__ import annotations

from dataclasses import replace

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ConfigError, OutOfCapacityError
from stage.backends.choose import backend_factory
from stage.backends.host_memory import stated_bytes
from stage.config import StageConfig
from stage.memory_settings import MemorySettings, parse_amount, parse_places
from stage.placement import (
    Budgets,
    LayerSize,
    PartSize,
    Place,
    Rates,
    arrange,
    choose,
    describe,
    keep_hosts,
    measure,
    pinned_layers,
)

MB = 1_000_000
RATES = Rates(
    link=55e9, link_beside_host=50e9, host=85e9, host_beside_link=80e9, gpu=3e12, gpu_prefill=25_000 * 32,
    file=8e9, other_s=1e-4,
)  # fmt: skip
LLAMA_8B = [LayerSize(131 * MB, 131 * MB, 17 * MB)] * 32



def layer_of(attention: int, experts: int, kv_bytes: int, active: float) -> LayerSize:
    """Bytes of the two parts; no experts: a dense layer of that size."""
    size = attention + experts
    if not experts:
        return LayerSize(size, size + size // 9, kv_bytes)
    share = (attention + experts * active) / size
    return LayerSize(
        size, size + size // 9, kv_bytes, share, experts=PartSize(experts, experts + experts // 9, active)
    )


layer_strategy = st.builds(
    layer_of,
    attention=st.integers(1, 100 * MB),
    experts=st.just(0) | st.integers(1, 300 * MB),
    kv_bytes=st.integers(0, 50 * MB),
    active=st.floats(0.05, 1),
)
layers_strategy = st.lists(layer_strategy, min_size=1, max_size=8)
budgets_strategy = st.builds(
    Budgets, gpu_bytes=st.integers(0, 4000 * MB), host_bytes=st.integers(0, 4000 * MB),
    pinned_bytes=st.integers(0, 4000 * MB),
)  # fmt: skip


@given(layers_strategy, budgets_strategy)
@settings(max_examples=80, deadline=None)
def test_a_choice_stays_within_every_budget(layers: list[LayerSize], budgets: Budgets) -> None:
    try:
        chosen = choose(layers, budgets, RATES)
    except OutOfCapacityError:
        return
    assert len(chosen.places) == len(layers)
    used = sum(
        one.packed_bytes if place == Place.RESIDENT else one.packed_bytes - one.experts.packed_bytes
        for one, place in zip(layers, chosen.places, strict=True)
        if place == Place.RESIDENT or place.is_split
    )
    assert all(one.experts.raw_bytes for one, p in zip(layers, chosen.places, strict=True) if p.is_split)
    kv_on_gpu = sum(
        one.kv_bytes for one, place in zip(layers, chosen.places, strict=True) if place != Place.HOST
    )
    assert used + kv_on_gpu <= chosen.gpu_bytes <= budgets.gpu_bytes
    assert chosen.host_bytes <= budgets.host_bytes
    off_gpu = [one.off_gpu(place) for one, place in zip(layers, chosen.places, strict=True)]
    assert sum(off_gpu[i].raw_bytes for i in chosen.pinned) <= chosen.pinned_bytes <= budgets.pinned_bytes
    assert chosen == choose(layers, budgets, RATES)
    assert measure(layers, chosen.places, budgets, RATES) == chosen


@given(
    layer_strategy,
    st.integers(1, 8),
    budgets_strategy,
    st.sampled_from(["gpu_bytes", "host_bytes", "pinned_bytes"]),
    st.integers(0, 2000 * MB),
)
@settings(max_examples=80, deadline=None)
def test_more_memory_is_never_slower(
    layer: LayerSize, count: int, budgets: Budgets, which: str, more: int
) -> None:
    layers = [layer] * count
    try:
        before = choose(layers, budgets, RATES)
    except OutOfCapacityError:
        return
    after = choose(layers, replace(budgets, **{which: getattr(budgets, which) + more}), RATES)
    assert after.prediction.both >= before.prediction.both


@given(st.integers(1, 80), st.data())
def test_an_arrangement_has_what_was_asked_for_and_spreads_it(num_layers: int, data: st.DataObject) -> None:
    streamed = data.draw(st.integers(0, num_layers))
    host = data.draw(st.integers(0, num_layers - streamed))
    places = arrange(num_layers, streamed, host)
    assert len(places) == num_layers
    assert places.count(Place.STREAMED) == streamed
    assert places.count(Place.HOST) == host
    if streamed:
        assert places[0] == Place.STREAMED
    if streamed >= host > 0:  # never two host layers before the link has brought another one
        assert all(places[i : i + 2] != (Place.HOST, Place.HOST) for i in range(num_layers))


def test_larger_steps_compute_fewer_layers_on_the_host() -> None:
    slow = replace(RATES, host_batch_8=6.0)
    placement = measure(LLAMA_8B, arrange(32, 7, 9), Budgets(10**12, 10**12, 10**12), slow)
    batch = placement.batch_places
    assert placement.places.count(Place.HOST) == 9 > batch.count(Place.HOST) > 0
    assert all(b == p or p == Place.HOST for b, p in zip(batch, placement.places, strict=True))
    assert placement.prediction.batch_8 > 8 / (9 * 131e6 * 6 / 85e9)
    for kept in range(10):
        assert keep_hosts(placement.places, kept).count(Place.HOST) == kept


QWEN3_30B = [layer_of(20 * MB, 360 * MB, 8 * MB, 8 / 128)] * 48


def test_experts_of_which_few_are_read_go_to_the_host_by_themselves() -> None:
    """A GPU with room for all attention and few experts: the host reads a sixteenth of the others."""
    budgets = Budgets(8_000 * MB, 64_000 * MB, 64_000 * MB)
    chosen = choose(QWEN3_30B, budgets, RATES)
    assert chosen.count(Place.HOST_EXPERTS) > 20
    assert not chosen.count(Place.HOST) and not chosen.count(Place.STREAMED)
    assert "host-experts" in describe(chosen)
    off = len(QWEN3_30B) - chosen.count(Place.RESIDENT)
    for whole in (arrange(48, off, 0), arrange(48, 0, off)):
        assert chosen.prediction.batch_1 > 1.2 * measure(QWEN3_30B, whole, budgets, RATES).prediction.batch_1
    everything = Budgets(20_000 * MB, 0, 0)
    assert choose(QWEN3_30B, everything, RATES).places == (Place.RESIDENT,) * 48
    # Attention alone does not fit: whole layers go, too.
    little = choose(QWEN3_30B, Budgets(2_500 * MB, 64_000 * MB, 64_000 * MB), RATES)
    assert little.gpu_bytes <= 2_500 * MB


def test_what_a_split_layer_takes_and_costs() -> None:
    budgets = Budgets(10**12, 10**12, 10**12)
    layer = LayerSize(380 * MB, 400 * MB, 8 * MB, 0.1, experts=PartSize(360 * MB, 370 * MB, 0.0625))
    host = measure([layer] * 4, (Place.HOST_EXPERTS,) * 4, budgets, RATES)
    assert host.gpu_bytes == 4 * (20 + 8) * MB + 2 * 370 * MB + 2 * 360 * MB
    assert host.host_bytes == host.pinned_bytes == 4 * 370 * MB
    # No run of layers: hidden states cross for each.
    step_s = 4 * (370 * MB * 0.0625 / 85e9 + RATES.crossing_s + 20 * MB / 3e12) + RATES.other_s
    assert host.prediction.batch_1 == pytest.approx(1 / step_s)
    streamed = measure([layer] * 4, (Place.STREAMED_EXPERTS,) * 4, budgets, RATES)
    assert streamed.gpu_bytes == host.gpu_bytes
    assert streamed.prediction.batch_1 == pytest.approx(55e9 / (4 * 370 * MB))
    assert streamed.prediction.prefill == host.prediction.prefill
    ring = measure([layer] * 4, (Place.HOST_EXPERTS,) * 4, replace(budgets, pinned_bytes=3 * 370 * MB), RATES)
    assert ring.pinned == () and ring.host_bytes == (3 + 4) * 370 * MB


def test_in_larger_steps_experts_leave_the_host_for_the_link() -> None:
    places = (Place.HOST_EXPERTS, Place.RESIDENT, Place.HOST_EXPERTS, Place.HOST, Place.HOST_EXPERTS)
    split = Place.STREAMED_EXPERTS
    assert keep_hosts(places, 0) == (split, Place.RESIDENT, split, Place.STREAMED, split)
    assert keep_hosts(places, 4) == places
    slow = replace(RATES, host_batch_8=1000.0)
    placement = measure(QWEN3_30B[:5], places, Budgets(10**12, 10**12, 10**12), slow)
    assert not any(place.on_host for place in placement.batch_places)


def test_everything_stays_resident_where_it_fits() -> None:
    chosen = choose(LLAMA_8B, Budgets(5000 * MB, 0, 0), RATES)
    assert chosen.places == (Place.RESIDENT,) * 32
    assert chosen.pinned_bytes == 0


def test_link_and_cores_share_what_does_not_fit() -> None:
    """Half of Llama-8B: neither all streamed nor all on the host, and faster than either."""
    budgets = Budgets(16 * 131 * MB + 32 * 17 * MB + 4 * 131 * MB, 64_000 * MB, 64_000 * MB)
    chosen = choose(LLAMA_8B, budgets, RATES)
    assert chosen.count(Place.RESIDENT) >= 15
    assert chosen.count(Place.STREAMED) and chosen.count(Place.HOST)
    for streamed, host in ((16, 0), (0, 16)):
        one_sided = measure(LLAMA_8B, arrange(32, streamed, host), budgets, RATES)
        assert chosen.prediction.batch_1 > 1.3 * one_sided.prediction.batch_1
    assert 44 < chosen.prediction.batch_1 < 70
    assert "streamed" in describe(chosen)


def test_a_prediction_is_the_links_time_when_only_the_link_is_used() -> None:
    budgets = Budgets(10**12, 10**12, 10**12)
    streamed = measure(LLAMA_8B, arrange(32, 16, 0), budgets, RATES)
    assert streamed.prediction.batch_1 == pytest.approx(55e9 / (16 * 131 * MB))
    assert streamed.prediction.batch_8 == pytest.approx(8 * 55e9 / (16 * 131 * MB))
    assert streamed.prediction.prefill == pytest.approx(512 / (16 * 131 * MB / 55e9 + 1e-4))


def test_layers_beyond_the_pinned_pool_come_at_the_files_rate() -> None:
    budgets = Budgets(10**12, 10**12, 8 * 131 * MB)
    placement = measure(LLAMA_8B, arrange(32, 16, 0), budgets, RATES)
    assert len(placement.pinned) == 8 - 3  # the ring takes the rest
    seconds = 5 * 131 * MB / 55e9 + 11 * 131 * MB / 8e9
    assert placement.prediction.batch_1 == pytest.approx(1 / seconds)


def test_a_pool_too_small_for_the_ring_is_refused() -> None:
    with pytest.raises(OutOfCapacityError, match="300 bytes of it"):
        pinned_layers([Place.STREAMED] * 4, [100] * 4, 299)
    assert pinned_layers([Place.STREAMED] * 4, [100] * 4, 300) == ((), 300)
    assert pinned_layers([Place.STREAMED] * 4, [100] * 4, 400) == ((0, 1, 2, 3), 400)


def test_what_fits_nowhere_is_refused_with_what_would_be_enough() -> None:
    with pytest.raises(OutOfCapacityError, match="GPU memory"):
        choose(LLAMA_8B, Budgets(100 * MB, 10**12, 10**12), RATES)
    fixed = [replace(LLAMA_8B[0], streamable=False)] * 32
    with pytest.raises(OutOfCapacityError, match="layer 0 cannot be streamed"):
        choose(fixed, Budgets(100 * MB, 10**12, 10**12), RATES)
    with pytest.raises(OutOfCapacityError, match="gpu_memory"):
        measure(LLAMA_8B, arrange(32, 0, 0), Budgets(100 * MB, 10**12, 10**12), RATES)


def test_explicit_placements_are_parsed_and_checked() -> None:
    assert parse_places("2:4=streamed, 5=host,0=resident,7=host-experts,8=streamed-experts") == {
        2: Place.STREAMED, 3: Place.STREAMED, 5: Place.HOST, 0: Place.RESIDENT,
        7: Place.HOST_EXPERTS, 8: Place.STREAMED_EXPERTS,
    }  # fmt: skip
    for wrong in ("", "2:2=host", "1=disk", "0:3=host,2=streamed", "a=host", "1-2=host", "1=experts"):
        with pytest.raises(ConfigError, match="placement"):
            parse_places(wrong)
    MemorySettings("12GB", "0.5", "8GiB", "0:4=host").check()
    with pytest.raises(ConfigError, match="pinned_memory"):
        MemorySettings(pinned_memory="lots").check()


def test_amounts_are_bytes_or_fractions() -> None:
    assert parse_amount("auto", 100) is None
    assert parse_amount("0.5", 1000) == 500
    assert parse_amount("12GB", 0) == 12 * 10**9
    assert parse_amount("1.5GiB", 0) == 3 << 29
    assert parse_amount("12345678", 0) == 12345678
    assert parse_amount("0", 0) == 0
    assert parse_amount("8G", 0) == parse_amount("8 GiB", 0) == 8 << 30
    assert parse_amount("512M", 0) == parse_amount("512MiB", 0) == 512 << 20
    assert parse_amount("80%", 1000) == parse_amount("0.8", 1000) == 800
    assert parse_amount("100 %", 1000) == parse_amount("1.0", 1000) == 1000
    for wrong in ("", "half", "-1", "1e9", "12 TB", "1", "16", "1.5", "101%", "%", "0.00001MB"):
        with pytest.raises(ConfigError, match=r"GB.* share"):
            parse_amount(wrong, 1)


@pytest.mark.parametrize("name", ["memory", "gpu_memory", "host_memory", "pinned_memory"])
def test_every_memory_setting_is_written_alike(name: str) -> None:
    for amount in ("auto", "90000000", "8G", "80%"):
        assert getattr(StageConfig(**{name: amount}).checked(), name) == amount
    for wrong in ("5", "8 potatoes"):
        with pytest.raises(ConfigError, match=rf"^{name}: '{wrong}' .*GB"):
            StageConfig(**{name: wrong}).checked()


def test_a_cpu_stage_takes_the_share_of_memory_that_it_was_told() -> None:
    total = psutil.virtual_memory().total
    for amount, wanted in (("512M", 512 << 20), ("50%", total // 2)):
        backend = backend_factory(StageConfig(backend="reference", memory=amount))()
        assert backend.memory_budget_bytes() == pytest.approx(wanted, abs=1)
    assert stated_bytes("auto") == 0
