"""Rates of steps as they went by, reported once."""

from __future__ import annotations

import pytest

from stage.backends.cuda.pace import Pace
from stage.placement import Prediction


class Gpu:
    """A host's clock, and a stream that works behind it."""

    def __init__(self) -> None:
        self.now = 0.0  # s
        self.busy_until = 0.0

    def clock(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.busy_until = max(self.busy_until, self.now) + seconds

    def event(self) -> GpuEvent:
        return GpuEvent(self)


class GpuEvent:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.reached = gpu, -1.0

    def record(self) -> None:
        self.reached = max(self.gpu.busy_until, self.gpu.now)

    def query(self) -> bool:
        return self.gpu.now >= self.reached

    def elapsed_time(self, end_event: GpuEvent) -> float:
        assert end_event.query()
        return 1e3 * (end_event.reached - self.reached)


def test_a_minute_of_steps_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    gpu = Gpu()
    pace = Pace(None, gpu.clock, gpu.event)
    for _ in range(200):
        pace.step(1)
        gpu.now += 0.02
    gpu.now += 30  # a pause is no step's time
    for _ in range(100):
        pace.step(8)
        gpu.now += 0.05
    assert pace.rates() == {1: 50.0, 8: 160.0}
    assert "placement_measured" not in capsys.readouterr().out
    gpu.now += 30
    pace.step(1)
    pace.step(1)
    assert capsys.readouterr().out.count("placement_measured") == 1


def test_chunks_count_the_gpus_time_and_not_the_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    """They are issued in a moment and take the GPU a second each; then nobody asks for anything."""
    gpu = Gpu()
    pace = Pace(Prediction(50.0, 200.0, 400.0), gpu.clock, gpu.event)
    assert pace.prefill() is None
    for _ in range(3):
        for rows in (512, 512, 176):
            pace.chunk(rows)
            gpu.work(1.0)
            pace.chunk_ends()
            gpu.now += 0.01
        gpu.now = gpu.busy_until + 5
    assert pace.prefill() == (400.0, 400)
    gpu.now += 60
    pace.step(1)
    line = capsys.readouterr().out
    assert "placement_measured" in line
    for part in ("prefill_tokens_per_s", "400.0", "rows_a_chunk", "predicted", "200.0"):
        assert part in line


def test_a_chunk_between_two_decode_steps_is_neithers_time() -> None:
    gpu = Gpu()
    pace = Pace(None, gpu.clock, gpu.event)
    for _ in range(10):
        pace.step(1)
        gpu.now += 0.02
        pace.chunk(512)
        gpu.work(0.5)
        pace.chunk_ends()
        gpu.now += 0.5
    assert pace.rates() == {1: 50.0}
    assert pace.prefill() == (1024.0, 512)


def test_a_chunk_that_was_given_up_counts_nothing() -> None:
    gpu = Gpu()
    pace = Pace(None, gpu.clock, gpu.event)
    pace.chunk(512)
    gpu.work(0.1)
    pace.chunk(512)
    gpu.work(0.5)
    pace.chunk_ends()
    pace.chunk_ends()  # the last layer of a few rows, which are no chunk
    gpu.now += 1
    assert pace.prefill() == (1024.0, 512)


def test_steps_slower_than_a_pause_count_where_they_are_expected_to_be() -> None:
    gpu = Gpu()
    slow, unknown = (Pace(expected, gpu.clock, gpu.event) for expected in (Prediction(0.5, 2.0, 9.0), None))
    for _ in range(5):
        slow.step(1)
        unknown.step(1)
        gpu.now += 2.5
    gpu.now += 20
    slow.step(1)
    assert slow.rates() == {1: 0.4}
    assert unknown.rates() == {}
