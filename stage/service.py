"""StageService: a thin servicer between the wire and the engine.

It holds at most one `LoadedEpoch`, and makes sure that whatever ends it (a newer Load, Unload, a failure, the
daemon's end) releases its engine, link and memory. Arithmetic, sequences and order of work are the engine's.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import grpc
import psutil

from common import rpc
from common.errors import (
    CancelledError,
    DeviceLostError,
    InvalidRequestError,
    NotReadyError,
    OutOfCapacityError,
    PipeLLMError,
    UnavailableError,
    UnknownModelError,
    UnsupportedModelError,
)
from common.gguf.reader import GGUFFile
from common.log import get_logger
from common.wire import Frame
from protos import stage_pb2, stage_pb2_grpc
from stage import profiler
from stage.backends.base import Backend
from stage.config import StageConfig
from stage.device import device_info
from stage.epoch import LoadedEpoch
from stage.faults import device_fault, is_out_of_memory
from stage.incoming import IncomingStreams
from stage.links import grpc_link
from stage.links.connect import connect
from stage.links.shm_link import ShmListener
from stage.model.registry import build_spec
from stage.runner import Runner
from stage.streaming_telemetry import StreamingTelemetry
from stage.telemetry import GpuTelemetry

_LOAD_WAIT_S = 5.0
_UNLOAD_WAIT_S = 4.0  # the coordinator's patience is 5 s
_POLL_S = 0.5  # how often a waiting stream looks whether its caller is still there


class StageService(stage_pb2_grpc.StageServiceServicer):
    """Serves one device. `make_backend` is called for each load, so that a broken one is never reused.

    `on_device_lost` is told when the device can serve nothing any more: the process must end."""

    def __init__(
        self,
        config: StageConfig,
        instance_id: str,
        make_backend: Callable[[], Backend],
        on_device_lost: Callable[[PipeLLMError], None] = lambda error: None,
    ) -> None:
        self._config = config
        self._stage_id = config.stage_id
        self._instance_id = instance_id
        self._make_backend = make_backend
        self._on_device_lost = on_device_lost
        self._device = device_info(make_backend())
        self._telemetry = GpuTelemetry(self._device.uuid)
        self._streaming = StreamingTelemetry()
        self._shm = ShmListener(instance_id, self._accept_frame)
        self._lock = threading.Lock()  # guards what is loaded
        self._device_lock = threading.Lock()  # held while loading, unloading and measuring
        self._work = ""  # what it is held for
        self._loaded: LoadedEpoch | None = None
        # One of each is the rule; a newer epoch's may come while an older one's is ending.
        self._incoming_links = IncomingStreams("StreamFrames", 4)
        self._executions = IncomingStreams("Execute", 4)
        self._log = get_logger()

    @property
    def device(self) -> Any:
        return self._device

    def close(self) -> None:
        self._drop(UnavailableError(f"stage {self._stage_id} is shutting down"))
        self._shm.close()

    # --- state -------------------------------------------------------------------------------------------

    @contextmanager
    def _device_for(self, work: str, patience_s: float) -> Iterator[None]:
        """One load, unload or measurement at a time. Raises NotReadyError where another one takes longer."""
        if not self._device_lock.acquire(timeout=patience_s):
            raise NotReadyError(f"stage {self._stage_id} is {self._work} already; try again after that")
        try:
            self._work = work
            yield
        finally:
            self._device_lock.release()

    def _drop(self, error: PipeLLMError) -> None:
        with self._lock:
            loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.close(error)

    def _failed(self, error: PipeLLMError) -> None:
        if isinstance(error, DeviceLostError):
            self._on_device_lost(error)

    def _epoch(self, epoch: int) -> LoadedEpoch:
        loaded = self._loaded
        if loaded is None or loaded.request.epoch != epoch:
            held = f"epoch {loaded.request.epoch}" if loaded else "nothing"
            raise NotReadyError(f"stage {self._stage_id}: epoch {epoch} was asked for, {held} is loaded")
        return loaded

    # --- RPCs --------------------------------------------------------------------------------------------

    def Describe(self, request: Any, context: grpc.ServicerContext) -> stage_pb2.DescribeResponse:
        memory = psutil.Process().memory_info()
        response = stage_pb2.DescribeResponse(
            stage_id=self._stage_id,
            instance_id=self._instance_id,
            protocol_version=rpc.PROTOCOL_VERSION,
            device=self._device,
            resident_bytes=memory.rss,
            page_cache_bytes=memory.shared,
            telemetry=self._telemetry.read(),
        )
        loaded = self._loaded
        if loaded is not None:
            load, sequences = loaded.request, loaded.engine.sequences
            response.epoch = load.epoch
            response.fingerprint = load.fingerprint
            response.layer_start, response.layer_end = load.layer_start, load.layer_end
            response.weight_bytes = loaded.runner.weight_bytes
            response.kv_bytes = loaded.runner.kv.nbytes
            response.busy_fraction = loaded.engine.busy_fraction()
            response.num_kv_blocks = load.num_kv_blocks
            response.kv_blocks_in_use = sequences.blocks_in_use
            response.num_sequences = len(sequences)
            streaming = self._streaming.read(load.epoch, loaded.runner)
            if streaming is not None:
                response.streaming.CopyFrom(streaming)
        return response

    def Profile(
        self, request: stage_pb2.ProfileRequest, context: grpc.ServicerContext
    ) -> stage_pb2.ProfileResponse:
        with self._device_for("measuring a model", _LOAD_WAIT_S):
            if self._loaded is not None:
                held = "holds a model; unload it before measuring another"
                raise NotReadyError(f"stage {self._stage_id} {held}")
            with self._open(request) as file:
                spec = build_spec(file, request.context_length or None)
                backend = self._make_backend()
                try:
                    backend.check(spec)
                    return profiler.measure(backend, file, spec)
                finally:
                    backend.close()

    def Load(
        self, request: stage_pb2.LoadRequest, context: grpc.ServicerContext
    ) -> Iterator[stage_pb2.LoadResponse]:
        # A load that was cancelled ends with the part it is at.
        with self._device_for("loading a model", _LOAD_WAIT_S):
            self._drop(UnavailableError(f"stage {self._stage_id} was given a new plan"))
            loaded = yield from self._load(request, context)
        weight_bytes, kv_bytes = loaded.runner.weight_bytes, loaded.runner.kv.nbytes
        self._log.info(
            "loaded", epoch=request.epoch, layer_start=request.layer_start, layer_end=request.layer_end,
            weight_bytes=weight_bytes, kv_bytes=kv_bytes,
        )  # fmt: skip
        try:
            yield stage_pb2.LoadResponse(
                bytes_done=weight_bytes, bytes_total=weight_bytes, loaded=True, weight_bytes=weight_bytes,
                kv_bytes=kv_bytes,
            )  # fmt: skip
            while not loaded.taken.wait(_POLL_S):
                if not context.is_active():
                    raise CancelledError("the coordinator left before it executed what was loaded")
        except BaseException:  # GeneratorExit too: the caller went away
            self._abandon(loaded)
            raise

    def _abandon(self, loaded: LoadedEpoch) -> None:
        """Lets go of a load that nobody has executed, and nobody will."""
        with self._device_lock:
            with self._lock:
                abandoned = self._loaded is loaded and not loaded.taken.is_set()
                if abandoned:
                    self._loaded = None
            if abandoned:
                self._log.warning("load_abandoned", epoch=loaded.request.epoch)
                loaded.close(CancelledError("the coordinator left"))

    def _load(
        self, request: stage_pb2.LoadRequest, context: grpc.ServicerContext
    ) -> Generator[stage_pb2.LoadResponse, None, LoadedEpoch]:
        events: queue.SimpleQueue[tuple[int, int] | LoadedEpoch | Exception] = queue.SimpleQueue()
        cancelled = threading.Event()

        def work() -> None:
            try:
                events.put(self._make_loaded(request, lambda *done: events.put(done), cancelled.is_set))
            except Exception as error:
                fault = device_fault(error)
                events.put(fault or error)
                if fault is not None:
                    self._failed(fault)

        thread = threading.Thread(target=work, name="load", daemon=True)
        thread.start()
        try:
            while True:
                try:
                    event = events.get(timeout=_POLL_S)
                except queue.Empty:
                    if not context.is_active():
                        raise CancelledError("the coordinator left while the model was loading") from None
                    continue
                if isinstance(event, Exception):
                    raise event
                if isinstance(event, LoadedEpoch):
                    break
                yield stage_pb2.LoadResponse(bytes_done=event[0], bytes_total=event[1])
        except BaseException:  # GeneratorExit too: the caller went away
            cancelled.set()
            thread.join()
            while not events.empty():
                if isinstance(late := events.get(), LoadedEpoch):
                    late.close(CancelledError("the coordinator left"))
            raise
        with self._lock:
            self._loaded = event
        return event

    def _make_loaded(
        self,
        request: stage_pb2.LoadRequest,
        on_progress: Callable[[int, int], None],
        cancelled: Callable[[], bool],
    ) -> LoadedEpoch:
        if request.epoch < 1 or request.kv_block_size < 1 or request.max_step_tokens < 1:
            raise InvalidRequestError("Load: epoch, kv_block_size and max_step_tokens must be positive")
        if request.round or request.shard_count > 1:
            raise UnsupportedModelError("Load: several rounds or shards of a window are not supported yet")
        try:
            return self._try_load(request, on_progress, cancelled)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error)
        # Another process took memory since it was looked at: once more, within what is left.
        self._log.warning("load_repeated", reason=reason)
        try:
            return self._try_load(request, on_progress, cancelled)
        except Exception as error:
            if isinstance(error, OutOfCapacityError) or not is_out_of_memory(error):
                raise
            raise OutOfCapacityError(f"stage {self._stage_id}: out of memory at load: {error}") from error

    def _try_load(
        self,
        request: stage_pb2.LoadRequest,
        on_progress: Callable[[int, int], None],
        cancelled: Callable[[], bool],
    ) -> LoadedEpoch:
        backend = self._make_backend()
        try:
            with self._open(request) as file:
                spec = build_spec(file, request.context_length or None)
                backend.check(spec)
                runner = Runner.load(
                    backend, file, spec, request.layer_start, request.layer_end,
                    embedding=request.embedding, head=request.head, num_kv_blocks=request.num_kv_blocks,
                    kv_block_size=request.kv_block_size, on_progress=on_progress, cancelled=cancelled,
                )  # fmt: skip
        except BaseException:
            backend.close()
            raise
        return LoadedEpoch(request, runner, spec, self._failed)

    def Unload(self, request: Any, context: grpc.ServicerContext) -> stage_pb2.UnloadResponse:
        with self._device_for("unloading a model", _UNLOAD_WAIT_S):
            self._drop(UnavailableError(f"stage {self._stage_id} was unloaded"))
        return stage_pb2.UnloadResponse()

    def AttachLink(
        self, request: stage_pb2.AttachLinkRequest, context: grpc.ServicerContext
    ) -> stage_pb2.AttachLinkResponse:
        loaded = self._epoch(request.epoch)

        def broken(error: PipeLLMError) -> None:
            loaded.engine.post_failure(UnavailableError(f"stage {self._stage_id}: {error}"))

        max_payload_bytes = loaded.request.max_step_tokens * loaded.hidden_size * 4
        link = connect(request, self._device.boot_id, self._config.carrier, max_payload_bytes, broken)
        with self._lock:
            attached = self._loaded is loaded and loaded.link is None
            if attached:
                loaded.link = link
        if not attached:
            link.close()
            raise NotReadyError(f"stage {self._stage_id}: epoch {request.epoch} has ended, or has a link")
        loaded.engine.post_link(link)
        self._log.info("link_attached", carrier=link.carrier, round_trip_us=round(link.round_trip_s * 1e6, 1))
        return stage_pb2.AttachLinkResponse(carrier=link.carrier, round_trip_s=link.round_trip_s)

    def StreamFrames(
        self, request_iterator: Iterator[stage_pb2.StreamFramesRequest], context: grpc.ServicerContext
    ) -> Iterator[stage_pb2.StreamFramesResponse]:
        with self._incoming_links.admit(request_iterator, context) as (first, requests):
            self._epoch(Frame.decode(first.frame).epoch)
            yield from grpc_link.serve(requests, self._accept_frame)

    def _accept_frame(self, frame: Frame) -> None:
        self._epoch(frame.epoch).engine.post_frame(frame)

    def Execute(
        self, request_iterator: Iterator[stage_pb2.ExecuteRequest], context: grpc.ServicerContext
    ) -> Iterator[stage_pb2.ExecuteResponse]:
        with self._executions.admit(request_iterator, context) as (first, requests):
            yield from self._execute(first.epoch, requests)

    def _execute(
        self, epoch: int, requests: Iterator[stage_pb2.ExecuteRequest]
    ) -> Iterator[stage_pb2.ExecuteResponse]:
        loaded = self._epoch(epoch)
        with self._lock:
            if loaded.taken.is_set():
                raise NotReadyError(f"Execute: epoch {epoch} has a stream already, or has ended")
            loaded.taken.set()

        def take() -> None:
            try:
                for request in requests:
                    loaded.engine.post_steps(list(request.steps))
            except grpc.RpcError:
                pass  # the coordinator is gone; the answering side below sees it too
            loaded.responses.end(CancelledError("the coordinator ended the stream"))

        threading.Thread(target=take, name="execute-reader", daemon=True).start()
        reason: PipeLLMError = CancelledError("the coordinator left")
        try:
            while True:
                response, reason_to_end = loaded.responses.take()
                if response is not None:
                    yield response
                if reason_to_end is not None:
                    reason = reason_to_end
                    raise reason
        finally:
            # Without its steps an epoch is of no use: a coordinator that comes back loads a new one.
            self._log.info("epoch_ended", epoch=epoch, reason=str(reason))
            if self._loaded is loaded:
                self._drop(reason)

    def _open(self, request: stage_pb2.ProfileRequest | stage_pb2.LoadRequest) -> GGUFFile:
        """The model file, if it is the one that the coordinator means. Raises NotReadyError if it is not."""
        if self._config.model_dir:
            _check_below(request.model_file)
        own = (Path(directory, request.model_file) for directory in self._config.model_dir)
        path = next((path for path in own if path.exists()), None)
        if path is None and self._config.model_dir:
            raise UnknownModelError(
                f"stage {self._stage_id}: no {request.model_file} in {', '.join(self._config.model_dir)}"
            )
        file = GGUFFile.open(path or request.model_path)
        if request.fingerprint and file.fingerprint != request.fingerprint:
            file.close()
            raise NotReadyError(
                f"stage {self._stage_id}: {path or request.model_path} is not the coordinator's file: its "
                f"header hashes to {file.fingerprint[:12]}, the coordinator's to {request.fingerprint[:12]}; "
                "copy the same file to both"
            )
        return file


def _check_below(model_file: str) -> None:
    """Raises InvalidRequestError for a path that would not lie below the directory it is joined to."""
    path = PurePosixPath(model_file)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in model_file:
        raise InvalidRequestError(f"model_file is {model_file!r}, expected is a path below a model directory")
