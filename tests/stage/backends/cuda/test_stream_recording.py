"""A recording of the weight stream, on streams and events that keep simulated time: the report of it says
what the simulation was made to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from stage.backends import timeline
from stage.backends.cuda import stream_recording, streaming
from stage.backends.cuda.pieces import Piece
from stage.backends.cuda.stream_recording import StreamRecording
from stage.backends.cuda.streaming import WeightStream
from stage.backends.timeline import COMPUTE, COPY, HOST, REPACK, Report

LAYERS = (0, 1, 2, 3)
NBYTES = 1000


class Clock:
    def __init__(self) -> None:
        self.host_s = 100.0  # the host's clock, which began elsewhere
        self.current: Stream


class Stream:
    def __init__(self, clock: Clock) -> None:
        self.clock, self.until_s = clock, 0.0
        self.cuda_stream = self

    def run(self, seconds: float) -> None:
        self.until_s = max(self.until_s, self.clock.host_s) + seconds

    def wait_event(self, event: Event) -> None:
        self.until_s = max(self.until_s, event.at_s)

    def synchronize(self) -> None:
        self.clock.host_s = max(self.clock.host_s, self.until_s)


class Event:
    clock: Clock

    def __init__(self, enable_timing: bool = False) -> None:
        self.timing, self.at_s = enable_timing, 0.0

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.clock.current
        stream.until_s = self.at_s = max(stream.until_s, self.clock.host_s)

    def synchronize(self) -> None:
        self.clock.host_s = max(self.clock.host_s, self.at_s)

    def elapsed_time(self, other: Event) -> float:
        assert self.timing and other.timing
        return (other.at_s - self.at_s) * 1e3


class Host:
    def request(self, layer: int) -> None: ...

    def take(self, layer: int, wait: bool) -> np.ndarray:
        return np.zeros(NBYTES, np.uint8)

    def copied(self, layer: int, stream: Any) -> None: ...

    def forget(self) -> None: ...


@contextmanager
def simulated(clock: Clock, copy_s: float, repack_s: float) -> Iterator[WeightStream]:
    class Repacker:
        def __init__(self, kernels: Any) -> None: ...

        def run(self, recipe: Any, blob: int, slot: int) -> None:
            clock.current.run(repack_s)

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, clock.current = clock.current, stream
        yield
        clock.current = before

    def copy(target: int, source: int, nbytes: int, stream: Stream) -> tuple[int]:
        stream.run(copy_s)
        return (0,)

    clock.current, Event.clock = Stream(clock), clock
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", lambda device: Stream(clock))
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "stream", on)
        patch.setattr(torch.cuda, "current_stream", lambda device: clock.current)
        patch.setattr(streaming, "Repacker", Repacker)
        patch.setattr(stream_recording, "time", SimpleNamespace(perf_counter=lambda: clock.host_s))
        kernels: Any = SimpleNamespace(device=torch.device("cpu"), check=lambda code, what: None)
        recipes: Any = {layer: [None] for layer in LAYERS}
        stream = WeightStream(kernels, recipes, Host(), NBYTES, NBYTES)
        stream._driver = SimpleNamespace(cuMemcpyHtoDAsync=copy)
        yield stream


def record(
    copy_s: float, repack_s: float, compute_s: float, host_s: float = 0.0, issue_s: float = 0.0
) -> tuple[Report, WeightStream]:
    """Of the third of four steps of a streamed layer after the other, each followed by a resident piece; the
    host may compute before the last piece, and takes `issue_s` for each piece."""
    clock = Clock()
    with simulated(clock, copy_s, repack_s) as stream:
        hosts = SimpleNamespace(ran=lambda layers, *times: None)
        offloaded: Any = SimpleNamespace(
            stream=stream, around=None, host=hosts, device=None, layer_bytes=lambda layer: NBYTES
        )
        kept = stream.hook, stream.issued, hosts.ran
        recording = StreamRecording(offloaded)
        recording.begin()

        def run_piece(piece: Piece) -> None:
            clock.current.run(compute_s)

        for _ in range(4):
            run = offloaded.around(run_piece)
            stream.follow(LAYERS)
            run(Piece(0, True, False, (), None, ()))
            for layer in LAYERS:
                clock.host_s += issue_s
                stream.acquire(layer)
                run(Piece(1 + layer, False, False, (), layer, (None,)))  # type: ignore[arg-type]
                stream.release(layer)
            if host_s:
                started = clock.host_s
                clock.current.synchronize()
                arrived = clock.host_s
                clock.host_s += host_s
                hosts.ran((7, 8), started, arrived, clock.host_s)
            run(Piece(9, False, True, (7, 8) if host_s else (), None, ()))
        recording.end()
        assert (stream.hook, stream.issued, hosts.ran) == kept and offloaded.around is None
        starts = recording.step_starts()
        assert len(starts) == 4
        return timeline.analyse(recording.activities(), starts[2], starts[3], NBYTES / copy_s), stream


def test_the_link_is_the_limit() -> None:
    report, stream = record(copy_s=10.0, repack_s=1.0, compute_s=1.0)
    assert report.seconds == pytest.approx(40.0) and report.link_share == pytest.approx(1.0)
    assert report.stalls_s[COPY] == {}
    assert report.busy_s[COMPUTE] == pytest.approx(6.0) and report.busy_s[REPACK] == pytest.approx(4.0)
    # Of the 34 s in which it does nothing the GPU waits 4 for the repackings, and else for copies.
    assert report.stalls_s[COMPUTE] == pytest.approx({"a copy": 30.0, "the repacking": 4.0})
    assert {one.name for one in report.activities if one.lane == COPY} == {f"layer {i}" for i in LAYERS}
    assert stream.bytes_copied >= 16 * NBYTES


def test_the_computation_is_the_limit() -> None:
    report, _ = record(copy_s=1.0, repack_s=1.0, compute_s=10.0)
    assert report.seconds == pytest.approx(60.0) and report.busy_s[COMPUTE] == pytest.approx(60.0)
    assert report.stalls_s[COMPUTE] == {}
    assert report.overlap == pytest.approx(1.0) and report.link_share == pytest.approx(4 / 60)
    assert report.stalls_s[COPY]["a slot"] == pytest.approx(56.0, abs=2)


def test_the_repacking_is_the_limit() -> None:
    report, _ = record(copy_s=1.0, repack_s=10.0, compute_s=0.5)
    assert report.seconds == pytest.approx(40.0)
    assert report.stalls_s[COMPUTE]["the repacking"] == pytest.approx(37.0)
    assert report.stalls_s[REPACK] == {} and report.busy_s[REPACK] == pytest.approx(40.0)


def test_the_host_computes_while_the_gpu_waits() -> None:
    report, _ = record(copy_s=1.0, repack_s=0.1, compute_s=1.0, host_s=20.0)
    assert report.busy_s[HOST] == pytest.approx(20.0)
    assert report.stalls_s[COMPUTE]["layers on the host"] == pytest.approx(20.0)
    assert report.stalls_s[HOST]["the GPU"] == pytest.approx(6.0)
    assert [one.name for one in report.activities if one.lane == HOST] == ["layers 7 to 8"]


def test_a_host_that_issues_too_late_is_named() -> None:
    report, _ = record(copy_s=1.0, repack_s=0.1, compute_s=1.0, issue_s=5.0)
    assert report.stalls_s[COMPUTE]["the host to issue it"] == pytest.approx(report.seconds - 6.0, abs=0.5)
    # Copies were issued ahead: what they wait for is what the late pieces hold.
    assert report.stalls_s[COPY] == pytest.approx({"a slot": report.seconds - 4.0})
