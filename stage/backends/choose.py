"""Which backend a stage runs on: the one asked for, or the best that this machine has."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

from common.errors import ConfigError
from common.log import get_logger
from stage.backends.base import Backend
from stage.backends.host_memory import stated_bytes
from stage.config import StageConfig


def backend_factory(config: StageConfig) -> Callable[[], Backend]:
    """A function that makes the backend `config` asks for. Raises ConfigError for what is not there.

    "auto" is the GPU where there is one, else the native CPU kernels where they were built, else the
    reference."""
    device = resolve_device(config)
    name = config.backend if config.backend != "auto" else _best_backend(device)
    if (name == "cuda") != (device.type == "cuda"):
        raise ConfigError(f"backend {name!r} does not run on device {str(device)!r}")
    if name == "cuda":
        return lambda: _cuda(device, config)
    if name == "cpu":
        return lambda: _cpu(config)
    return lambda: _reference(config)


def resolve_device(config: StageConfig) -> torch.device:
    """The device `config` asks for. Raises ConfigError for one that is not there."""
    gpus = torch.cuda.device_count()
    if config.device == "auto":
        wants_gpu = config.backend == "cuda" or (config.backend == "auto" and gpus > 0 and _has_gpu_extra())
        return torch.device("cuda", 0) if wants_gpu else torch.device("cpu")
    try:
        device = torch.device(config.device)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {config.device!r}, expected cpu, cuda:N or auto")
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise ConfigError(f"device is {config.device!r}, but torch finds {gpus} NVIDIA GPU(s) here")
    return device


def _has_gpu_extra() -> bool:
    """Whether what the CUDA backend needs is installed; one warning where a GPU would lie idle without."""
    if importlib.util.find_spec("cuda") is not None:  # the namespace of the cuda-* packages
        return True
    get_logger().warning("gpu_not_used", remedy="pip install 'pipellm[gpu]'")
    return False


def _best_backend(device: torch.device) -> str:
    if device.type == "cuda":
        return "cuda"
    from stage.backends.cpu import abi

    if abi.library() is not None:
        return "cpu"
    get_logger().warning(
        "slow_reference_backend",
        reason="the native CPU kernels were not built at installation",
        remedy="install g++ (GCC 11 or newer) and run pip install again",
    )
    return "reference"


def _cuda(device: torch.device, config: StageConfig) -> Backend:
    from stage.backends.cuda.backend import CudaBackend

    return CudaBackend(device, config.graphs, config.memory_settings)


def _cpu(config: StageConfig) -> Backend:
    from stage.backends.cpu.backend import CpuBackend

    return CpuBackend(config.threads, config.accuracy, config.kv_dtype, stated_bytes(config.memory))


def _reference(config: StageConfig) -> Backend:
    from stage.backends.reference import ReferenceBackend

    torch.set_num_threads(config.threads or torch.get_num_threads())
    return ReferenceBackend(memory_bytes=stated_bytes(config.memory))
