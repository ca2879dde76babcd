"""The Python API: `Client`, which blocks (`client.async_client` has its twin on asyncio).

Each method is one RPC of the coordinator. Requests are built in `client.requests`, answers become the
dataclasses of `client.events` and `client.mesh_state`; here is only the calling. `timeout_s` is the RPC's
deadline (DeadlineError when it passes). Every failure is a `common.errors` class.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from client import requests
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
from client.streams import EventStream
from common.rpc import dial, from_rpc_error
from protos import coordinator_pb2 as pb
from protos.coordinator_pb2_grpc import CoordinatorServiceStub

DEFAULT_ADDRESS = "127.0.0.1:7070"
SERVICE = "pipellm.v1.CoordinatorService"

Tools = Sequence[Mapping[str, Any]]


def coordinator_address(given: str | None = None) -> str:
    """`given`, else `PIPELLM_COORDINATOR`, else 127.0.0.1:7070."""
    return given or os.environ.get("PIPELLM_COORDINATOR") or DEFAULT_ADDRESS


class Client:
    """A connection to a coordinator. Safe to share between threads; close it, or use it in `with`.

    `address` is host:port or unix:/path (default: `PIPELLM_COORDINATOR`, else 127.0.0.1:7070). Nothing is
    dialled before the first call.
    """

    def __init__(self, address: str | None = None) -> None:
        self.address = coordinator_address(address)
        self._channel = dial(self.address)
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
    ) -> EventStream[Event]:
        """Continues a text or a list of token ids: `Started`, then `Delta`s, then `Finished`.

        `add_special`: put BOS/EOS around a text as the model's flags say. `parse_special`: read special
        tokens spelt out in it. Closing the stream cancels the request.
        """
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
    ) -> EventStream[Event]:
        """Answers a dialogue through the model's chat template; events as `generate`.

        `messages` are `Message`s or mappings with "role" and "content". `tools` is handed to the template.
        `continue_last`: go on with the last message, an assistant's, instead of answering it.
        """
        request = requests.chat_request(messages, model, tools, continue_last, options)
        return self._stream(self._stub.Chat(request, timeout=timeout_s), event_from_proto)

    def abort(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """Ends a running request; whether there was one."""
        found: bool = self._call(self._stub.Abort, pb.AbortRequest(request_id=request_id), timeout_s).found
        return found

    def tokenize(
        self,
        text: str,
        *,
        model: str = "",
        add_special: bool = True,
        parse_special: bool = False,
        timeout_s: float | None = None,
    ) -> list[int]:
        """The token ids of a text."""
        request = requests.tokenize_request(text, model, add_special, parse_special)
        return list(self._call(self._stub.Tokenize, request, timeout_s).ids)

    def tokenize_pieces(
        self,
        text: str,
        *,
        model: str = "",
        add_special: bool = True,
        parse_special: bool = False,
        timeout_s: float | None = None,
    ) -> list[tuple[int, bytes]]:
        """The token ids of a text, each with the bytes it stands for."""
        request = requests.tokenize_request(text, model, add_special, parse_special)
        response = self._call(self._stub.Tokenize, request, timeout_s)
        return list(zip(response.ids, response.pieces, strict=True))

    def detokenize(
        self,
        ids: Sequence[int],
        *,
        model: str = "",
        show_special: bool = False,
        timeout_s: float | None = None,
    ) -> str:
        """The text of token ids; special tokens are left out unless `show_special`."""
        request = requests.detokenize_request(ids, model, show_special)
        text: str = self._call(self._stub.Detokenize, request, timeout_s).text
        return text

    def apply_template(
        self,
        messages: Iterable[MessageLike],
        *,
        model: str = "",
        tools: Tools | None = None,
        continue_last: bool = False,
        timeout_s: float | None = None,
    ) -> tuple[str, list[int]]:
        """The text that `chat` would give the model, and its ids."""
        request = requests.template_request(messages, model, tools, continue_last)
        response = self._call(self._stub.ApplyTemplate, request, timeout_s)
        return response.text, list(response.ids)

    def models(self, *, timeout_s: float | None = None) -> list[Model]:
        """The GGUF files below the coordinator's model directories."""
        response = self._call(self._stub.ListModels, pb.ListModelsRequest(), timeout_s)
        return [model_from_proto(model) for model in response.models]

    def load_model(
        self, model: str, *, context_length: int = 0, force: bool = False, timeout_s: float | None = None
    ) -> EventStream[LoadEvent]:
        """Plans and loads a model: `LoadProgress` events, the `Plan` once, the loaded `Model` last.

        `context_length` is what a sequence may hold (0: the coordinator's setting). `force` ends requests
        that still run. Closing the stream early cancels the load.
        """
        request = requests.load_request(model, context_length, force)
        return self._stream(self._stub.LoadModel(request, timeout=timeout_s), load_event_from_proto)

    def unload_model(self, *, force: bool = False, timeout_s: float | None = None) -> None:
        self._call(self._stub.UnloadModel, pb.UnloadModelRequest(force=force), timeout_s)

    def status(self, *, timeout_s: float | None = None) -> Status:
        return status_from_proto(self._call(self._stub.GetStatus, pb.GetStatusRequest(), timeout_s))

    def watch_status(self, interval_s: float = 1.0) -> EventStream[Status]:
        """The status now and at every interval, until the stream is closed."""
        call = self._stub.WatchStatus(pb.WatchStatusRequest(interval_s=interval_s))
        return self._stream(call, watched_status_from_proto)

    def is_running(self, *, timeout_s: float = 2.0) -> bool:
        """Whether a coordinator answers at the address at all."""
        return self._serves("", timeout_s)

    def is_ready(self, *, timeout_s: float = 2.0) -> bool:
        """Whether a model is loaded and answers."""
        return self._serves(SERVICE, timeout_s)

    def close(self) -> None:
        """Ends the connection, and with it every stream of this client."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: Any, request: Any, timeout_s: float | None) -> Any:
        try:
            return method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.address) from error

    def _stream(self, call: Any, convert: Any) -> EventStream[Any]:
        return EventStream(call, convert, self.address)

    def _serves(self, service: str, timeout_s: float) -> bool:
        stub = health_pb2_grpc.HealthStub(self._channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
