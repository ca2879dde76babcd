"""Settings of the coordinator daemon."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

from common import log, rpc
from common.errors import ConfigError
from common.settings import check_ranges
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
    listen: str = field(default="127.0.0.1:7070", metadata={"help": "host:port or unix:/path to serve on"})
    metrics_listen: str = field(default="", metadata={"help": "host:port for Prometheus to scrape"})
    model_dir: tuple[str, ...] = field(
        default=(), metadata={"help": "a directory of GGUF files; nothing outside is opened"}
    )
    model: str = field(default="", metadata={"help": "model to load once enough stages are there"})
    min_stages: int = field(default=1, metadata={"help": "stages to wait for before a model is loaded"})
    context_length: int = field(
        default=0, metadata={"help": "tokens a sequence may hold; 0: the model's limit, or what fits"}
    )
    kv_block_size: int = field(default=16, metadata={"help": "tokens in a KV block"})
    max_step_tokens: int = field(default=512, metadata={"help": "rows of one forward at most"})
    max_sequences: int = field(default=32, metadata={"help": "sequences computed at once"})
    max_waiting: int = field(default=256, metadata={"help": "requests that may queue"})
    run_ahead: int = field(
        default=0, metadata={"help": "decode iterations issued ahead of their results; 0: two steps"}
    )
    repeat: int = field(default=0, metadata={"help": "decode iterations in one step; 0: 25 to 50 ms of them"})
    lease_s: float = field(default=3.0, metadata={"help": "a stage silent for so long is lost"})
    load_timeout_s: float = field(default=1800.0, metadata={"help": "longest load of a model"})
    step_timeout_s: float = field(
        default=120.0, metadata={"help": "a stage that works longer on one step is lost"}
    )
    drain_s: float = field(default=10.0, metadata={"help": "time for running requests at a clean stop"})
    log_level: str = field(default="info", metadata={"help": "debug, info, warning or error"})

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
