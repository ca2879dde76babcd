"""Records when copies, repackings, pieces of steps and layers on the host were at work, for a timeline.

CUDA events that take times sit on either side of each; the host's clock is brought to theirs by an event that
both have seen. Nothing is recorded, and nothing waits differently, before `begin` and after `end`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stage.backends.cuda.offload import OffloadedLayers
from stage.backends.cuda.pieces import Piece, RunPiece
from stage.backends.timeline import COMPUTE, COPY, HOST, REPACK, Activity

_ISSUING, _SLOT, _COPY = "the host to issue it", "a slot", "a copy"


@dataclass
class _Work:
    """On a stream of the GPU. `after`: chains of (cause, work that had to be through, or the host's time)."""

    lane: str
    name: str
    issued_s: float
    start: torch.cuda.Event
    end: torch.cuda.Event
    after: tuple[tuple[tuple[str, _Work | float], ...], ...]
    nbytes: int = 0


class StreamRecording:
    """Of a stage's steps, as the thread that runs them issues them."""

    def __init__(self, offloaded: OffloadedLayers) -> None:
        self._offloaded = offloaded
        self._stream = offloaded.stream
        self._works: list[_Work] = []
        self._hosts: list[Activity] = []
        self._steps: list[_Work] = []  # each step's first piece
        self._begun: dict[str, tuple[torch.cuda.Event, float, torch.Tensor]] = {}
        # By the slot's address: what wrote it last, what read it last.
        self._writer: dict[int, _Work] = {}
        self._reader: dict[int, _Work] = {}
        self._tiles: torch.Tensor | None = None  # that the next piece reads
        self._host_done: float | None = None  # the last run of host layers, if no piece has followed

    def begin(self) -> None:
        """The GPU must have nothing to do."""
        self._zero = _event()
        self._zero.record()
        self._zero.synchronize()
        self._zero_s = time.perf_counter()
        self._kept = self._stream.hook, self._stream.issued
        self._stream.hook, self._stream.issued = self._before, self._after
        self._offloaded.around = self._around
        if self._offloaded.host is not None:
            self._kept_ran = self._offloaded.host.ran
            self._offloaded.host.ran = self._ran

    def end(self) -> None:
        self._stream.hook, self._stream.issued = self._kept
        self._offloaded.around = None
        if self._offloaded.host is not None:
            self._offloaded.host.ran = self._kept_ran

    def activities(self) -> list[Activity]:
        """What was recorded, once the GPU is through with it; seconds from `begin`."""
        return [self._activity(work) for work in self._works] + self._hosts

    def step_starts(self) -> list[float]:
        """When each step's first piece began, likewise."""
        return [self._at(work.start) for work in self._steps]

    # --- told by the stream, the pieces and the host --------------------------------------------------------

    def _before(self, what: str, stream: torch.cuda.Stream, slot: torch.Tensor) -> None:
        if what == "compute":
            self._tiles = slot
            return
        self._begun[what] = (_recorded(stream), self._now(), slot)

    def _after(self, what: str, stream: torch.cuda.Stream, layer: int, raw: torch.Tensor) -> None:
        start, issued_s, slot = self._begun.pop(what)
        issuing = ((_ISSUING, issued_s),)
        address = slot.data_ptr()
        used = self._reader.get(address)
        slot_free = ((_SLOT, used),) if used is not None else ()
        if what == "copy":
            work = _Work(
                COPY, f"layer {layer}", issued_s, start, _recorded(stream), (issuing, slot_free),
                self._offloaded.layer_bytes(layer),
            )  # fmt: skip
        else:
            copied = self._writer.get(raw.data_ptr())
            copy_through = ((_COPY, copied),) if copied is not None else ()
            after = (issuing, slot_free, copy_through)
            work = _Work(REPACK, f"layer {layer}", issued_s, start, _recorded(stream), after)
            self._reader[raw.data_ptr()] = work
        self._writer[address] = work
        self._works.append(work)

    def _around(self, run_piece: RunPiece) -> RunPiece:
        def run(piece: Piece) -> None:
            stream = torch.cuda.current_stream(self._offloaded.device)
            tiles, self._tiles = self._tiles, None
            issued_s = self._now()
            start = _recorded(stream)
            run_piece(piece)
            chains: list[tuple[tuple[str, _Work | float], ...]] = []
            if self._host_done is not None:
                chains.append((("layers on the host", self._host_done), (_ISSUING, issued_s)))
                self._host_done = None
            else:
                chains.append(((_ISSUING, issued_s),))
            repacked = self._writer.get(tiles.data_ptr()) if tiles is not None else None
            if repacked is not None:
                copies = [one for chain in repacked.after for cause, one in chain if cause == _COPY]
                chains.append((*((_COPY, one) for one in copies), ("the repacking", repacked)))
            work = _Work(COMPUTE, _named(piece), issued_s, start, _recorded(stream), tuple(chains))
            if tiles is not None:
                self._reader[tiles.data_ptr()] = work
            if piece.is_first:
                self._steps.append(work)
            self._works.append(work)

        return run

    def _ran(self, layers: Sequence[int], started: float, arrived: float, computed: float) -> None:
        called_s, arrived_s, self._host_done = (one - self._zero_s for one in (started, arrived, computed))
        waits = ((("its turn", called_s), ("the GPU", arrived_s)),)
        self._hosts.append(Activity(HOST, _range("layer", layers), arrived_s, self._host_done, waits))

    # --- times ----------------------------------------------------------------------------------------------

    def _activity(self, work: _Work) -> Activity:
        waits = tuple(
            tuple((cause, self._at(one.end) if isinstance(one, _Work) else one) for cause, one in chain)
            for chain in work.after
            if chain
        )
        return Activity(work.lane, work.name, self._at(work.start), self._at(work.end), waits, work.nbytes)

    def _at(self, event: torch.cuda.Event) -> float:
        return float(self._zero.elapsed_time(event)) / 1e3

    def _now(self) -> float:
        return time.perf_counter() - self._zero_s


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = _event()
    event.record(stream)
    return event


def _named(piece: Piece) -> str:
    streamed = f"layer {piece.streamed}" if piece.streamed is not None else ""
    more = len(piece.layers) - (1 if streamed else 0)
    residents = f"{more} resident" if more else ""
    ends = "embedding" if piece.is_first else "", "head" if piece.is_last else ""
    return ", ".join(part for part in (ends[0], streamed, residents, ends[1]) if part) or "nothing"


def _range(what: str, numbers: Sequence[int]) -> str:
    return f"{what} {numbers[0]}" if len(numbers) == 1 else f"{what}s {numbers[0]} to {numbers[-1]}"
