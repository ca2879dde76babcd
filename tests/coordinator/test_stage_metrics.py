"""What Prometheus is told of the stages."""

from __future__ import annotations

from prometheus_client import generate_latest

from coordinator.metrics import Metrics
from protos import coordinator_pb2, model_pb2


def test_figures_come_and_go_with_their_stages() -> None:
    metrics = Metrics()
    gpu = model_pb2.GpuTelemetry(
        memory_used_bytes=3,
        memory_free_bytes=5,
        power_w=250.5,
        sm_clock_mhz=1980,
        throttle_reasons=["power cap"],
    )
    stages = [
        coordinator_pb2.StageStatus(stage_id="a", busy_fraction=0.5, telemetry=gpu),
        coordinator_pb2.StageStatus(stage_id="b", kv_blocks_free=7),
        coordinator_pb2.StageStatus(stage_id="c", detail="does not answer"),
        coordinator_pb2.StageStatus(stage_id="d", state=coordinator_pb2.STAGE_STATE_LOST),
    ]
    metrics.stages.show(stages)
    text = generate_latest(metrics.registry).decode()
    assert 'pipellm_stage_busy_ratio{stage="a"} 0.5' in text
    assert 'pipellm_stage_kv_blocks_free{stage="b"} 7.0' in text
    assert 'pipellm_stage_gpu_power_watts{stage="a"} 250.5' in text
    assert 'pipellm_stage_gpu_sm_clock_hertz{stage="a"} 1.98e+09' in text
    assert 'pipellm_stage_gpu_throttled{reason="power cap",stage="a"} 1.0' in text
    assert "temperature_celsius{" not in text  # not told
    assert 'stage="c"' not in text and 'stage="d"' not in text and 'gpu_power_watts{stage="b"}' not in text
    metrics.stages.show([])
    assert 'stage="' not in generate_latest(metrics.registry).decode()
