"""What a GPU says of itself through NVML: memory, power, clocks, temperature, load, and what slows it.

A GPU is found by its UUID alone: NVML numbers GPUs as the driver does, CUDA as CUDA_VISIBLE_DEVICES says.
Telemetry helps people and is never in the way: where NVML is missing or fails there is none, and one warning.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from common.log import get_logger
from protos import model_pb2

T = TypeVar("T")

# NVML's clocks event reasons (nvml.h), without "idle", which slows nothing that runs.
_THROTTLE_REASONS = {
    0x002: "application clocks",
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "thermal (software)",
    0x040: "thermal (hardware)",
    0x080: "power brake",
    0x100: "display clocks",
    0x200: "board limit",
    0x400: "reliability",
}


class GpuTelemetry:
    """Reads one GPU. `uuid`: as NVML spells it ("GPU-..."); empty for a device that is none."""

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._nvml: Any = None
        self._handle: Any = None
        self._warned = False
        self._lock = threading.Lock()

    def read(self) -> model_pb2.GpuTelemetry | None:
        """The values of this moment; None where there are none. Never raises."""
        if not self._uuid:
            return None
        with self._lock:
            try:
                if self._nvml is None:
                    self._open()
                return self._read()
            except Exception as error:  # NVML's errors, or no module of that name
                if not self._warned:
                    reason = f"{type(error).__name__}: {error}"
                    get_logger().warning("no_gpu_telemetry", gpu=self._uuid, reason=reason)
                    self._warned = True
                if self._nvml is None:
                    self._uuid = ""  # what cannot be opened now will not be later
                return None

    def _open(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(self._uuid)
        self._nvml = pynvml

    def _read(self) -> model_pb2.GpuTelemetry:
        nvml, handle = self._nvml, self._handle
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        power_mw = self._value(nvml.nvmlDeviceGetPowerUsage)
        limit_mw = self._value(nvml.nvmlDeviceGetEnforcedPowerLimit)
        load = self._value(nvml.nvmlDeviceGetUtilizationRates)
        reasons = self._value(nvml.nvmlDeviceGetCurrentClocksThrottleReasons) or 0
        return model_pb2.GpuTelemetry(
            memory_total_bytes=memory.total,
            memory_used_bytes=memory.used,
            memory_free_bytes=memory.free,
            power_w=None if power_mw is None else power_mw / 1e3,
            power_limit_w=None if limit_mw is None else limit_mw / 1e3,
            sm_clock_mhz=self._value(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=self._value(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
            temperature_c=self._value(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            utilization=None if load is None else load.gpu / 100,
            throttle_reasons=throttle_reasons(reasons),
        )

    def _value(self, ask: Callable[..., T], *arguments: int) -> T | None:
        """None where this GPU, or this user, is not told."""
        try:
            return ask(self._handle, *arguments)
        except (self._nvml.NVMLError_NotSupported, self._nvml.NVMLError_NoPermission):
            return None


def throttle_reasons(bits: int) -> list[str]:
    """NVML's bit mask of clocks event reasons in words; a bit of a newer NVML as its number."""
    known = [name for bit, name in _THROTTLE_REASONS.items() if bits & bit]
    unknown = bits & ~(sum(_THROTTLE_REASONS) | 1)
    return known + ([f"unknown ({unknown:#x})"] if unknown else [])
