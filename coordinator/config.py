"""Settings of the coordinator daemon."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from common import log, rpc
from common.errors import ConfigError
from common.settings import check_ranges, setting
from coordinator.pace import MAX_REPEAT

_MAX_COUNT = 2**31 - 1  # counts travel as uint32 and are added to one another
_MAX_WAIT_S = 1e6
_RANGES = {
    "min_stages": (1, _MAX_COUNT), "context_length": (0, _MAX_COUNT), "kv_block_size": (1, _MAX_COUNT),
    "max_step_tokens": (1, _MAX_COUNT), "max_sequences": (1, _MAX_COUNT), "max_waiting": (0, _MAX_COUNT),
    "run_ahead": (0, _MAX_COUNT), "repeat": (0, MAX_REPEAT),
    "lease_s": (0.1, 3600.0), "load_timeout_s": (0.1, _MAX_WAIT_S), "step_timeout_s": (0.1, _MAX_WAIT_S),
    "drain_s": (0.0, _MAX_WAIT_S),
}  # fmt: skip


@dataclass(frozen=True)
class CoordinatorConfig:
    listen: str = setting("127.0.0.1:7070", "host:port or unix:/path to serve on", "ADDRESS")
    metrics_listen: str = setting("", "host:port for Prometheus to scrape", "ADDRESS")
    model_dir: tuple[str, ...] = setting((), "a directory of GGUF files; nothing outside is opened", "DIR")
    model: str = setting("", "model to load once enough stages are there", "NAME")
    min_stages: int = setting(1, "stages to wait for before a model is loaded")
    context_length: int = setting(0, "tokens a sequence may hold; 0: the model's limit, or what fits")
    kv_block_size: int = setting(16, "tokens in a KV block")
    max_step_tokens: int = setting(512, "rows of one forward at most")
    max_sequences: int = setting(32, "sequences computed at once")
    max_waiting: int = setting(256, "requests that may queue")
    run_ahead: int = setting(0, "decode iterations issued ahead of their results; 0: two steps")
    repeat: int = setting(0, "decode iterations in one step; 0: 25 to 50 ms of them")
    lease_s: float = setting(3.0, "a stage silent for so long is lost", "SECONDS")
    load_timeout_s: float = setting(1800.0, "longest load of a model", "SECONDS")
    step_timeout_s: float = setting(120.0, "a stage that works longer on one step is lost", "SECONDS")
    drain_s: float = setting(10.0, "time for running requests at a clean stop", "SECONDS")
    log_level: str = setting("info", "debug, info, warning or error", "LEVEL")

    def checked(self) -> CoordinatorConfig:
        """The same with directories made absolute. Raises ConfigError naming the setting."""
        rpc.check_address(self.listen)
        if self.metrics_listen:
            rpc.check_address(self.metrics_listen)
            if self.metrics_listen.startswith("unix:"):
                raise ConfigError(f"metrics_listen is {self.metrics_listen}, expected host:port")
        check_ranges(self, _RANGES)
        if self.log_level not in log.LEVELS:
            raise ConfigError(f"log_level is {self.log_level!r}, expected one of {', '.join(log.LEVELS)}")
        for directory in self.model_dir:
            if not os.path.isdir(directory):
                raise ConfigError(f"model_dir {directory!r} is not a directory")
        directories = tuple(os.path.abspath(directory) for directory in self.model_dir)
        return replace(self, model_dir=directories)
