"""The Python API on asyncio: `AsyncClient`, the twin of `client.client.Client`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from client import requests
from client.client import SERVICE, Tools, coordinator_address
from client.events import Event, event_from_proto
from client.mesh_state import (
    LoadEvent,
    Model,
    Status,
    load_event_from_proto,
    model_from_proto,
    status_from_proto,
    watched_status_from_proto,
)
from client.requests import GenerationOptions, MessageLike
from client.streams import AsyncEventStream
from common.rpc import dial_async, from_rpc_error
from protos import coordinator_pb2 as pb
from protos.coordinator_pb2_grpc import CoordinatorServiceStub


class AsyncClient:
    """`Client` on asyncio: the same methods and meanings; streams are asynchronous iterators.

    Create it inside a running event loop. Cancelling a task that awaits or iterates cancels its RPC.
    """

    def __init__(self, address: str | None = None) -> None:
        self.address = coordinator_address(address)
        self._channel = dial_async(self.address)
        self._stub = CoordinatorServiceStub(self._channel)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        model: str = "",
        add_special: bool = True,
        parse_special: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> AsyncEventStream[Event]:
        request = requests.generate_request(prompt, model, add_special, parse_special, options)
        return self._stream(self._stub.Generate(request, timeout=timeout_s), event_from_proto)

    def chat(
        self,
        messages: Iterable[MessageLike],
        *,
        model: str = "",
        tools: Tools | None = None,
        continue_last: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> AsyncEventStream[Event]:
        request = requests.chat_request(messages, model, tools, continue_last, options)
        return self._stream(self._stub.Chat(request, timeout=timeout_s), event_from_proto)

    async def abort(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        request = pb.AbortRequest(request_id=request_id)
        found: bool = (await self._call(self._stub.Abort, request, timeout_s)).found
        return found

    async def tokenize(
        self,
        text: str,
        *,
        model: str = "",
        add_special: bool = True,
        parse_special: bool = False,
        timeout_s: float | None = None,
    ) -> list[int]:
        request = requests.tokenize_request(text, model, add_special, parse_special)
        return list((await self._call(self._stub.Tokenize, request, timeout_s)).ids)

    async def tokenize_pieces(
        self,
        text: str,
        *,
        model: str = "",
        add_special: bool = True,
        parse_special: bool = False,
        timeout_s: float | None = None,
    ) -> list[tuple[int, bytes]]:
        request = requests.tokenize_request(text, model, add_special, parse_special)
        response = await self._call(self._stub.Tokenize, request, timeout_s)
        return list(zip(response.ids, response.pieces, strict=True))

    async def detokenize(
        self,
        ids: Sequence[int],
        *,
        model: str = "",
        show_special: bool = False,
        timeout_s: float | None = None,
    ) -> str:
        request = requests.detokenize_request(ids, model, show_special)
        text: str = (await self._call(self._stub.Detokenize, request, timeout_s)).text
        return text

    async def apply_template(
        self,
        messages: Iterable[MessageLike],
        *,
        model: str = "",
        tools: Tools | None = None,
        continue_last: bool = False,
        timeout_s: float | None = None,
    ) -> tuple[str, list[int]]:
        request = requests.template_request(messages, model, tools, continue_last)
        response = await self._call(self._stub.ApplyTemplate, request, timeout_s)
        return response.text, list(response.ids)

    async def models(self, *, timeout_s: float | None = None) -> list[Model]:
        response = await self._call(self._stub.ListModels, pb.ListModelsRequest(), timeout_s)
        return [model_from_proto(model) for model in response.models]

    def load_model(
        self, model: str, *, context_length: int = 0, force: bool = False, timeout_s: float | None = None
    ) -> AsyncEventStream[LoadEvent]:
        request = requests.load_request(model, context_length, force)
        return self._stream(self._stub.LoadModel(request, timeout=timeout_s), load_event_from_proto)

    async def unload_model(self, *, force: bool = False, timeout_s: float | None = None) -> None:
        await self._call(self._stub.UnloadModel, pb.UnloadModelRequest(force=force), timeout_s)

    async def status(self, *, timeout_s: float | None = None) -> Status:
        return status_from_proto(await self._call(self._stub.GetStatus, pb.GetStatusRequest(), timeout_s))

    def watch_status(self, interval_s: float = 1.0) -> AsyncEventStream[Status]:
        call = self._stub.WatchStatus(pb.WatchStatusRequest(interval_s=interval_s))
        return self._stream(call, watched_status_from_proto)

    async def is_running(self, *, timeout_s: float = 2.0) -> bool:
        return await self._serves("", timeout_s)

    async def is_ready(self, *, timeout_s: float = 2.0) -> bool:
        return await self._serves(SERVICE, timeout_s)

    async def aclose(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _call(self, method: Any, request: Any, timeout_s: float | None) -> Any:
        try:
            return await method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.address) from error

    def _stream(self, call: Any, convert: Any) -> AsyncEventStream[Any]:
        return AsyncEventStream(call, convert, self.address)

    async def _serves(self, service: str, timeout_s: float) -> bool:
        stub = health_pb2_grpc.HealthStub(self._channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
