"""Which backend a stage runs on: the one asked for, or the best that this machine has."""

from __future__ import annotations

from collections.abc import Callable

import torch

from common.errors import ConfigError
from stage.backends.base import Backend
from stage.config import StageConfig


def backend_factory(config: StageConfig) -> Callable[[], Backend]:
    """A function that makes the backend `config` asks for. Raises ConfigError for what is not there."""
    device = config.device
    if device != "auto" and device != "cpu" and not device.startswith("cuda:"):
        raise ConfigError(f"device is {device!r}, expected cpu, cuda:N or auto")
    if config.backend == "cuda" or device.startswith("cuda"):
        raise ConfigError(
            f"no CUDA backend in this build (backend {config.backend!r}, device {device!r}); "
            "use --backend reference --device cpu"
        )
    if config.backend == "cpu":
        raise ConfigError("no native CPU backend in this build; use --backend reference")

    def make_reference() -> Backend:
        from stage.backends.reference import ReferenceBackend

        torch.set_num_threads(config.threads or torch.get_num_threads())
        return ReferenceBackend(memory_bytes=config.memory)

    return make_reference
