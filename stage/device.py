"""What this stage's device is, as the coordinator and `status` see it."""

from __future__ import annotations

import platform
import socket
from pathlib import Path

import psutil
import torch

from protos import model_pb2
from stage.backends.base import Backend


def device_info(backend: Backend) -> model_pb2.DeviceInfo:
    info = model_pb2.DeviceInfo(
        kind=backend.device.type, backend=backend.name, hostname=socket.gethostname(), boot_id=_boot_id()
    )
    if backend.device.type == "cuda":
        properties = torch.cuda.get_device_properties(backend.device)
        info.name = properties.name
        info.uuid = f"GPU-{properties.uuid}"
        info.memory_free_bytes, info.memory_total_bytes = torch.cuda.mem_get_info(backend.device)
    else:
        memory = psutil.virtual_memory()
        info.name = _processor()
        info.memory_total_bytes, info.memory_free_bytes = memory.total, memory.available
    return info


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _boot_id() -> str:
    """Equal for all processes of a running host; the host's name where Linux does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
