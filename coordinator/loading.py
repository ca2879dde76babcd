"""How a model gets onto the stages: measure, plan, load, link. Each step is told to `report` as it goes.

Everything here is one attempt: the first error ends it, and the caller unloads what was loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import grpc

from common.errors import OutOfCapacityError, UnavailableError
from coordinator.catalog import CatalogEntry
from coordinator.config import CoordinatorConfig
from coordinator.layer_split import StageCosts
from coordinator.membership import Member, StageError, calling
from coordinator.planner import AUTO_CONTEXT_FLOORS, ModelCosts, Plan, PlanSettings, plan
from protos import coordinator_pb2, stage_pb2

_MEASURE_TIMEOUT_S = 120.0
_LINK_TIMEOUT_S = 20.0
_UNLOAD_TIMEOUT_S = 5.0

Report = Callable[[coordinator_pb2.LoadModelResponse], None]
T = TypeVar("T")


async def measure(
    members: Sequence[Member], entry: CatalogEntry, fingerprint: str, context_length: int
) -> list[stage_pb2.ProfileResponse]:
    """What the model costs on each stage. Stages of one host measure one after another, so that they do not
    disturb one another's times."""
    request = stage_pb2.ProfileRequest(
        model_path=str(entry.path),
        model_file=entry.file,
        fingerprint=fingerprint,
        context_length=context_length,
    )
    hosts: dict[str, asyncio.Lock] = {}

    async def one(member: Member) -> stage_pb2.ProfileResponse:
        async with hosts.setdefault(member.device.boot_id, asyncio.Lock()):
            with calling(member):
                return await member.stub.Profile(request, timeout=_MEASURE_TIMEOUT_S)

    return await _gather([one(member) for member in members])


def make_plan(
    members: Sequence[Member],
    profiles: Sequence[stage_pb2.ProfileResponse],
    context_length: int,
    config: CoordinatorConfig,
) -> Plan:
    """The plan for what was measured; where the model does not fit as it is meant to, one in which stages
    stream layers, with a KV cache for one sequence. Raises OutOfCapacityError."""
    costs = [
        StageCosts(
            stage_id=member.stage_id,
            memory_pool=member.device.uuid or member.device.boot_id,
            host=member.device.boot_id,
            layer_decode_s=profile.layer_decode_s,
            embedding_s=profile.embedding_s,
            head_s=profile.head_s,
            layer_weight_bytes=tuple(profile.layer_weight_bytes),
            layer_kv_bytes_per_token=tuple(profile.layer_kv_bytes_per_token),
            embedding_bytes=profile.embedding_bytes,
            head_bytes=profile.head_bytes,
            memory_budget_bytes=profile.memory_budget_bytes,
            kv_block_size=profile.kv_block_size,
        )
        for member, profile in zip(members, profiles, strict=True)
    ]
    costs = _equal_where_shared(costs)
    model = ModelCosts(num_layers=profiles[0].num_layers, context_length=profiles[0].context_length)
    settings = PlanSettings(context_length, config.kv_block_size, config.max_sequences)
    try:
        return plan(model, costs, settings)
    except OutOfCapacityError:
        budgets = [max(one.offload_budget_bytes, one.memory_budget_bytes) for one in profiles]
        larger = [
            replace(one, memory_budget_bytes=budget) for one, budget in zip(costs, budgets, strict=True)
        ]
        if larger == costs:
            raise
        context = context_length or AUTO_CONTEXT_FLOORS[0]
        return plan(model, larger, PlanSettings(context, config.kv_block_size, max_sequences=1))


def _equal_where_shared(costs: Sequence[StageCosts]) -> list[StageCosts]:
    """Stages that share a memory share what computes there (a GPU, a host's cores): where their times differ,
    others were busy meanwhile, and the best of each kind counts for all of them."""

    def equal(one: StageCosts) -> StageCosts:
        same = [each for each in costs if each.memory_pool == one.memory_pool]
        return replace(
            one,
            layer_decode_s=min(each.layer_decode_s for each in same),
            embedding_s=min(each.embedding_s for each in same),
            head_s=min(each.head_s for each in same),
        )

    return [equal(one) for one in costs]


@asynccontextmanager
async def loaded(
    made: Plan,
    members: Sequence[Member],
    entry: CatalogEntry,
    fingerprint: str,
    epoch: int,
    config: CoordinatorConfig,
    report: Report,
) -> AsyncIterator[None]:
    """Loads every window on its stage, all at once. A stage that is not executed at the end lets go of it: so
    does one whose coordinator dies meanwhile."""
    progress: list[tuple[int, int]] = [(0, 0)] * len(members)
    calls: list[grpc.aio.UnaryStreamCall[Any, stage_pb2.LoadResponse]] = []

    async def one(index: int) -> None:
        window, member = made.windows[index], members[index]
        request = stage_pb2.LoadRequest(
            epoch=epoch,
            model_path=str(entry.path),
            model_file=entry.file,
            fingerprint=fingerprint,
            layer_start=window.layer_start,
            layer_end=window.layer_end,
            embedding=window.embedding,
            head=window.head,
            num_kv_blocks=made.num_kv_blocks,
            kv_block_size=made.kv_block_size,
            context_length=made.context_length,
            max_step_tokens=config.max_step_tokens,
            window=index,
            shard_count=1,
        )
        with calling(member):
            call = member.stub.Load(request, timeout=config.load_timeout_s)
            calls.append(call)
            async for response in call:
                progress[index] = (response.bytes_done, response.bytes_total)
                done, total = (sum(column) for column in zip(*progress, strict=True))
                report(load_progress("load", done, total))
                if response.loaded:
                    return
        raise StageError(member, UnavailableError(f"stage {member.stage_id!r} ended its load early"))

    try:
        await _gather([one(index) for index in range(len(members))])
        yield
    finally:
        for call in calls:
            call.cancel()


async def link(members: Sequence[Member], epoch: int) -> list[str]:
    """Attaches every stage to the next one of the ring; the carrier of each link. None in a ring of one."""
    if len(members) == 1:
        return [""]

    async def one(index: int) -> str:
        following = (index + 1) % len(members)
        request = stage_pb2.AttachLinkRequest(
            epoch=epoch,
            next_address=members[following].address,
            next_window=following,
            next_instance_id=members[following].instance_id,
            next_boot_id=members[following].device.boot_id,
        )
        with calling(members[index]):
            return (await members[index].stub.AttachLink(request, timeout=_LINK_TIMEOUT_S)).carrier

    return await _gather([one(index) for index in range(len(members))])


async def unload(members: Sequence[Member]) -> None:
    """Frees what the stages hold, as far as they can be reached."""

    async def one(member: Member) -> None:
        with calling(member):
            await member.stub.Unload(stage_pb2.UnloadRequest(), timeout=_UNLOAD_TIMEOUT_S)

    await asyncio.gather(*(one(member) for member in members), return_exceptions=True)


def load_progress(phase: str, done: int = 0, total: int = 0) -> coordinator_pb2.LoadModelResponse:
    progress = coordinator_pb2.LoadProgress(phase=phase, bytes_done=done, bytes_total=total)
    return coordinator_pb2.LoadModelResponse(progress=progress)


def plan_status(made: Plan, epoch: int, carriers: Sequence[str]) -> coordinator_pb2.PlanStatus:
    status = coordinator_pb2.PlanStatus(
        epoch=epoch, num_kv_blocks=made.num_kv_blocks, kv_block_size=made.kv_block_size
    )
    for index, window in enumerate(made.windows):
        status.windows.add(
            members=[coordinator_pb2.PlanMember(stage_id=window.stage_id, shard_count=1)],
            layer_start=window.layer_start,
            layer_end=window.layer_end,
            embedding=window.embedding,
            head=window.head,
            predicted_s=window.predicted_s,
            carrier=carriers[index] if index < len(carriers) else "",
        )
    return status


async def _gather(attempts: list[Awaitable[T]]) -> list[T]:
    """All results in order; on the first error the others are cancelled and awaited."""
    tasks = [asyncio.ensure_future(attempt) for attempt in attempts]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
