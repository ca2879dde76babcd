"""What the stages say of themselves, for Prometheus: the last status's figures, a label a stage.

A snapshot is replaced whole, so that a stage that is gone leaves no figures behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from protos import coordinator_pb2

_STAGE_GAUGES: tuple[tuple[str, str, Callable[[coordinator_pb2.StageStatus], float]], ...] = (
    ("busy_ratio", "Share of the time spent computing", lambda stage: stage.busy_fraction),
    ("weight_bytes", "Bytes of weights held", lambda stage: stage.weight_bytes),
    ("kv_bytes", "Bytes of KV cache held", lambda stage: stage.kv_bytes),
    ("kv_blocks_free", "KV blocks that no sequence names", lambda stage: stage.kv_blocks_free),
    ("resident_bytes", "Resident memory of the process", lambda stage: stage.resident_bytes),
)
# Name, help, field of GpuTelemetry, and what its unit is multiplied with.
_GPU_GAUGES = (
    ("memory_used_bytes", "GPU memory in use, by all processes", "memory_used_bytes", 1),
    ("memory_free_bytes", "GPU memory free", "memory_free_bytes", 1),
    ("power_watts", "Power drawn", "power_w", 1),
    ("sm_clock_hertz", "Clock of the multiprocessors", "sm_clock_mhz", 1e6),
    ("memory_clock_hertz", "Clock of the memory", "memory_clock_mhz", 1e6),
    ("temperature_celsius", "Temperature", "temperature_c", 1),
    ("utilization_ratio", "Share of the time in which a kernel ran", "utilization", 1),
)


class StageMetrics(Collector):
    """A Prometheus collector; `show` sets what it reports."""

    def __init__(self) -> None:
        self._stages: Sequence[coordinator_pb2.StageStatus] = ()

    def show(self, stages: Iterable[coordinator_pb2.StageStatus]) -> None:
        self._stages = [s for s in stages if s.state != coordinator_pb2.STAGE_STATE_LOST and not s.detail]

    def collect(self) -> Iterable[Metric]:
        stages = self._stages
        for name, text, value in _STAGE_GAUGES:
            family = GaugeMetricFamily(f"pipellm_stage_{name}", text, labels=["stage"])
            for stage in stages:
                family.add_metric([stage.stage_id], value(stage))
            yield family
        told = [stage for stage in stages if stage.HasField("telemetry")]
        for name, text, field, unit in _GPU_GAUGES:
            family = GaugeMetricFamily(f"pipellm_stage_gpu_{name}", text, labels=["stage"])
            for stage in told:
                present = stage.telemetry.DESCRIPTOR.fields_by_name[field].has_presence
                if not present or stage.telemetry.HasField(field):
                    family.add_metric([stage.stage_id], unit * getattr(stage.telemetry, field))
            yield family
        family = GaugeMetricFamily(
            "pipellm_stage_gpu_throttled", "Why clocks are held down", labels=["stage", "reason"]
        )
        for stage in told:
            for reason in stage.telemetry.throttle_reasons:
                family.add_metric([stage.stage_id, reason], 1)
        yield family
        yield from _streaming([stage for stage in stages if stage.HasField("streaming")])


def _streaming(stages: Sequence[coordinator_pb2.StageStatus]) -> Iterable[Metric]:
    """Of those that stream weights."""
    copied = CounterMetricFamily(
        "pipellm_stage_streamed_bytes", "Bytes of weights copied to the GPU since the load", labels=["stage"]
    )
    rate = GaugeMetricFamily(
        "pipellm_stage_link_bytes_per_second", "Weights over the link, of late", labels=["stage"]
    )
    share = GaugeMetricFamily(
        "pipellm_stage_link_ratio", "The same, of the maximum measured at load", labels=["stage"]
    )
    stalls = CounterMetricFamily(
        "pipellm_stage_streaming_stall_seconds",
        "Waiting since the load: copies for the file, the host for the GPU, the GPU for layers on the host",
        labels=["stage", "cause"],
    )
    for stage in stages:
        one, name = stage.streaming, stage.stage_id
        copied.add_metric([name], one.bytes_copied)
        rate.add_metric([name], one.link_bytes_per_s)
        if one.max_link_bytes_per_s:
            share.add_metric([name], one.link_bytes_per_s / one.max_link_bytes_per_s)
        for cause, seconds in (("file", one.file_wait_s), ("gpu", one.gpu_wait_s), ("host", one.host_s)):
            stalls.add_metric([name, cause], seconds)
    yield from (copied, rate, share, stalls)
