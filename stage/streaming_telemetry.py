"""What a stage says of the weights that it streams: sums since the load, and the link's rate of late."""

from __future__ import annotations

import threading
import time

from protos import model_pb2
from stage.runner import Runner


class StreamingTelemetry:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = (0, 0.0, 0)  # epoch, when, bytes copied

    def read(self, epoch: int, runner: Runner) -> model_pb2.StreamingStatus | None:
        """None where it streams nothing. The rate is that since the previous call, 0 at an epoch's first."""
        counters = runner.streaming()
        if counters is None:
            return None
        now = time.monotonic()
        with self._lock:
            (known, then, before), self._last = self._last, (epoch, now, counters.bytes_copied)
        is_next = known == epoch and now > then
        return model_pb2.StreamingStatus(
            bytes_copied=counters.bytes_copied,
            link_bytes_per_s=(counters.bytes_copied - before) / (now - then) if is_next else 0.0,
            max_link_bytes_per_s=counters.max_link_bytes_per_s,
            file_wait_s=counters.file_wait_s,
            gpu_wait_s=counters.gpu_wait_s,
            host_s=counters.host_s,
        )
