"""How fast steps really go by, said once beside what was predicted.

Decode steps are timed by the host's clock, from one's beginning to the next one's: the host is held to the
GPU's pace there. A prompt's chunks are issued far ahead of it, so those are timed by events around their
layers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

from common.log import get_logger
from stage.placement import Prediction

REPORT_AFTER_S = 60.0
_PAUSE_S = 1.0  # a longer gap between two steps is none of theirs, unless steps are expected to take as long
_LATE = 4.0  # times longer than expected
_UNDER_WAY = 64  # chunks whose events are kept


class Event(Protocol):
    """As torch.cuda.Event with times; recorded on the current stream."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Any) -> float: ...


def _cuda_event() -> Event:
    event: Event = torch.cuda.Event(enable_timing=True)
    return event


class Pace:
    """Counts steps by their rows; a minute after the first one it logs their rates. Used by one thread."""

    def __init__(
        self,
        expected: Prediction | None = None,
        clock: Callable[[], float] = time.monotonic,
        event: Callable[[], Event] = _cuda_event,
    ) -> None:
        self._expected = expected
        self._clock, self._event = clock, event
        self._began: float | None = None
        self._last: tuple[float, int] | None = None
        self._counted: dict[int, tuple[int, float]] = {}  # steps and seconds, by rows
        self._chunk: tuple[int, Event] | None = None  # rows and the event before its first layer
        self._chunks: deque[tuple[int, Event, Event]] = deque(maxlen=_UNDER_WAY)
        self._prefilled = (0, 0, 0.0)  # chunks, rows, seconds
        self._reported = False

    def step(self, num_rows: int) -> None:
        """A step of so many rows begins, of decode or as few as that."""
        self._begins(num_rows)

    def chunk(self, num_rows: int) -> None:
        """A step with so many rows of prompts begins: its layers are issued from here on to `chunk_ends`."""
        self._begins(None)
        if not self._reported:
            self._chunk = num_rows, self._event()
            self._chunk[1].record()

    def chunk_ends(self) -> None:
        """The last layer of a step was issued; without a chunk it is nothing."""
        if self._chunk is not None:
            (num_rows, start), end = self._chunk, self._event()
            end.record()
            self._chunks.append((num_rows, start, end))
            self._chunk = None

    def rates(self) -> dict[int, float]:
        """Tokens a second of decode, of all rows together, by the rows of a step (with padding)."""
        return {
            rows: round(rows * steps / seconds, 1)
            for rows, (steps, seconds) in sorted(self._counted.items())
            if seconds > 0
        }

    def prefill(self) -> tuple[float, int] | None:
        """Tokens a second of a prompt's chunks, and how many rows one had on the average."""
        self._count_chunks()
        chunks, rows, seconds = self._prefilled
        return (round(rows / seconds, 1), round(rows / chunks)) if seconds > 0 else None

    def _begins(self, decode_rows: int | None) -> None:
        if self._reported:
            return
        now = self._clock()
        if self._began is None:
            self._began = now
        if self._last is not None and now - self._last[0] < self._longest_s(self._last[1]):
            steps, seconds = self._counted.get(self._last[1], (0, 0.0))
            self._counted[self._last[1]] = steps + 1, seconds + now - self._last[0]
        self._last = None if decode_rows is None else (now, decode_rows)
        self._count_chunks()
        if now - self._began >= REPORT_AFTER_S:
            self._reported = True
            self._report()

    def _longest_s(self, num_rows: int) -> float:
        if self._expected is None:
            return _PAUSE_S
        step_s = 1 / self._expected.batch_1 if num_rows == 1 else 8 / self._expected.batch_8
        return max(_PAUSE_S, _LATE * step_s)

    def _count_chunks(self) -> None:
        """Those that the GPU is through with."""
        while self._chunks and self._chunks[0][2].query():
            num_rows, start, end = self._chunks.popleft()
            chunks, rows, seconds = self._prefilled
            self._prefilled = chunks + 1, rows + num_rows, seconds + start.elapsed_time(end) / 1e3

    def _report(self) -> None:
        found: dict[str, object] = {"tokens_per_s": self.rates()}
        prefill = self.prefill()
        if prefill is not None:
            found["prefill_tokens_per_s"], found["rows_a_chunk"] = prefill
        if self._expected is not None:
            found["predicted"] = {
                "batch 1": round(self._expected.batch_1, 1),
                "batch 8": round(self._expected.batch_8, 1),
                "prefill": round(self._expected.prefill, 1),
            }
        get_logger().info("placement_measured", **found)
