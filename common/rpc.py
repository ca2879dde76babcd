"""gRPC plumbing that every daemon and client shares: addresses, channels, servers, and errors on the wire.

Domain code raises `PipeLLMError`; the interceptors here turn it into a status (INTERNAL, with the traceback
logged and not sent, for anything else), and `from_rpc_error` turns a status back into the exception.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent import futures
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from common import errors
from common.log import get_logger

PROTOCOL_VERSION = 1

# A chunk of 2048 tokens at width 8192 in float32 is 64 MiB; a 10 MB prompt is far below.
MAX_MESSAGE_BYTES = 96 << 20
RETRY_DELAY_S = 1.0
_MAX_MESSAGE_CHARS = 2000
_MAX_REFLECTIONS = 8  # open at once on a threaded server

_COMMON_OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_CHANNEL_OPTIONS = [
    *_COMMON_OPTIONS,
    # The mesh is dialled directly, and a peer that comes back must be found soon.
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
_SERVER_OPTIONS = [
    *_COMMON_OPTIONS,
    ("grpc.so_reuseport", 0),  # else a second daemon on the same port would silently share it
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
]


def check_address(address: str) -> str:
    """`host:port` or `unix:/path` as gRPC dials it. Raises InvalidRequestError."""
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        if not path.startswith("/"):
            raise errors.InvalidRequestError(f"address {address!r}: a unix socket needs an absolute path")
        if len(os.fsencode(path)) > 107:
            raise errors.InvalidRequestError(f"address {address!r}: a socket's path has 107 bytes at most")
        return address
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})", address)
    if not match or int(match[2]) > 65535:
        raise errors.InvalidRequestError(f"address {address!r}: expected host:port or unix:/path")
    return address


def dial(address: str) -> grpc.Channel:
    return grpc.insecure_channel(check_address(address), options=_CHANNEL_OPTIONS)


def dial_async(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(check_address(address), options=_CHANNEL_OPTIONS)


def from_rpc_error(error: grpc.RpcError, peer: str) -> errors.PipeLLMError:
    """The exception that a failed call stands for; an unreachable peer is named by its address."""
    code: grpc.StatusCode = error.code()
    details: str = error.details() or code.name
    if rpc_status_of(error) is None:  # gRPC's own words, not those of a daemon of ours
        if code == grpc.StatusCode.UNAVAILABLE:
            details = f"{peer} cannot be reached ({details})"
        elif code == grpc.StatusCode.DEADLINE_EXCEEDED:
            details = f"{peer} did not answer within the deadline"
    return errors.from_status(code, details)


def rpc_status_of(error: grpc.RpcError) -> status_pb2.Status | None:
    """The rich status our own servers attach; None for one that gRPC made itself."""
    try:
        return rpc_status.from_call(error)
    except (ValueError, AttributeError):
        return None


# --- servers -----------------------------------------------------------------------------------------------


def make_server(service_name: str, max_workers: int) -> tuple[grpc.Server, health.HealthServicer]:
    """A threaded server with errors mapped, health and reflection; add the servicer, then `listen`."""
    server = grpc.server(
        futures.ThreadPoolExecutor(max_workers, thread_name_prefix="rpc"),
        interceptors=[_ErrorInterceptor()],
        options=_SERVER_OPTIONS,
    )
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection(_reflected(service_name), server)
    return server, servicer


def make_async_server(service_name: str) -> tuple[grpc.aio.Server, health.aio.HealthServicer]:
    """The same on asyncio."""
    server = grpc.aio.server(interceptors=[_AsyncErrorInterceptor()], options=_SERVER_OPTIONS)
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection(_reflected(service_name), server)
    return server, servicer


def _reflected(service_name: str) -> tuple[str, ...]:
    return (service_name, health.SERVICE_NAME, reflection.SERVICE_NAME)


def serving(ready: bool) -> Any:
    """The health status for `ready`."""
    status = health_pb2.HealthCheckResponse
    return status.SERVING if ready else status.NOT_SERVING


def listen(server: grpc.Server | grpc.aio.Server, address: str) -> str:
    """Binds `address` and returns the one to dial (port 0 is replaced by the port that was free).

    Raises ConfigError when the address is in use or cannot be bound.
    """
    check_address(address)
    if address.startswith("unix:"):
        _refuse_living_socket(address)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise errors.ConfigError(
            f"cannot listen on {address}: the address is in use or not of this machine; "
            "stop the other daemon or choose another with --listen"
        ) from error
    if address.startswith("unix:"):
        return address
    return f"{address.rpartition(':')[0]}:{port}"


def _refuse_living_socket(address: str) -> None:
    """gRPC would replace a living daemon's socket file without a word, so ask whether anyone answers."""
    path = address.removeprefix("unix:")
    if not os.path.exists(path):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return
    raise errors.ConfigError(f"cannot listen on {address}: another daemon answers there; stop it first")


# --- errors on the wire -------------------------------------------------------------------------------------


def _status_for(error: Exception, method: str) -> Any:
    code = errors.status_code(error)
    if isinstance(error, errors.PipeLLMError) and code != grpc.StatusCode.INTERNAL:
        message = str(error)
    else:
        get_logger().error("rpc_failed", method=method, exc_info=error)
        message = f"internal error ({type(error).__name__}); the daemon's log has the details"
    message = message.encode("utf-8", "backslashreplace").decode()  # names of files need not be UTF-8
    if len(message) > _MAX_MESSAGE_CHARS:  # gRPC bounds the trailers that carry it
        message = message[:_MAX_MESSAGE_CHARS] + " ..."
    status = status_pb2.Status(code=code_pb2.Code.Value(code.name), message=message)
    if code == grpc.StatusCode.UNAVAILABLE:
        detail = any_pb2.Any()
        delay = duration_pb2.Duration(nanos=0, seconds=int(RETRY_DELAY_S))
        detail.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        status.details.append(detail)
    return rpc_status.to_status(status)


_KINDS = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


def _rewrap(handler: grpc.RpcMethodHandler, behavior: Callable[..., Any]) -> grpc.RpcMethodHandler:
    """The same method with another behavior, which is given the request's bytes: gRPC would call a request
    that cannot be parsed UNKNOWN."""
    _, make = _KINDS[handler.request_streaming, handler.response_streaming]
    return make(behavior, None, handler.response_serializer)


def _parse(handler: grpc.RpcMethodHandler, data: bytes) -> Any:
    if handler.request_deserializer is None:  # the method takes bytes
        return data
    try:
        return handler.request_deserializer(data)
    except Exception as error:
        raise errors.InvalidRequestError(
            "the request is no message of this RPC, or a text in it is not UTF-8"
        ) from error


def _parse_all(handler: grpc.RpcMethodHandler, stream: Iterator[bytes]) -> Iterator[Any]:
    for data in stream:
        yield _parse(handler, data)


async def _parse_all_async(
    handler: grpc.RpcMethodHandler, stream: AsyncIterator[bytes]
) -> AsyncIterator[Any]:
    async for data in stream:
        yield _parse(handler, data)


def _behavior(handler: grpc.RpcMethodHandler) -> Callable[..., Any]:
    name, _ = _KINDS[handler.request_streaming, handler.response_streaming]
    behavior: Callable[..., Any] = getattr(handler, name)
    return behavior


class _ErrorInterceptor(grpc.ServerInterceptor):
    def __init__(self) -> None:
        self._reflection_free = threading.BoundedSemaphore(_MAX_REFLECTIONS)

    def _reflecting(self, handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
        """The same method; each open stream of it takes a worker, so few may be open."""
        inner = _behavior(handler)

        def bounded(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
            if not self._reflection_free.acquire(blocking=False):
                context.abort(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"reflection: {_MAX_REFLECTIONS} streams are open, no more are taken; close one",
                )
            try:
                yield from inner(requests, context)
            finally:
                self._reflection_free.release()

        return grpc.stream_stream_rpc_method_handler(
            bounded, handler.request_deserializer, handler.response_serializer
        )

    def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = continuation(handler_call_details)
        if handler is not None and handler_call_details.method.startswith("/grpc.reflection."):
            return self._reflecting(handler)
        if handler is None or handler_call_details.method.startswith("/grpc."):
            return handler  # health raises no errors of ours, and has its own threading
        inner, method = _behavior(handler), handler_call_details.method

        def parsed(request: Any) -> Any:
            return _parse_all(handler, request) if handler.request_streaming else _parse(handler, request)

        def fail(error: Exception, context: grpc.ServicerContext) -> NoReturn:
            context.abort_with_status(_status_for(error, method))
            raise AssertionError("abort_with_status raises")

        def unary(request: Any, context: grpc.ServicerContext) -> Any:
            try:
                return inner(parsed(request), context)
            except Exception as error:
                fail(error, context)

        def stream(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            try:
                yield from inner(parsed(request), context)
            except grpc.RpcError:  # the caller went away; gRPC knows
                raise
            except Exception as error:
                fail(error, context)

        return _rewrap(handler, stream if handler.response_streaming else unary)


class _AsyncErrorInterceptor(grpc.aio.ServerInterceptor):
    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith("/grpc."):
            return handler  # health and reflection raise no errors of ours
        inner, method = _behavior(handler), handler_call_details.method

        def parsed(request: Any) -> Any:
            if handler.request_streaming:
                return _parse_all_async(handler, request)
            return _parse(handler, request)

        async def fail(error: Exception, context: Any) -> NoReturn:
            if isinstance(error, grpc.aio.AbortError):
                raise error
            status = _status_for(error, method)
            await context.abort(status.code, status.details, status.trailing_metadata)
            raise AssertionError("abort raises")

        async def unary(request: Any, context: Any) -> Any:
            try:
                return await inner(parsed(request), context)
            except Exception as error:
                await fail(error, context)

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                async for response in inner(parsed(request), context):
                    yield response
            except asyncio.CancelledError:
                raise
            except Exception as error:
                await fail(error, context)

        return _rewrap(handler, stream if handler.response_streaming else unary)
