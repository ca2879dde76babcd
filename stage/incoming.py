"""Who may hold one of the server's workers: a long stream must say soon what it is for, and few may be open.

Each open stream takes a worker of the server for as long as it lasts; without limits, idle ones would leave
none for the short calls.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import grpc

from common.errors import InvalidRequestError, OutOfCapacityError
from common.log import get_logger

_FIRST_MESSAGE_S = 10.0
Request = TypeVar("Request")


class IncomingStreams:
    """The open streams of one RPC, `limit` of them at most."""

    def __init__(self, rpc_name: str, limit: int) -> None:
        self._rpc_name = rpc_name
        self._limit = limit
        self._free = threading.BoundedSemaphore(limit)

    @contextmanager
    def admit(
        self, requests: Iterator[Request], context: grpc.ServicerContext
    ) -> Iterator[tuple[Request, Iterator[Request]]]:
        """The first message, and all of them; the call is cancelled if the first does not come in time.

        Raises OutOfCapacityError, or InvalidRequestError for a stream without a message."""
        if not self._free.acquire(blocking=False):
            raise OutOfCapacityError(f"{self._rpc_name}: {self._limit} streams are open, no more are taken")
        try:
            first = self._first(requests, context)
            yield first, itertools.chain([first], requests)
        finally:
            self._free.release()

    def _first(self, requests: Iterator[Request], context: grpc.ServicerContext) -> Request:
        def expire() -> None:
            get_logger().warning("silent_stream_ended", rpc=self._rpc_name, peer=context.peer())
            context.cancel()

        timer = threading.Timer(_FIRST_MESSAGE_S, expire)
        timer.daemon = True
        timer.start()
        try:
            return next(requests)
        except StopIteration:
            raise InvalidRequestError(
                f"{self._rpc_name}: the stream ended before it named its epoch"
            ) from None
        finally:
            timer.cancel()
