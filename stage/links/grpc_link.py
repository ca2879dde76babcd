"""The link that works everywhere: one long bidirectional gRPC stream of checked frames.

Frames flow one way; only self-test frames (`FrameKind.ECHO`) are answered. `serve` is the receiving half.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import grpc
import numpy as np

from common import rpc
from common.errors import CorruptDataError, PipeLLMError, UnavailableError
from common.wire import Frame, FrameKind
from protos import stage_pb2, stage_pb2_grpc
from stage.links.base import OnBroken

# Small and odd, a page, and some rows of hidden states: each comes back or the link is not used.
_SELF_TEST_BYTES = (1, 4096, 1 << 20)
_SELF_TEST_TIMEOUT_S = 5.0


class GrpcLink:
    """The sending half. Construction dials and proves the link, or raises UnavailableError."""

    carrier = "grpc"

    def __init__(self, address: str, epoch: int, window: int, on_broken: OnBroken) -> None:
        self._address = address
        self._epoch = epoch
        self._window = window
        self._on_broken = on_broken
        self._next_number = 0
        self._closed = threading.Event()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._echoes: queue.SimpleQueue[Frame | PipeLLMError] = queue.SimpleQueue()
        self._channel = rpc.dial(address)
        stub = stage_pb2_grpc.StageServiceStub(self._channel)
        self._call = stub.StreamFrames(self._requests(), wait_for_ready=True)
        self._reader = threading.Thread(target=self._read, name="link-reader", daemon=True)
        self._reader.start()
        try:
            self.round_trip_s = self._self_test()
        except BaseException:
            self.close()
            raise

    def send(self, frame: Frame) -> None:
        numbered = replace(frame, window=self._window, sequence_number=self._next_number)
        self._next_number += 1
        self._outbox.put(numbered.encode())

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        self._outbox.put(None)
        self._call.cancel()
        self._reader.join(timeout=5.0)
        self._channel.close()

    def _requests(self) -> Iterator[stage_pb2.StreamFramesRequest]:
        while (data := self._outbox.get()) is not None:
            yield stage_pb2.StreamFramesRequest(frame=data)

    def _read(self) -> None:
        error: PipeLLMError = UnavailableError(f"the next stage at {self._address} ended the link")
        try:
            for response in self._call:
                self._echoes.put(Frame.decode(response.frame))
        except grpc.RpcError as failure:
            error = rpc.from_rpc_error(failure, f"the next stage at {self._address}")
        except PipeLLMError as failure:
            error = failure
        self._echoes.put(error)
        if not self._closed.is_set():
            self._on_broken(error)

    def _self_test(self) -> float:
        random = np.random.default_rng()
        for size in _SELF_TEST_BYTES:
            payload = random.integers(0, 256, (1, size), dtype=np.uint8)
            started = time.perf_counter()
            self.send(Frame(FrameKind.ECHO, self._epoch, 0, 0, payload))
            try:
                answer = self._echoes.get(timeout=_SELF_TEST_TIMEOUT_S)
            except queue.Empty:
                raise UnavailableError(
                    f"the next stage at {self._address} did not answer the link's self-test "
                    f"within {_SELF_TEST_TIMEOUT_S:.0f} s"
                ) from None
            if isinstance(answer, PipeLLMError):
                raise answer
            if not np.array_equal(answer.payload, payload):
                raise CorruptDataError(f"the link to {self._address} returned other bytes than were sent")
            if size == _SELF_TEST_BYTES[0]:
                round_trip_s = time.perf_counter() - started
        return round_trip_s


def serve(
    requests: Iterable[stage_pb2.StreamFramesRequest], accept: Callable[[Frame], None]
) -> Iterator[stage_pb2.StreamFramesResponse]:
    """The receiving half: checks each frame's place in the order, answers self-tests, hands on the rest.

    Raises CorruptDataError for a damaged, missing or doubled frame."""
    for expected, request in enumerate(requests):
        frame = Frame.decode(request.frame)
        if frame.sequence_number != expected:
            raise CorruptDataError(f"link: frame {frame.sequence_number} arrived where {expected} was due")
        if frame.kind == FrameKind.ECHO:
            yield stage_pb2.StreamFramesResponse(frame=request.frame)
        else:
            accept(frame)
