"""Counters of the coordinator: token rates for `status`, and the same numbers for Prometheus."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from common.errors import ConfigError
from coordinator.stage_metrics import StageMetrics

_WINDOW_S = 10.0


class Rate:
    """Events a second over the last `_WINDOW_S` seconds in which there were any."""

    def __init__(self) -> None:
        self._events: deque[tuple[float, int]] = deque()

    def add(self, count: int, now: float) -> None:
        self._events.append((now, count))
        self._expire(now)

    def per_second(self, now: float) -> float:
        self._expire(now)
        if len(self._events) < 2:
            return 0.0
        span = max(now - self._events[0][0], 1e-3)
        return sum(count for _, count in self._events) / span

    def _expire(self, now: float) -> None:
        while self._events and self._events[0][0] < now - _WINDOW_S:
            self._events.popleft()


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.stages = StageMetrics()
        self.registry.register(self.stages)
        self.prefill = Rate()
        self.decode = Rate()
        self.requests_finished = 0
        self.tokens_generated = 0
        self._finished = Counter(
            "pipellm_requests_finished", "Requests ended, by reason", ["reason"], registry=self.registry
        )
        self._generated = Counter("pipellm_tokens_generated", "Tokens generated", registry=self.registry)
        self._prompt = Counter("pipellm_tokens_prefilled", "Prompt tokens computed", registry=self.registry)

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """A value that is asked for when it is scraped."""
        Gauge(f"pipellm_{name}", text, registry=self.registry).set_function(value)

    def serve(self, address: str) -> None:
        """Lets Prometheus scrape at host:port. Raises ConfigError if it cannot be bound."""
        host, _, port = address.rpartition(":")
        try:
            start_http_server(int(port), host.strip("[]"), registry=self.registry)
        except OSError as error:
            raise ConfigError(f"metrics_listen: cannot listen on {address}: {error}") from error

    def prefilled(self, tokens: int) -> None:
        self.prefill.add(tokens, time.monotonic())
        self._prompt.inc(tokens)

    def generated(self, tokens: int) -> None:
        self.decode.add(tokens, time.monotonic())
        self.tokens_generated += tokens
        self._generated.inc(tokens)

    def finished(self, reason: str) -> None:
        self.requests_finished += 1
        self._finished.labels(reason).inc()
