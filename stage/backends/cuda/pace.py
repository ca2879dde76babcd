"""How fast steps really go by, said once beside what was predicted."""

from __future__ import annotations

import time
from collections.abc import Callable

from common.log import get_logger

REPORT_AFTER_S = 60.0
_PAUSE_S = 1.0  # a longer gap between two steps is none of theirs


class Pace:
    """Counts decode steps by their rows; a minute after the first one it logs their rates."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began: float | None = None
        self._last: tuple[float, int] | None = None
        self._counted: dict[int, tuple[int, float]] = {}  # steps and seconds, by rows
        self._reported = False

    def step(self, num_rows: int) -> None:
        """A step of so many rows begins."""
        if self._reported:
            return
        now = self._clock()
        if self._began is None:
            self._began = now
        if self._last is not None and now - self._last[0] < _PAUSE_S:
            steps, seconds = self._counted.get(self._last[1], (0, 0.0))
            self._counted[self._last[1]] = steps + 1, seconds + now - self._last[0]
        self._last = (now, num_rows)
        if now - self._began >= REPORT_AFTER_S:
            self._reported = True
            get_logger().info("placement_measured", tokens_per_s=self.rates())

    def rates(self) -> dict[int, float]:
        """Tokens a second, of all rows together, by the rows of a step (with padding)."""
        return {
            rows: round(rows * steps / seconds, 1)
            for rows, (steps, seconds) in sorted(self._counted.items())
            if seconds > 0
        }
