"""Streams of events from a server-streaming RPC: iterating reads it, closing cancels it.

Knows gRPC calls and nothing of what the events are. A failed RPC raises a `common.errors` class; a stream
that was closed here simply ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import grpc

from common.rpc import from_rpc_error

T = TypeVar("T")


class EventStream(Generic[T]):
    """A blocking iterator of events, also a context manager that cancels the RPC at its end."""

    def __init__(self, call: Any, convert: Callable[[Any], T | None], peer: str) -> None:
        self._call = call
        self._convert = convert
        self._peer = peer
        self._closed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        while True:
            try:
                event = self._convert(next(self._call))
            except grpc.RpcError as error:
                if self._closed:
                    raise StopIteration from None
                raise from_rpc_error(error, self._peer) from error
            if event is not None:
                return event

    def close(self) -> None:
        """Cancels the RPC. May be called from a signal handler or another thread, and more than once."""
        self._closed = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncEventStream(Generic[T]):
    """The same on asyncio; cancelling the task that iterates cancels the RPC too."""

    def __init__(self, call: Any, convert: Callable[[Any], T | None], peer: str) -> None:
        self._call = call
        self._responses = aiter(call)
        self._convert = convert
        self._peer = peer
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        while True:
            try:
                event = self._convert(await anext(self._responses))
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if self._closed and not (task and task.cancelling()):
                    raise StopAsyncIteration from None  # gRPC reports a local cancel like a task's
                raise
            except grpc.RpcError as error:
                if self._closed:
                    raise StopAsyncIteration from None
                raise from_rpc_error(error, self._peer) from error
            if event is not None:
                return event

    async def aclose(self) -> None:
        """Cancels the RPC; may be called more than once."""
        self._closed = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
