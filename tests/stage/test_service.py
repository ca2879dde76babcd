"""The stage's service over real gRPC: what it refuses and how, what ends an epoch, and a whole Execute."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common import rpc
from common.errors import DeviceLostError, PipeLLMError
from common.gguf.reader import GGUFFile
from common.wire import Frame, FrameKind
from protos import stage_pb2, stage_pb2_grpc
from stage import __main__ as daemon
from stage import incoming, profiler
from stage.backends.base import Backend
from stage.backends.reference import ReferenceBackend
from stage.config import StageConfig
from stage.links import grpc_link
from stage.service import StageService
from tests.gguf_files import write_tiny_llama
from tests.stage import steps

LAYERS = 4
TIMEOUT_S = 20
PROMPT = [1, 300, 40, 270, 333]
SERVICE = "pipellm.v1.StageService"
_epochs = itertools.count(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", layers=LAYERS)


class Gate:
    """Makes backends that wait at each layer until the gate is open."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.reached = threading.Event()
        self.prepared = 0  # layers, since somebody set it to 0

    def backend(self) -> Backend:
        gate = self

        class Gated(ReferenceBackend):
            def prepare_layer(self, spec: Any, raw: Any) -> Any:
                gate.reached.set()
                assert gate.open.wait(TIMEOUT_S)
                gate.prepared += 1
                return super().prepare_layer(spec, raw)

        return Gated()


class Server:
    """A StageService behind a real server, as the daemon makes it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.model = model
        self.gate = Gate()
        self.server, self.health = rpc.make_server(SERVICE, daemon._WORKERS)
        config = StageConfig(stage_id="tested", carrier="grpc")
        self.lost: queue.SimpleQueue[PipeLLMError] = queue.SimpleQueue()
        self.service = StageService(config, "instance", self.gate.backend, self.lost.put)
        stage_pb2_grpc.add_StageServiceServicer_to_server(self.service, self.server)
        self.address = rpc.listen(self.server, f"unix:{folder}/s.sock")
        self.server.start()
        self.channel = rpc.dial(self.address)
        self.stub = stage_pb2_grpc.StageServiceStub(self.channel)

    def request(self, **changes: Any) -> stage_pb2.LoadRequest:
        whole: dict[str, Any] = {
            "epoch": next(_epochs), "model_path": str(self.model), "layer_end": LAYERS, "embedding": True,
            "head": True, "num_kv_blocks": steps.NUM_BLOCKS, "kv_block_size": steps.BLOCK_SIZE,
            "max_step_tokens": 64, "shard_count": 1,
        }  # fmt: skip
        return stage_pb2.LoadRequest(**(whole | changes))

    def load(self, **changes: Any) -> int:
        """Loads the whole model and returns its epoch."""
        request = self.request(**changes)
        self.held = self.stub.Load(request, timeout=TIMEOUT_S)  # the model, until it is executed
        last = next(response for response in self.held if response.loaded)
        assert last.weight_bytes > 0 and last.kv_bytes > 0
        return request.epoch

    def epoch(self) -> int:
        loaded: int = self.stub.Describe(stage_pb2.DescribeRequest(), timeout=TIMEOUT_S).epoch
        return loaded

    def wait_epoch(self, epoch: int) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while self.epoch() != epoch:
            assert time.monotonic() < deadline, f"epoch {self.epoch()} stays, {epoch} was awaited"
            time.sleep(0.02)

    def close(self) -> None:
        self.channel.close()
        self.service.close()
        self.server.stop(0).wait()


@pytest.fixture(scope="module")
def module_server(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("server"), model)
    yield made
    made.close()


@pytest.fixture
def server(module_server: Server) -> Iterator[Server]:
    """The module's server with nothing loaded."""
    yield module_server
    module_server.gate.open.set()
    module_server.stub.Unload(stage_pb2.UnloadRequest(), timeout=TIMEOUT_S)


class Execution:
    """An Execute stream; closed by the test's end."""

    def __init__(self, server: Server, epoch: int) -> None:
        self._requests: queue.SimpleQueue[stage_pb2.ExecuteRequest | None] = queue.SimpleQueue()
        self._requests.put(stage_pb2.ExecuteRequest(epoch=epoch))
        self.call = server.stub.Execute(iter(self._requests.get, None), timeout=TIMEOUT_S)

    def send(self, *described: stage_pb2.Step) -> None:
        self._requests.put(stage_pb2.ExecuteRequest(steps=described))

    def run(self, *described: stage_pb2.Step) -> list[stage_pb2.StepResult]:
        """The results of steps, once all of them are acknowledged."""
        self.send(*described)
        results: list[stage_pb2.StepResult] = []
        missing = {step.step_id for step in described}
        while missing:
            response = next(self.call)
            results += response.results
            missing -= set(response.acknowledged_steps)
        return results

    def end(self) -> None:
        self._requests.put(None)


@pytest.fixture
def execute(server: Server) -> Iterator[Callable[[int], Execution]]:
    made: list[Execution] = []

    def start(epoch: int) -> Execution:
        made.append(Execution(server, epoch))
        return made[-1]

    yield start
    for execution in made:
        execution.end()
        execution.call.cancel()


@contextmanager
def refused(code: str, *words: str) -> Iterator[None]:
    with pytest.raises(grpc.RpcError) as caught:
        yield
    error = caught.value
    assert error.code().name == code, error.details()
    assert rpc.rpc_status_of(error) is not None, "a status of gRPC's own making"
    for word in words:
        assert word in error.details()


# --- Execute ------------------------------------------------------------------------------------------------


def test_a_whole_answer(server: Server, execute: Callable[[int], Execution], model: Path) -> None:
    expected = steps.greedy_by_hand(model, LAYERS, PROMPT, 8)
    execution = execute(server.load())
    results = execution.run(steps.prompt_step(1, 3, PROMPT, [7, 1]), steps.decode_step(2, 3, len(PROMPT)))
    described = server.stub.Describe(stage_pb2.DescribeRequest())
    assert (described.num_sequences, described.kv_blocks_in_use) == (1, 2)
    results += execution.run(steps.decode_step(3, 3, len(PROMPT) + 1, repeat=6))
    assert [(result.step_id, result.repeat) for result in results] == [
        (1, 0), (2, 0), *((3, repeat) for repeat in range(6))
    ]  # fmt: skip
    tokens = [token for result in results for token in result.tokens]
    assert [token.token_id for token in tokens] == expected
    assert [token.position for token in tokens] == list(range(len(PROMPT), len(PROMPT) + 8))
    assert execution.run(steps.free_step(4, 3)) == []
    described = server.stub.Describe(stage_pb2.DescribeRequest())
    assert (described.num_sequences, described.kv_blocks_in_use) == (0, 0)


def test_execute_of_another_epoch(server: Server, execute: Callable[[int], Execution]) -> None:
    with refused("FAILED_PRECONDITION", "epoch 999999 was asked for, nothing is loaded"):
        next(execute(999_999).call)
    epoch = server.load()
    with refused("FAILED_PRECONDITION", "epoch 999999 was asked for", f"epoch {epoch}"):
        next(execute(999_999).call)
    assert server.epoch() == epoch


def test_an_epoch_has_one_stream(server: Server, execute: Callable[[int], Execution]) -> None:
    epoch = server.load()
    first = execute(epoch)
    first.run(steps.prompt_step(1, 3, PROMPT, [0]))
    with refused("FAILED_PRECONDITION", "has a stream already"):
        next(execute(epoch).call)
    # The first one lives on.
    assert len(first.run(steps.decode_step(2, 3, len(PROMPT)))) == 1


def test_a_contradictory_step_ends_the_epoch(server: Server, execute: Callable[[int], Execution]) -> None:
    execution = execute(server.load())
    execution.send(steps.decode_step(1, 42, 0))
    with refused("INVALID_ARGUMENT", "step 1", "sequence 42 is not here"):
        next(execution.call)
    server.wait_epoch(0)


def test_execute_without_a_first_message(server: Server) -> None:
    with refused("INVALID_ARGUMENT", "epoch"):
        next(server.stub.Execute(iter(()), timeout=TIMEOUT_S))


def test_an_epoch_ends_with_its_stream(server: Server, execute: Callable[[int], Execution]) -> None:
    execution = execute(server.load())
    execution.run(steps.prompt_step(1, 3, PROMPT, [0]))
    execution.call.cancel()
    server.wait_epoch(0)


def test_a_lost_device_ends_more_than_the_epoch(
    server: Server, execute: Callable[[int], Execution], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stream says UNAVAILABLE, so that the mesh recovers, and the daemon is told to end."""

    def fail(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    execution = execute(server.load())
    monkeypatch.setattr(ReferenceBackend, "run_layer", fail)
    execution.send(steps.prompt_step(1, 9, PROMPT, [4, 2]))
    with pytest.raises(grpc.RpcError) as caught:
        next(execution.call)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "illegal memory access" in caught.value.details()
    assert isinstance(server.lost.get(timeout=TIMEOUT_S), DeviceLostError)


def test_no_memory_at_load_is_no_lost_device(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ReferenceBackend, "prepare_layer", fail)
    with pytest.raises(grpc.RpcError) as caught:
        server.load()
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert server.lost.empty()


def test_memory_that_another_took_meanwhile_costs_a_second_look(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second load sees less free memory, and places fewer layers there where it can."""
    placed: list[int] = []
    prepare = ReferenceBackend.prepare_layer

    def prepare_once_more(self: ReferenceBackend, spec: Any, raw: Any) -> Any:
        if len(placed) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return prepare(self, spec, raw)

    def place(self: ReferenceBackend, file: object, layers: object, other_bytes: int, kv_tokens: int) -> bool:
        placed.append(kv_tokens)
        return False

    monkeypatch.setattr(ReferenceBackend, "place", place)
    monkeypatch.setattr(ReferenceBackend, "prepare_layer", prepare_once_more)
    server.load()
    assert placed == [steps.NUM_BLOCKS * steps.BLOCK_SIZE] * 2


def test_unload_ends_execute(server: Server, execute: Callable[[int], Execution]) -> None:
    execution = execute(server.load())
    execution.run(steps.prompt_step(1, 3, PROMPT, [0]))
    server.stub.Unload(stage_pb2.UnloadRequest(), timeout=TIMEOUT_S)
    with refused("UNAVAILABLE", "stage tested", "unloaded"):
        next(execution.call)
    assert server.epoch() == 0
    server.stub.Unload(stage_pb2.UnloadRequest(), timeout=TIMEOUT_S)  # nothing loaded is no error


def test_a_newer_load_ends_execute(server: Server, execute: Callable[[int], Execution]) -> None:
    execution = execute(server.load())
    execution.run(steps.prompt_step(1, 3, PROMPT, [0]))
    newer = server.load()
    with refused("UNAVAILABLE", "new plan"):
        next(execution.call)
    assert server.epoch() == newer


# --- links --------------------------------------------------------------------------------------------------


def attach(server: Server, epoch: int, address: str = "") -> stage_pb2.AttachLinkResponse:
    request = stage_pb2.AttachLinkRequest(epoch=epoch, next_address=address or server.address)
    response: stage_pb2.AttachLinkResponse = server.stub.AttachLink(request, timeout=TIMEOUT_S)
    return response


def test_a_link_is_attached_once(server: Server) -> None:
    epoch = server.load()
    response = attach(server, epoch)
    assert response.carrier == "grpc" and 0 < response.round_trip_s < TIMEOUT_S
    with refused("FAILED_PRECONDITION", "has a link"):
        attach(server, epoch)


def test_a_link_for_another_epoch(server: Server) -> None:
    epoch = server.load()
    with refused("FAILED_PRECONDITION", f"epoch {epoch + 100} was asked for, epoch {epoch} is loaded"):
        attach(server, epoch + 100)


def test_a_link_to_nobody(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(grpc_link, "_SELF_TEST_TIMEOUT_S", 0.5)
    epoch = server.load()
    with refused("UNAVAILABLE", "nobody.sock"):
        attach(server, epoch, f"unix:{tmp_path}/nobody.sock")
    attach(server, epoch)  # the epoch is as it was


def stream(server: Server, *frames: bytes) -> list[bytes]:
    requests = (stage_pb2.StreamFramesRequest(frame=frame) for frame in frames)
    return [response.frame for response in server.stub.StreamFrames(requests, timeout=TIMEOUT_S)]


def test_frames(server: Server, execute: Callable[[int], Execution]) -> None:
    hidden = Frame(FrameKind.HIDDEN_STATES, 999_999, 1, 0, np.zeros((2, 64), np.float32))
    echo = replace(hidden, kind=FrameKind.ECHO).encode()
    for frame in (echo, hidden.encode()):
        with refused("FAILED_PRECONDITION", "epoch 999999 was asked for, nothing is loaded"):
            stream(server, frame)
    epoch = server.load()
    own_echo = replace(hidden, kind=FrameKind.ECHO, epoch=epoch).encode()
    assert stream(server, own_echo) == [own_echo]
    with refused("INVALID_ARGUMENT", "named its epoch"):
        stream(server)
    with refused("FAILED_PRECONDITION", "epoch 999999 was asked for"):
        stream(server, hidden.encode())
    with refused("DATA_LOSS", "frame 5 arrived where 0 was due"):
        stream(server, replace(hidden, epoch=epoch, sequence_number=5).encode())
    damaged = bytearray(echo)
    damaged[-1] ^= 1
    with refused("DATA_LOSS", "checksum"):
        stream(server, bytes(damaged))
    # Hidden states for a stage that has the embedding: the epoch's stream tells.
    execution = execute(epoch)
    execution.run(steps.prompt_step(1, 3, PROMPT, [0]))
    assert stream(server, replace(hidden, epoch=epoch).encode()) == []
    with refused("DATA_LOSS", "hidden states"):
        next(execution.call)


def test_idle_streams_leave_workers_for_short_calls(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "_FIRST_MESSAGE_S", 2.0)
    end = threading.Event()

    def silent() -> Iterator[Any]:
        end.wait(TIMEOUT_S)
        yield from ()

    reflection = reflection_pb2_grpc.ServerReflectionStub(server.channel)
    calls = [
        method(silent(), timeout=TIMEOUT_S)
        for method in (server.stub.StreamFrames, server.stub.Execute)
        for _ in range(20)
    ]
    idle = [reflection.ServerReflectionInfo(silent(), timeout=TIMEOUT_S) for _ in range(20)]
    try:
        server.stub.Describe(stage_pb2.DescribeRequest(), timeout=5)
        started = time.monotonic()
        codes = []
        for call in calls:
            with pytest.raises(grpc.RpcError):
                next(call)
            codes.append(call.code().name)
        assert time.monotonic() - started < 8
        assert sorted(codes) == ["CANCELLED"] * 8 + ["RESOURCE_EXHAUSTED"] * 32
        attach(server, server.load())  # the places are free again
    finally:
        end.set()
        for call in (*calls, *idle):
            call.cancel()


# --- Load and Profile ---------------------------------------------------------------------------------------


def test_profile_measures_only_an_idle_stage(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "_EVICT_BYTES", 1 << 20)
    request = stage_pb2.ProfileRequest(model_path=str(server.model))
    assert server.stub.Profile(request, timeout=TIMEOUT_S).num_layers == LAYERS
    epoch = server.load()
    with refused("FAILED_PRECONDITION", "unload it"):
        server.stub.Profile(request, timeout=TIMEOUT_S)
    assert server.epoch() == epoch


@pytest.mark.parametrize("method", ["Load", "Profile"])
def test_only_the_coordinators_file_is_taken(server: Server, method: str, tmp_path: Path) -> None:
    with GGUFFile.open(server.model) as file:
        fingerprint = file.fingerprint

    def call(path: Path) -> None:
        if method == "Profile":
            request = stage_pb2.ProfileRequest(model_path=str(path), fingerprint=fingerprint)
            server.stub.Profile(request, timeout=TIMEOUT_S)
        else:
            server.load(model_path=str(path), fingerprint=fingerprint)

    with refused("NOT_FOUND", "absent.gguf"):
        call(tmp_path / "absent.gguf")
    other = write_tiny_llama(tmp_path / "other.gguf", layers=LAYERS - 1)
    with refused("FAILED_PRECONDITION", fingerprint[:12], "copy the same file"):
        call(other)
    (tmp_path / "picture.gguf").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    with refused("DATA_LOSS", "picture.gguf", "PNG"):
        call(tmp_path / "picture.gguf")
    if method == "Load":
        call(server.model)
        assert server.epoch() > 0


@pytest.mark.parametrize("method", ["Load", "Profile"])
@pytest.mark.parametrize("model_file", ["../tiny.gguf", "a/../../tiny.gguf", "{}", "", ".", "a\0b"])
def test_a_stage_opens_files_of_its_own_directories_alone(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str, model_file: str
) -> None:
    own = server.model.parent / "own"
    own.mkdir(exist_ok=True)
    monkeypatch.setattr(server.service, "_config", StageConfig(model_dir=(str(own),), carrier="grpc"))
    model_file = model_file.format(server.model)
    with refused("INVALID_ARGUMENT", "model_file is", "below a model directory"):
        if method == "Profile":
            server.stub.Profile(stage_pb2.ProfileRequest(model_file=model_file), timeout=TIMEOUT_S)
        else:
            server.load(model_file=model_file)


def test_a_model_file_may_lie_in_a_folder_of_the_model_directory(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = server.model.parent.parent
    monkeypatch.setattr(server.service, "_config", StageConfig(model_dir=(str(root),), carrier="grpc"))
    server.load(model_file=f"{server.model.parent.name}/{server.model.name}", model_path="absent")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"round": 1}, "UNIMPLEMENTED"),
        ({"shard_count": 2}, "UNIMPLEMENTED"),
        ({"epoch": 0}, "INVALID_ARGUMENT"),
        ({"kv_block_size": 0}, "INVALID_ARGUMENT"),
        ({"max_step_tokens": 0}, "INVALID_ARGUMENT"),
        ({"layer_end": LAYERS + 1}, "INVALID_ARGUMENT"),
        ({"num_kv_blocks": 1 << 31}, "RESOURCE_EXHAUSTED"),
    ],
)
def test_loads_that_cannot_be(server: Server, changes: dict[str, int], code: str) -> None:
    with refused(code):
        server.load(**changes)
    assert server.epoch() == 0
    server.load()


def test_no_unload_while_a_load_is_under_way(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would succeed, and then the load would leave a model behind."""
    monkeypatch.setattr("stage.service._UNLOAD_WAIT_S", 0.1)
    server.gate.open.clear()
    server.gate.reached.clear()
    loading = server.stub.Load(server.request(), timeout=TIMEOUT_S)
    assert server.gate.reached.wait(TIMEOUT_S)
    with pytest.raises(grpc.RpcError) as caught:
        server.stub.Unload(stage_pb2.UnloadRequest(), timeout=TIMEOUT_S)
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    server.gate.open.set()
    assert any(response.loaded for response in loading)
    server.stub.Unload(stage_pb2.UnloadRequest(), timeout=TIMEOUT_S)
    assert server.epoch() == 0


def test_one_load_at_a_time(server: Server) -> None:
    server.gate.reached.clear()
    server.gate.open.clear()
    request = server.request()
    call = server.stub.Load(request, timeout=TIMEOUT_S)
    assert server.gate.reached.wait(TIMEOUT_S)
    with refused("FAILED_PRECONDITION", "is loading a model already"):
        server.load()
    server.gate.open.set()
    assert any(response.loaded for response in call)
    assert server.epoch() == request.epoch


def test_no_measurement_while_a_load_is_under_way_and_no_load_while_measuring(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would spoil the other: the memory that is free, and the times."""
    monkeypatch.setattr("stage.service._LOAD_WAIT_S", 0.1)
    monkeypatch.setattr(profiler, "_EVICT_BYTES", 1 << 20)
    measure = stage_pb2.ProfileRequest(model_path=str(server.model))
    for first, second, work in (
        (lambda: server.stub.Profile.future(measure, timeout=TIMEOUT_S), server.load, "measuring"),
        (lambda: server.stub.Load(server.request(), timeout=TIMEOUT_S),
         lambda: server.stub.Profile(measure, timeout=TIMEOUT_S), "loading"),
    ):  # fmt: skip
        server.gate.reached.clear()
        server.gate.open.clear()
        under_way = first()
        assert server.gate.reached.wait(TIMEOUT_S)
        with refused("FAILED_PRECONDITION", f"stage tested is {work} a model already"):
            second()
        server.gate.open.set()
        if work == "measuring":
            assert under_way.result().num_layers == LAYERS
        else:
            assert any(response.loaded for response in under_way)


def test_what_nobody_will_execute_is_let_go(server: Server) -> None:
    """A coordinator that dies between Load and Execute takes its streams along."""
    epoch = server.load()
    time.sleep(1.2)  # longer than the stage takes to look whether its caller is there
    assert server.epoch() == epoch
    server.held.cancel()
    server.wait_epoch(0)


def test_what_is_executed_needs_no_load_to_hold_it(
    server: Server, execute: Callable[[int], Execution]
) -> None:
    epoch = server.load()
    execution = execute(epoch)
    execution.run(steps.prompt_step(1, 3, PROMPT, [0]))
    assert list(server.held) == []  # the stream has ended
    time.sleep(0.6)
    assert server.epoch() == epoch
    assert len(execution.run(steps.decode_step(2, 3, len(PROMPT)))) == 1


def test_a_cancelled_load_leaves_the_stage_able_to_load(server: Server) -> None:
    server.gate.reached.clear()
    server.gate.open.clear()
    call = server.stub.Load(server.request(), timeout=TIMEOUT_S)
    assert server.gate.reached.wait(TIMEOUT_S)
    call.cancel()
    time.sleep(1.2)  # longer than the stage takes to look whether its caller is there
    server.gate.prepared = 0
    server.gate.open.set()
    deadline = time.monotonic() + TIMEOUT_S
    while server.service._device_lock.locked() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server.gate.prepared == 1  # the one it was at
    assert server.epoch() == 0
    epoch = server.load()
    assert server.epoch() == epoch


# --- health and reflection ----------------------------------------------------------------------------------


def test_health_and_reflection_answer(server: Server) -> None:
    health = health_pb2_grpc.HealthStub(server.channel)
    request = health_pb2.HealthCheckRequest(service=SERVICE)
    for ready, status in ((True, "SERVING"), (False, "NOT_SERVING")):
        server.health.set(SERVICE, rpc.serving(ready))
        answer = health.Check(request, timeout=TIMEOUT_S).status
        assert health_pb2.HealthCheckResponse.ServingStatus.Name(answer) == status
    reflection = reflection_pb2_grpc.ServerReflectionStub(server.channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = reflection.ServerReflectionInfo(iter([asked]), timeout=TIMEOUT_S)
    names = {service.name for service in answer.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names


def test_idle_reflection_leaves_workers(server: Server) -> None:
    end = threading.Event()

    def silent() -> Iterator[Any]:
        end.wait(TIMEOUT_S)
        yield from ()

    reflection = reflection_pb2_grpc.ServerReflectionStub(server.channel)
    count = daemon._WORKERS + 8
    idle = [reflection.ServerReflectionInfo(silent(), timeout=TIMEOUT_S) for _ in range(count)]
    refused_calls = queue.SimpleQueue[str]()
    for call in idle:
        call.add_done_callback(lambda done: refused_calls.put(done.code().name))
    try:
        for _ in range(count - 8):
            assert refused_calls.get(timeout=TIMEOUT_S) == "RESOURCE_EXHAUSTED"
        server.stub.Describe(stage_pb2.DescribeRequest(), timeout=5)
        server.load()
    finally:
        end.set()
        for call in idle:
            call.cancel()
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    deadline = time.monotonic() + TIMEOUT_S
    while True:  # the places are free again, soon
        try:
            (answer,) = reflection.ServerReflectionInfo(iter([asked]), timeout=TIMEOUT_S)
            break
        except grpc.RpcError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert answer.list_services_response.service


def test_health_watches_take_no_workers(server: Server) -> None:
    """More of them than the server has threads, and still it answers and loads."""
    health = health_pb2_grpc.HealthStub(server.channel)
    request = health_pb2.HealthCheckRequest(service=SERVICE)
    watches = [health.Watch(request, timeout=60) for _ in range(daemon._WORKERS + 4)]
    try:
        for watch in watches:
            next(watch)
        server.stub.Describe(stage_pb2.DescribeRequest(), timeout=5)
        server.load()
        server.health.set(SERVICE, rpc.serving(True))
        assert all(next(watch).status == health_pb2.HealthCheckResponse.SERVING for watch in watches)
    finally:
        for watch in watches:
            watch.cancel()
