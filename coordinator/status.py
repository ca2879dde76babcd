"""What `status` shows: the coordinator's own numbers and what each stage says of itself."""

from __future__ import annotations

import asyncio
import time
from importlib import metadata

from coordinator.loading import plan_status
from coordinator.membership import Member, StageError, calling, reason_of
from coordinator.mesh import Mesh
from protos import coordinator_pb2, stage_pb2

_DESCRIBE_TIMEOUT_S = 1.0
_STARTED = time.monotonic()


def _version() -> str:
    try:
        return metadata.version("pipellm")
    except metadata.PackageNotFoundError:
        return "not installed"  # run from a checkout


_VERSION = _version()

StageState = coordinator_pb2.StageState


async def mesh_status(mesh: Mesh) -> coordinator_pb2.GetStatusResponse:
    members = mesh.membership.members
    described = await asyncio.gather(*(_describe(member) for member in members))
    now = time.monotonic()
    status = coordinator_pb2.GetStatusResponse(
        version=_VERSION,
        uptime_s=now - _STARTED,
        prefill_tokens_per_s=mesh.metrics.prefill.per_second(now),
        decode_tokens_per_s=mesh.metrics.decode.per_second(now),
        requests_finished=mesh.metrics.requests_finished,
        tokens_generated=mesh.metrics.tokens_generated,
        state=mesh.state,
    )
    served = mesh.served
    if served is not None:
        status.model.CopyFrom(served.info)
        status.plan.CopyFrom(plan_status(served.plan, served.epoch, served.carriers))
        status.requests_running = served.scheduler.num_running
        status.requests_waiting = served.scheduler.num_waiting
        status.kv_blocks_free = served.scheduler.num_free_blocks
        status.kv_blocks_total = served.plan.num_kv_blocks
    for member, description in zip(members, described, strict=True):
        _add_stage(status, mesh, member, description)
    for departed in mesh.membership.departed:
        status.stages.add(
            stage_id=departed.stage_id,
            address=departed.address,
            state=StageState.STAGE_STATE_LOST,
            device=departed.device,
            detail=departed.reason,
        )
    return status


async def _describe(member: Member) -> stage_pb2.DescribeResponse | str:
    """What the stage says, or why it says nothing."""
    try:
        with calling(member):
            return await member.stub.Describe(stage_pb2.DescribeRequest(), timeout=_DESCRIBE_TIMEOUT_S)
    except StageError as failure:
        return reason_of(member, failure.error)


def _add_stage(
    status: coordinator_pb2.GetStatusResponse,
    mesh: Mesh,
    member: Member,
    description: stage_pb2.DescribeResponse | str,
) -> None:
    stage = status.stages.add(stage_id=member.stage_id, address=member.address, device=member.device)
    served = mesh.served
    if served is not None and member in served.members:
        stage.state = StageState.STAGE_STATE_SERVING
        stage.layer_time_s = served.plan.windows[served.members.index(member)].layer_decode_s
    elif member in mesh.loading_members:
        stage.state = StageState.STAGE_STATE_LOADING
    else:
        stage.state = StageState.STAGE_STATE_IDLE
    if isinstance(description, str):
        stage.detail = description
        return
    stage.device.CopyFrom(description.device)
    stage.layer_start, stage.layer_end = description.layer_start, description.layer_end
    stage.weight_bytes, stage.kv_bytes = description.weight_bytes, description.kv_bytes
    stage.resident_bytes = description.resident_bytes
    stage.page_cache_bytes = description.page_cache_bytes
    stage.busy_fraction = description.busy_fraction
    stage.kv_blocks_free = description.num_kv_blocks - description.kv_blocks_in_use
    if description.HasField("telemetry"):
        stage.telemetry.CopyFrom(description.telemetry)
    if description.HasField("streaming"):
        stage.streaming.CopyFrom(description.streaming)
