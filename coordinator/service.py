"""CoordinatorService: a thin servicer between the wire and the mesh."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from common.errors import InvalidRequestError
from coordinator.mesh import Mesh
from coordinator.serving import Served
from coordinator.status import mesh_status
from protos import coordinator_pb2, coordinator_pb2_grpc

_MIN_WATCH_S = 0.1

R = TypeVar("R", coordinator_pb2.GenerateResponse, coordinator_pb2.ChatResponse)


class CoordinatorService(coordinator_pb2_grpc.CoordinatorServiceServicer):
    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    # --- generation --------------------------------------------------------------------------------------

    async def Generate(
        self, request: coordinator_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[coordinator_pb2.GenerateResponse]:
        served = await self._mesh.require(request.model)
        ids = await served.prepare(served.text.encode_prompt, request, served.plan.context_length)
        async for response in self._stream(served, ids, request.options, coordinator_pb2.GenerateResponse):
            yield response

    async def Chat(
        self, request: coordinator_pb2.ChatRequest, context: Any
    ) -> AsyncIterator[coordinator_pb2.ChatResponse]:
        served = await self._mesh.require(request.model)
        _, ids = await served.prepare(
            served.text.render_chat, request.messages, request.tools_json, request.continue_last
        )
        async for response in self._stream(served, ids, request.options, coordinator_pb2.ChatResponse):
            yield response

    async def _stream(
        self,
        served: Served,
        ids: list[int],
        options: coordinator_pb2.GenerationOptions,
        response_type: Callable[..., R],
    ) -> AsyncIterator[R]:
        """However this ends (finished, cancelled, deadline, client gone), the sequence ends with it."""
        request = served.submit(ids, options)
        try:
            yield response_type(started=request.request.started)
            async for event in request.events_until_finished():
                if isinstance(event, coordinator_pb2.GenerationDelta):
                    yield response_type(delta=event)
                else:
                    yield response_type(finished=event)
        finally:
            served.cancel(request)

    async def Abort(
        self, request: coordinator_pb2.AbortRequest, context: Any
    ) -> coordinator_pb2.AbortResponse:
        served = self._mesh.served
        return coordinator_pb2.AbortResponse(
            found=served is not None and served.abort(request.request_id)
        )

    # --- text --------------------------------------------------------------------------------------------

    async def Tokenize(
        self, request: coordinator_pb2.TokenizeRequest, context: Any
    ) -> coordinator_pb2.TokenizeResponse:
        served = await self._mesh.require(request.model)
        return await served.prepare(served.text.tokenize, request)

    async def Detokenize(
        self, request: coordinator_pb2.DetokenizeRequest, context: Any
    ) -> coordinator_pb2.DetokenizeResponse:
        served = await self._mesh.require(request.model)
        return await served.prepare(served.text.detokenize, request)

    async def ApplyTemplate(
        self, request: coordinator_pb2.ApplyTemplateRequest, context: Any
    ) -> coordinator_pb2.ApplyTemplateResponse:
        served = await self._mesh.require(request.model)
        text, ids = await served.prepare(
            served.text.render_chat, request.messages, request.tools_json, request.continue_last
        )
        return coordinator_pb2.ApplyTemplateResponse(text=text, ids=ids)

    # --- models ------------------------------------------------------------------------------------------

    async def ListModels(self, request: Any, context: Any) -> coordinator_pb2.ListModelsResponse:
        catalog, served = self._mesh.catalog, self._mesh.served
        infos = await asyncio.to_thread(lambda: [catalog.info(entry) for entry in catalog.entries()])
        response = coordinator_pb2.ListModelsResponse(models=infos)
        for info in response.models:
            if served is not None and info.name == served.entry.name:
                info.CopyFrom(served.info)
        return response

    async def LoadModel(
        self, request: coordinator_pb2.LoadModelRequest, context: Any
    ) -> AsyncIterator[coordinator_pb2.LoadModelResponse]:
        if not request.model:
            raise InvalidRequestError("LoadModel: name a model; ListModels tells which there are")
        async for response in self._mesh.load(request.model, request.context_length, request.force):
            yield response

    async def UnloadModel(
        self, request: coordinator_pb2.UnloadModelRequest, context: Any
    ) -> coordinator_pb2.UnloadModelResponse:
        await self._mesh.unload(request.force)
        return coordinator_pb2.UnloadModelResponse()

    # --- status ------------------------------------------------------------------------------------------

    async def GetStatus(self, request: Any, context: Any) -> coordinator_pb2.GetStatusResponse:
        return await mesh_status(self._mesh)

    async def WatchStatus(
        self, request: coordinator_pb2.WatchStatusRequest, context: Any
    ) -> AsyncIterator[coordinator_pb2.WatchStatusResponse]:
        interval_s = request.interval_s or 1.0
        if not interval_s >= _MIN_WATCH_S:
            raise InvalidRequestError(f"interval_s is {interval_s}, at least {_MIN_WATCH_S} is needed")
        while True:
            yield coordinator_pb2.WatchStatusResponse(status=await mesh_status(self._mesh))
            await asyncio.sleep(interval_s)

    # --- stages ------------------------------------------------------------------------------------------

    async def RegisterStage(
        self, request: coordinator_pb2.RegisterStageRequest, context: Any
    ) -> coordinator_pb2.RegisterStageResponse:
        await self._mesh.register(request)
        return coordinator_pb2.RegisterStageResponse(lease_s=self._mesh.config.lease_s)

    async def DeregisterStage(
        self, request: coordinator_pb2.DeregisterStageRequest, context: Any
    ) -> coordinator_pb2.DeregisterStageResponse:
        await self._mesh.deregister(request.stage_id, request.instance_id)
        return coordinator_pb2.DeregisterStageResponse()
