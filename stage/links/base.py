"""What a link is: the sending half of the one-way connection to the next stage of the ring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from common.errors import PipeLLMError
from common.wire import Frame

# Told once, from the link's own thread, when the link breaks.
OnBroken = Callable[[PipeLLMError], None]


class Link(Protocol):
    carrier: str  # "grpc", "shm", "cuda_ipc"
    round_trip_s: float  # of the self-test

    def send(self, frame: Frame) -> None:
        """Hands a frame on without waiting for the peer; order is kept."""

    def close(self) -> None:
        """Ends the link and its threads; frames not yet sent may be lost. Idempotent."""
