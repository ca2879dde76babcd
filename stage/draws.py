"""A thread that waits for tokens which a device draws by itself, so that the engine's thread need not."""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable

from stage.backends.base import PendingDraws
from stage.faults import device_fault
from stage.sampler import Drawn

Drawns = list[list[Drawn]]


class DrawReader:
    """Reads draws in the order they were put; each is then posted as a call on what they drew."""

    def __init__(
        self, post: Callable[[Callable[[], None]], None], on_failure: Callable[[Exception], None]
    ) -> None:
        self.busy_s = 0.0  # time for which draws were awaited: the device was computing
        self._post = post
        self._on_failure = on_failure
        self._waiting: queue.SimpleQueue[tuple[PendingDraws, Callable[[Drawns], None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._main, name="draws", daemon=True)
        self._thread.start()

    def put(self, draws: PendingDraws, take: Callable[[Drawns], None]) -> None:
        self._waiting.put((draws, take))

    def close(self) -> None:
        """Ends the thread after what it has been given. Idempotent."""
        self._waiting.put(None)
        self._thread.join()

    def _main(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            draws, take = waiting
            started = time.monotonic()
            try:
                drawn = draws.wait()
            except Exception as error:
                self._on_failure(device_fault(error) or error)
                return
            self.busy_s += time.monotonic() - started
            self._post(functools.partial(take, drawn))
