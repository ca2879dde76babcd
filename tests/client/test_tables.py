"""Status tables: a GPU's line stands where it tells something, and nowhere else."""

from __future__ import annotations

import dataclasses

import pytest

from client.mesh_state import Telemetry, status_from_proto
from client.tables import print_status
from protos import coordinator_pb2, model_pb2


def test_a_gpu_s_line_says_what_it_tells(capsys: pytest.CaptureFixture[str]) -> None:
    gpu = model_pb2.GpuTelemetry(
        memory_total_bytes=8 << 30, memory_used_bytes=3 << 30, memory_free_bytes=5 << 30, power_w=250.4,
        power_limit_w=700, sm_clock_mhz=1980, utilization=0.87, throttle_reasons=["power cap"],
    )  # fmt: skip
    response = coordinator_pb2.GetStatusResponse(
        stages=[
            coordinator_pb2.StageStatus(stage_id="gpu", telemetry=gpu),
            coordinator_pb2.StageStatus(stage_id="cpu"),
        ]
    )
    status = status_from_proto(response)
    told = status.stages[0].telemetry
    assert isinstance(told, Telemetry) and status.stages[1].telemetry is None
    assert told.temperature_c is None and told.power_w == 250.4 and told.throttle_reasons == ("power cap",)
    assert dataclasses.asdict(status)["stages"][1]["telemetry"] is None
    print_status(status)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "power cap" in line]
    words = ["gpu", "3.0 GiB of 8.0 GiB", "5.0 GiB", "87%", "250 of 700 W", "1980 MHz", "-", "-", "power cap"]
    assert [word.strip() for word in line.split("  ") if word.strip()] == words


def test_cpu_stages_have_no_such_line(capsys: pytest.CaptureFixture[str]) -> None:
    response = coordinator_pb2.GetStatusResponse(stages=[coordinator_pb2.StageStatus(stage_id="cpu")])
    print_status(status_from_proto(response))
    assert "GPU memory" not in capsys.readouterr().out


def test_why_a_stage_is_lost_stands_below_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    reason = "it cannot be reached (failed to connect to all addresses; last error: UNKNOWN: refused)"
    response = coordinator_pb2.GetStatusResponse(
        stages=[
            coordinator_pb2.StageStatus(stage_id="a", state=coordinator_pb2.STAGE_STATE_SERVING),
            coordinator_pb2.StageStatus(
                stage_id="b", state=coordinator_pb2.STAGE_STATE_LOST, detail=reason
            ),
        ]
    )
    print_status(status_from_proto(response))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert f"b: {reason}" in lines
    (row,) = [line for line in lines if line.startswith("b ")]
    assert "lost" in row and reason not in row
