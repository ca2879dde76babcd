"""A stage's sums are passed on, and the link's rate is that since the last report."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stage import streaming_telemetry
from stage.backends.base import StreamingCounters
from stage.streaming_telemetry import StreamingTelemetry


def test_the_rate_is_that_since_the_previous_report(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(streaming_telemetry, "time", SimpleNamespace(monotonic=lambda: now[0]))
    counters = [StreamingCounters(bytes_copied=100, host_s=1.5, max_link_bytes_per_s=50.0)]
    runner: Any = SimpleNamespace(streaming=lambda: counters[0])
    telemetry = StreamingTelemetry()
    first = telemetry.read(1, runner)
    assert first is not None and first.link_bytes_per_s == 0 and first.bytes_copied == 100
    assert first.host_s == 1.5 and first.max_link_bytes_per_s == 50.0
    now[0], counters[0] = 12.0, StreamingCounters(bytes_copied=180)
    second = telemetry.read(1, runner)
    assert second is not None and second.link_bytes_per_s == 40.0
    now[0], counters[0] = 13.0, StreamingCounters(bytes_copied=5)
    other = telemetry.read(2, runner)  # counts from its own beginning
    assert other is not None and other.link_bytes_per_s == 0


def test_a_stage_that_streams_nothing_says_nothing() -> None:
    runner: Any = SimpleNamespace(streaming=lambda: None)
    assert StreamingTelemetry().read(1, runner) is None
