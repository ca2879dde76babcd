"""The order of copies, repackings and uses, with streams and events that only keep account: a vector clock
each.

Every access to a slot must happen after those it conflicts with, by stream order and event waits alone, and
find the layer that was meant; whatever orders follow one another, wherever a step is given up. With any wait
left out, a race is found. (That the GPU then computes the same bits is test_streaming_gpu.py's matter.)
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stage.backends.cuda import streaming
from stage.backends.cuda.streaming import WeightStream

Clock = dict[int, int]
LAYERS = 9


class Race(Exception):
    pass


class Account:
    """All streams, events and slots of one run."""

    def __init__(self, skipped: str = "") -> None:
        self.skipped = skipped
        self.host: Clock = {}  # what the host has waited for: all that it issues comes after
        self.accesses: dict[int, list[tuple[int, int, bool]]] = {}  # by slot: stream, its time, written?
        self.content: dict[int, int] = {}  # by slot: layer
        self.streams = 0
        self.compute = Stream(self)
        self.current = self.compute

    def access(self, stream: Stream, slot: int, write: bool) -> None:
        now = stream.tick()
        for other, then, wrote in self.accesses.get(slot, []):
            if (write or wrote) and stream.clock.get(other, 0) < then:
                raise Race(f"slot {slot}: {'written' if write else 'read'} while it may be in use")
        self.accesses.setdefault(slot, []).append((stream.number, now, write))


class Stream:
    def __init__(self, account: Account) -> None:
        self.account, self.clock, self.number = account, dict[int, int](), account.streams
        self.cuda_stream = self
        account.streams += 1

    def tick(self) -> int:
        _merge(self.clock, self.account.host)
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return self.clock[self.number]

    def wait_event(self, event: Event) -> None:
        _merge(self.clock, event.clock)

    def wait_stream(self, other: Stream) -> None:
        _merge(self.clock, other.clock)

    def synchronize(self) -> None:
        _merge(self.account.host, self.clock)


class Event:
    def __init__(self) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream) -> None:
        stream.tick()
        self.clock = dict(stream.clock)


class Repacker:
    """Reads a raw slot and writes a tile slot, on the current stream."""

    account: Account

    def __init__(self, kernels: Any) -> None: ...

    def run(self, recipe: Any, blob: int, slot: int) -> None:
        account = self.account
        account.access(account.current, blob, write=False)
        account.access(account.current, slot, write=True)
        account.content[slot] = account.content[blob]


class Host:
    """Blobs of one byte a layer; some of them not there until they are waited for."""

    def __init__(self, late: list[bool]) -> None:
        self.late, self.requested = late, list[int]()

    def request(self, layer: int) -> None:
        self.requested.append(layer)

    def take(self, layer: int, wait: bool) -> np.ndarray | None:
        if not wait and self.late and self.late.pop():
            return None
        assert self.requested.pop(0) == layer
        return np.full(1, layer, np.uint8)

    def copied(self, layer: int, stream: Any) -> None: ...

    def forget(self) -> None:
        self.requested.clear()


def _merge(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        clock[stream] = max(clock.get(stream, 0), time)


@contextmanager
def accounted(account: Account, host: Host, prefetch: bool = True) -> Iterator[WeightStream]:
    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, account.current = account.current, stream
        yield
        account.current = before

    def copy(target: int, source: int, nbytes: int, stream: Stream) -> tuple[int]:
        account.access(stream, target, write=True)
        account.content[target] = ctypes.c_uint8.from_address(source).value
        return (0,)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", lambda device: Stream(account))
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "stream", on)
        patch.setattr(torch.cuda, "current_stream", lambda device: account.current)
        patch.setattr(streaming, "Repacker", Repacker)
        Repacker.account = account
        kernels: Any = SimpleNamespace(device=torch.device("cpu"), check=lambda code, doing: None)
        recipes: Any = {layer: [object()] for layer in range(LAYERS)}
        stream = WeightStream(kernels, recipes, host, 1, 1, prefetch)
        stream._driver = SimpleNamespace(cuMemcpyHtoDAsync=copy)
        if account.skipped:
            slots, event = account.skipped.split(".")
            left_out = [getattr(slot, event) for slot in getattr(stream, slots)]
            wait = stream._wait

            def without(on: Any, what: Any) -> None:
                if not any(what is one for one in left_out):
                    wait(on, what)

            stream._wait = without  # type: ignore[assignment,method-assign]
        yield stream


def run_step(
    account: Account, stream: WeightStream, order: tuple[int, ...], given_up_after: int | None
) -> None:
    stream.follow(order)
    for number, layer in enumerate(order):
        account.compute.tick()  # a resident layer
        slot = stream.acquire(layer)
        tiles = stream.tile_slots[slot].data_ptr()
        if slot != stream.slot_of(order, layer):
            raise Race("a layer is used in another slot than graphs expect")
        account.access(account.compute, tiles, write=False)
        if account.content[tiles] != layer:
            raise Race(f"layer {account.content[tiles]} lies where layer {layer} should")
        if number == given_up_after:
            return
        stream.release(layer)


orders = st.lists(st.integers(0, LAYERS - 1), unique=True, max_size=LAYERS).map(sorted).map(tuple)
steps = st.lists(
    st.tuples(st.integers(0, 2), st.none() | st.integers(0, LAYERS - 1)), min_size=1, max_size=12
)


@given(st.tuples(orders, orders, orders), steps, st.lists(st.booleans(), max_size=60), st.booleans())
@settings(max_examples=150, deadline=None)
def test_no_slot_is_written_while_it_may_be_read(
    known: tuple[tuple[int, ...], ...],
    taken: list[tuple[int, int | None]],
    late: list[bool],
    prefetch: bool,
) -> None:
    account = Account()
    with accounted(account, Host(late), prefetch) as stream:
        for which, given_up_after in taken:
            run_step(account, stream, known[which], given_up_after)


@pytest.mark.parametrize("skipped", ["_raw.full", "_raw.free", "_tiles.full", "_tiles.free"])
def test_each_wait_is_needed(skipped: str) -> None:
    account = Account(skipped)
    with accounted(account, Host([])) as stream, pytest.raises(Race):
        for _ in range(3):
            run_step(account, stream, tuple(range(LAYERS)), None)


def test_copies_for_the_next_step_are_issued_before_it_begins() -> None:
    account = Account()
    with accounted(account, Host([])) as stream:
        run_step(account, stream, (1, 4, 7), None)
        ahead = stream.bytes_copied
        assert ahead == 3 + 4  # two in tile slots, two more in raw ones
        stream.follow((1, 4, 7))
        assert stream.bytes_copied == ahead
        stream.follow((1, 5))  # another order: what is of no use is dropped, the rest is copied anew
        run_step(account, stream, (1, 5), None)
