"""Weights streamed to the GPU behind the computation: from pinned memory to a raw slot, repacked into a tile
slot, used from there, each step on a stream of its own.

    copy stream     copy(k + 3)         copy(k + 4)         ...   the link never idles
    repack stream          repack(k + 2)       repack(k + 3)
    compute stream  layers ... layer(k)  layers ... layer(k + 1)

Layers come in a known cyclic order, so that the first ones of the next step travel during the head and the
sampling of this one. A layer's tile slot is fixed by its place in the order: what captured graphs read lies
still. Raw slots take turns.

Why no slot is written while it can still be read. Every slot has two events: `full`, recorded on the
writing stream behind the writer, and `free`, recorded on the reading stream behind the reader. The writer's
stream waits for `free` before it writes, the reader's for `full` before it reads. An event that is waited
for stands for its latest record, so the record has to be *issued* before the wait: this class issues them
from one thread, a slot's next write only after its last read has been issued (`_advance` looks at
`_repacked` and `_copied`, which `release` and `_repack` empty). So, for each slot, write -> full -> read ->
free -> next write is a chain of stream order and event waits, without a gap. Where a read is dropped
(another order), nothing was issued that reads the slot, and its next writer follows the last one on the
same stream. A kernel that starts early (programmatic launch) starts behind the waits that were issued
before it, and `free` is recorded behind its completion. The host's memory: a pinned blob is never written
after load; a ring slot (read_ahead.py) is written again after the event behind its copy.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from common.errors import PipeLLMError
from stage.backends.cuda.launch import Kernels
from stage.backends.cuda.repacker import MatrixRecipe, Repacker
from stage.placement import RAW_SLOTS, TILE_SLOTS


class HostWeights(Protocol):
    """Where the blobs of layers come from."""

    def request(self, layer: int) -> None:
        """Will be taken, after those requested before."""

    def take(self, layer: int, wait: bool) -> np.ndarray | None:
        """The blob, uint8; None: not there yet (only without `wait`)."""

    def copied(self, layer: int, stream: torch.cuda.Stream) -> None:
        """The blob that was taken is needed until the stream is through with what it holds now."""

    def forget(self) -> None:
        """What was requested and not taken is not wanted any more."""


@dataclass
class _Slot:
    memory: torch.Tensor  # uint8
    full: torch.cuda.Event
    free: torch.cuda.Event


# Told, before that work is issued, "copy", "repack" or "compute", the stream, and the memory of the slot that
# the first two write and the last reads: a check for races delays and poisons here.
Hook = Callable[[str, torch.cuda.Stream, torch.Tensor], None]
# Told, after a "copy" or "repack" was issued, the stream, the layer, and the raw slot that the first writes
# and the second reads: a recording of times listens to both.
Issued = Callable[[str, torch.cuda.Stream, int, torch.Tensor], None]


class WeightStream:
    """Used by one thread. `follow` names a step's layers, then each one is acquired and released in turn."""

    def __init__(
        self,
        kernels: Kernels,
        recipes: Mapping[int, Sequence[MatrixRecipe]],
        host: HostWeights,
        raw_bytes: int,
        tile_bytes: int,
        prefetch: bool = True,
        hook: Hook = lambda what, stream, slot: None,
    ) -> None:
        """`raw_bytes`, `tile_bytes`: of the largest layer. `prefetch`: off, a layer is asked for when it is
        needed (to measure what prefetching gains)."""
        from cuda.bindings import driver

        self._driver = driver
        self._kernels, self._recipes, self._host = kernels, recipes, host
        self._prefetch = prefetch
        self.hook = hook
        self.issued: Issued = lambda what, stream, layer, raw: None
        self._device = kernels.device
        self._repacker = Repacker(kernels)
        self._copy_stream = torch.cuda.Stream(self._device)
        self._repack_stream = torch.cuda.Stream(self._device)
        self._raw = [self._slot(raw_bytes) for _ in range(RAW_SLOTS)]
        self._tiles = [self._slot(tile_bytes) for _ in range(TILE_SLOTS)]
        self._raw_turn = 0
        self._order: tuple[int, ...] = ()
        self._border = 0
        # Positions count from the step's first layer; those of the next step go on from there.
        self._consumed = 0
        self._reading = False  # the layer at `_consumed` was acquired and not released
        self._repacked: deque[int] = deque()  # positions whose tile slot is taken
        self._copied: deque[tuple[int, int]] = deque()  # (position, raw slot), not yet repacked
        self._next = 0  # position to copy
        self._requested = 0
        self.bytes_copied = 0
        self.file_wait_s = 0.0  # the host waited for a layer to be read, with nothing else left to issue

    @property
    def tile_slots(self) -> list[torch.Tensor]:
        return [slot.memory for slot in self._tiles]

    def slot_of(self, order: Sequence[int], layer: int) -> int:
        """The tile slot in which a layer of this order is used."""
        return order.index(layer) % TILE_SLOTS

    def follow(self, order: Sequence[int], border: int | None = None) -> None:
        """A step begins, whose streamed layers are these; the first `border` of them (all, if not given) are
        expected to be the next step's first ones too."""
        order = tuple(order)
        queued = [self._order[p % len(self._order)] for p in (*self._repacked, *(p for p, _ in self._copied))]
        if order != self._order or self._consumed or self._reading:
            if self._reading:  # a step was given up within a layer
                torch.cuda.current_stream(self._device).synchronize()
                self._reading = False
            if self._consumed or list(order[: len(queued)]) != queued:
                self._repacked.clear()
                self._copied.clear()
                self._next = 0
            self._host.forget()
            self._requested = self._next
            self._consumed = 0
        self._order = order
        self._border = len(order) if border is None else border
        self._advance()

    def acquire(self, layer: int) -> int:
        """The tile slot in which the layer's weights are, for work that is now put on the current stream."""
        if not self._order or self._order[self._consumed] != layer:
            raise PipeLLMError(f"layer {layer} is not the next of the streamed layers {self._order}: a fault")
        if not self._repacked:
            self._advance(needed=True)
        slot = self._tile_slot(self._repacked[0])
        stream = torch.cuda.current_stream(self._device)
        self._wait(stream, self._tiles[slot].full)
        self.hook("compute", stream, self._tiles[slot].memory)
        self._reading = True
        return slot

    def release(self, layer: int) -> None:
        """All work that reads the layer's slot has been put on the current stream."""
        position = self._repacked.popleft()
        self._tiles[self._tile_slot(position)].free.record(torch.cuda.current_stream(self._device))
        self._reading = False
        self._consumed += 1
        if self._consumed == len(self._order):
            self._wrap()
        if self._prefetch:
            self._advance()

    def close(self) -> None:
        self._copy_stream.synchronize()
        self._repack_stream.synchronize()
        self._raw, self._tiles, self._order = [], [], ()

    def _slot(self, nbytes: int) -> _Slot:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return _Slot(memory, torch.cuda.Event(), torch.cuda.Event())

    def _wrap(self) -> None:
        length = len(self._order)
        self._consumed = 0
        self._next -= length
        self._requested -= length
        self._repacked = deque(position - length for position in self._repacked)
        self._copied = deque((position - length, slot) for position, slot in self._copied)

    def _tile_slot(self, position: int) -> int:
        return position % len(self._order) % TILE_SLOTS

    def _advance(self, needed: bool = False) -> None:
        """Issues all copies and repackings that have a slot. `needed`: waits, on the host, until the weights
        of the next layer to be used have been read."""
        if not self._order or not (needed or self._prefetch):
            return
        limit = len(self._order) + self._border if self._prefetch else self._consumed + 1
        while self._requested < limit:
            self._host.request(self._order[self._requested % len(self._order)])
            self._requested += 1
        while True:
            taken = {self._tile_slot(position) for position in self._repacked}
            if self._copied and self._tile_slot(self._copied[0][0]) not in taken:
                self._repack(*self._copied.popleft())
                continue
            wait = needed and self._next == self._consumed
            if len(self._copied) == RAW_SLOTS or self._next >= limit or not self._copy(wait):
                return

    def _copy(self, wait: bool) -> bool:
        layer = self._order[self._next % len(self._order)]
        started = time.perf_counter() if wait else 0.0
        blob = self._host.take(layer, wait)
        if wait:
            self.file_wait_s += time.perf_counter() - started
        if blob is None:
            return False
        slot, stream = self._raw[self._raw_turn], self._copy_stream
        if not self._prefetch:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        self._wait(stream, slot.free)
        self.hook("copy", stream, slot.memory)
        (code,) = self._driver.cuMemcpyHtoDAsync(
            slot.memory.data_ptr(), blob.ctypes.data, blob.nbytes, stream.cuda_stream
        )
        self._kernels.check(code, f"copying layer {layer} to the GPU")
        slot.full.record(stream)
        self.issued("copy", stream, layer, slot.memory)
        self._host.copied(layer, stream)
        self.bytes_copied += blob.nbytes
        self._copied.append((self._next, self._raw_turn))
        self._raw_turn = (self._raw_turn + 1) % RAW_SLOTS
        self._next += 1
        return True

    def _repack(self, position: int, raw_slot: int) -> None:
        raw, tiles, stream = self._raw[raw_slot], self._tiles[self._tile_slot(position)], self._repack_stream
        self._wait(stream, raw.full)
        self._wait(stream, tiles.free)
        self.hook("repack", stream, tiles.memory)
        layer = self._order[position % len(self._order)]
        with torch.cuda.stream(stream):
            for recipe in self._recipes[layer]:
                self._repacker.run(recipe, raw.memory.data_ptr(), tiles.memory.data_ptr())
        raw.free.record(stream)
        tiles.full.record(stream)
        self.issued("repack", stream, layer, raw.memory)
        self._repacked.append(position)

    def _wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """An event that was never recorded is not waited for."""
        stream.wait_event(event)
