"""GPU telemetry: what is read of NVML, and that nothing of it stands in a stage's way."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import structlog
import torch

from stage.telemetry import GpuTelemetry, throttle_reasons

UUID = "GPU-11111111-2222-3333-4444-555555555555"


class Nvml:
    """NVML as its module offers it, with one GPU that does not tell its power limit."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVMLError_NotSupported = pynvml.NVMLError_NotSupported
    NVMLError_NoPermission = pynvml.NVMLError_NoPermission

    def __init__(self) -> None:
        self.lost = False

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != UUID:
            raise pynvml.NVMLError_NotFound(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        if self.lost:
            raise pynvml.NVMLError_GpuIsLost(pynvml.NVML_ERROR_GPU_IS_LOST)
        return SimpleNamespace(total=8 << 30, used=3 << 30, free=5 << 30)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 123_400

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        raise pynvml.NVMLError_NotSupported(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=87, memory=50)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return 0x45

    def nvmlDeviceGetClockInfo(self, handle: str, clock: int) -> int:
        return {1: 1980, 2: 3201}[clock]

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return 61


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    module = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_values_come_in_their_units_and_those_not_told_are_absent(nvml: Nvml) -> None:
    read = GpuTelemetry(UUID).read()
    assert read is not None
    assert (read.memory_total_bytes, read.memory_used_bytes) == (8 << 30, 3 << 30)
    assert read.power_w == pytest.approx(123.4)
    assert not read.HasField("power_limit_w")
    assert (read.sm_clock_mhz, read.memory_clock_mhz, read.temperature_c) == (1980, 3201, 61)
    assert read.utilization == pytest.approx(0.87)
    assert list(read.throttle_reasons) == ["power cap", "thermal (hardware)"]  # 0x1, idle, is none


def test_a_gpu_that_fails_later_is_warned_of_once_and_may_come_back(nvml: Nvml) -> None:
    telemetry = GpuTelemetry(UUID)
    assert telemetry.read() is not None
    nvml.lost = True
    with structlog.testing.capture_logs() as logs:
        assert telemetry.read() is None
        assert telemetry.read() is None
    assert [line["event"] for line in logs] == ["no_gpu_telemetry"]
    assert logs[0]["gpu"] == UUID and "GpuIsLost" in logs[0]["reason"]
    nvml.lost = False
    assert telemetry.read() is not None


@pytest.mark.parametrize("broken", ["no module", "no library", "no such GPU"])
def test_what_cannot_be_opened_is_warned_of_once(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken == "no module":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    elif broken == "no such GPU":
        monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    elif torch.cuda.is_available():
        pytest.skip("NVML's library is here")
    telemetry = GpuTelemetry("GPU-00000000-0000-0000-0000-000000000000")
    with structlog.testing.capture_logs() as logs:
        assert telemetry.read() is None
        assert telemetry.read() is None
    assert [line["event"] for line in logs] == ["no_gpu_telemetry"]


def test_a_device_that_is_no_gpu_is_no_trouble() -> None:
    with structlog.testing.capture_logs() as logs:
        assert GpuTelemetry("").read() is None
    assert logs == []


def test_reasons_that_are_not_known_are_shown_as_numbers() -> None:
    assert throttle_reasons(0) == [] and throttle_reasons(1) == []
    assert throttle_reasons(0x4000_0004) == ["power cap", "unknown (0x40000000)"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_real_gpu_tells_what_torch_does() -> None:
    properties = torch.cuda.get_device_properties(0)
    read = GpuTelemetry(f"GPU-{properties.uuid}").read()
    assert read is not None
    _, total = torch.cuda.mem_get_info(0)
    assert read.memory_total_bytes == pytest.approx(total, rel=0.05)
    assert 0 < read.power_w < 2000 and 0 < read.temperature_c < 120 and read.sm_clock_mhz > 0
