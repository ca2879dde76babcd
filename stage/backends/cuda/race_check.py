"""Disturbs streamed weights where a race would show: random waits on each of the three streams, and slots
that are overwritten with nonsense before they are filled. Results must not change by a bit."""

from __future__ import annotations

import random

import torch

from common.errors import InvalidRequestError
from stage.backends.base import Backend

_DELAYED_SHARE = 0.6
_MAX_DELAY_CYCLES = 2_000_000  # about a millisecond
_POISON = 0xEE


def disturb(backend: Backend, seed: int = 0) -> None:
    """For the rest of a loaded backend's life. Raises InvalidRequestError where it streams nothing."""
    offloaded = getattr(backend, "offloaded", None)
    if offloaded is None:
        raise InvalidRequestError(f"the {backend.name} backend streams no weights here: nothing to check")
    offloaded.stream.hook = Disturbance(seed)


class Disturbance:
    """A `streaming.Hook`."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def __call__(self, what: str, stream: torch.cuda.Stream, slot: torch.Tensor) -> None:
        with torch.cuda.stream(stream):
            if what != "compute":
                slot.fill_(_POISON)
            if self._draw.random() < _DELAYED_SHARE:
                torch.cuda._sleep(self._draw.randrange(_MAX_DELAY_CYCLES))
