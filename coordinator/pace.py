"""How fast a group decodes, and from that how many iterations a step may hold.

A message between processes costs about the same whether it carries one token or thirty, so steps are cut by
time: however fast the stages are, a group's messages come at a bounded rate.
"""

from __future__ import annotations

import math

STEP_S = 0.025  # of work a step holds at least; up to twice that, and no stage should report a part of it
MAX_REPEAT = 64
_FEW = 8  # where iterations are slow, so many are worth a longer step: messages disturb those who compute
_UNMEASURED_REPEAT = 4


class Pace:
    """Time of an iteration, measured from step to step; the latest count most."""

    def __init__(self) -> None:
        self._iterations = 0.0
        self._seconds = 0.0
        self._idle_from = 0.0  # when the last finished step ended: the next one cannot have begun before

    def passed(self, now: float) -> None:
        """A step has finished that tells nothing about decoding."""
        self._idle_from = now

    def decoded(self, iterations: int, issued_s: float, now: float) -> None:
        """A step of so many iterations, issued at `issued_s`, has finished.

        Sums are halved, not quotients averaged: where one step's end is learnt late, the next seems short by
        as much, and the sums stay right."""
        self._iterations = self._iterations / 2 + iterations
        self._seconds = self._seconds / 2 + now - max(issued_s, self._idle_from)
        self._idle_from = now

    @property
    def repeat(self) -> int:
        """The fewest iterations that take `STEP_S`, or up to `_FEW` that take no more than twice that."""
        if not self._iterations:
            return _UNMEASURED_REPEAT
        in_a_step = self._iterations * STEP_S / max(self._seconds, 1e-9)
        return min(MAX_REPEAT, max(math.ceil(in_a_step), min(_FEW, int(2 * in_a_step))))
