"""What Prometheus is told of the stages."""

from __future__ import annotations

from prometheus_client import generate_latest

from coordinator.metrics import Metrics
from protos import coordinator_pb2, model_pb2


def test_streamed_weights_are_counted() -> None:
    metrics = Metrics()
    streaming = model_pb2.StreamingStatus(
        bytes_copied=7_000_000_000,
        link_bytes_per_s=40e9,
        max_link_bytes_per_s=50e9,
        file_wait_s=0.5,
        gpu_wait_s=1.5,
        host_s=2.5,
    )
    unmeasured = model_pb2.StreamingStatus(link_bytes_per_s=1e9)
    metrics.stages.show(
        [
            coordinator_pb2.StageStatus(stage_id="a", streaming=streaming),
            coordinator_pb2.StageStatus(stage_id="b", streaming=unmeasured),
            coordinator_pb2.StageStatus(stage_id="c"),
        ]
    )
    text = generate_latest(metrics.registry).decode()
    assert 'pipellm_stage_streamed_bytes_total{stage="a"} 7e+09' in text
    assert 'pipellm_stage_link_bytes_per_second{stage="a"} 4e+10' in text
    assert 'pipellm_stage_link_ratio{stage="a"} 0.8' in text and 'link_ratio{stage="b"}' not in text
    for cause, seconds in (("file", 0.5), ("gpu", 1.5), ("host", 2.5)):
        assert f'pipellm_stage_streaming_stall_seconds_total{{cause="{cause}",stage="a"}} {seconds}' in text
    assert 'streamed_bytes_total{stage="c"}' not in text


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
