"""What happens when daemons are stopped, killed or frozen, and what a bad start says."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from client import Client
from client.events import Finished
from common import rpc
from common.errors import NotReadyError, OutOfCapacityError, PipeLLMError, UnavailableError
from protos import coordinator_pb2, coordinator_pb2_grpc
from tests.e2e.daemons import Daemon, Mesh
from tests.gguf_files import write_tiny_llama

PROMPT = "Once upon a time"


class Waiting:
    """A client in its own thread, waiting for a long answer; how it ended and when."""

    def __init__(self, address: str, max_tokens: int | None) -> None:
        self.error: PipeLLMError | None = None
        self.finished: Finished | None = None
        self.started = threading.Event()
        self.ended_at = 0.0
        self._address = address
        self._max_tokens = max_tokens
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with Client(self._address) as client:
                for event in client.generate(
                    PROMPT, max_tokens=self._max_tokens, ignore_eos=True, timeout_s=60
                ):
                    self.started.set()
                    if isinstance(event, Finished):
                        self.finished = event
        except PipeLLMError as error:
            self.error = error
        self.ended_at = time.monotonic()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


def waiting_clients(mesh: Mesh, count: int, max_tokens: int | None = None) -> list[Waiting]:
    clients = [Waiting(mesh.address, max_tokens) for _ in range(count)]
    for client in clients:
        assert client.started.wait(20)
    return clients


@pytest.fixture
def long_model(tmp_path):
    """Answers long enough that what is done to the mesh meets them running."""
    return write_tiny_llama(tmp_path / "long.gguf", layers=6, context=20_000)


def answers(mesh: Mesh) -> bool:
    return isinstance(list(mesh.client.generate(PROMPT, max_tokens=3, timeout_s=20))[-1], Finished)


def test_a_killed_stage_fails_its_clients_within_five_seconds_and_serves_again(tmp_path, long_model):
    with Mesh(tmp_path, long_model, 2) as mesh:
        clients = waiting_clients(mesh, 4)
        mesh.stages["s1"].signal(signal.SIGKILL)
        killed_at = time.monotonic()
        for client in clients:
            client.join()
            assert isinstance(client.error, UnavailableError)
            assert str(client.error).startswith("stage 's1' was lost: it ")
            assert client.ended_at - killed_at < 5
        mesh.wait(lambda: mesh.client.status(timeout_s=5).state != "ready", "the loss to show", 5)
        with pytest.raises(UnavailableError, match="s1"):
            list(mesh.client.generate(PROMPT, timeout_s=5))
        mesh.start_stage("s1")
        mesh.wait_ready()
        assert answers(mesh)


def test_a_frozen_stage_is_found_by_its_lease(tmp_path, long_model):
    with Mesh(tmp_path, long_model, 2, "--lease-s", "1.5") as mesh:
        clients = waiting_clients(mesh, 2)
        mesh.stages["s0"].signal(signal.SIGSTOP)
        frozen_at = time.monotonic()
        for client in clients:
            client.join()
            assert isinstance(client.error, UnavailableError) and "lease" in str(client.error)
            assert client.ended_at - frozen_at < 5
        lost = {stage.stage_id: stage for stage in mesh.client.status(timeout_s=5).stages}["s0"]
        assert lost.state == "lost" and "lease" in lost.detail
        mesh.stages["s0"].signal(signal.SIGCONT)
        mesh.wait_ready()
        assert answers(mesh)


def test_sigterm_under_load_ends_requests_with_a_clear_status(tmp_path, long_model):
    with Mesh(tmp_path, long_model, 2, "--drain-s", "0.5") as mesh:
        clients = waiting_clients(mesh, 3)
        assert mesh.coordinator.stop() == 0
        for client in clients:
            client.join()
            assert isinstance(client.error, UnavailableError) and "shutting down" in str(client.error)
        for stage in mesh.stages.values():
            assert stage.stop() == 0


def test_a_stopping_coordinator_lets_short_requests_finish(tmp_path, tiny_model):
    with Mesh(tmp_path, tiny_model, 1) as mesh:
        clients = waiting_clients(mesh, 2, max_tokens=200)
        assert mesh.coordinator.stop() == 0
        for client in clients:
            client.join()
            assert client.error is None and client.finished is not None


def test_a_stage_that_leaves_lets_requests_finish_and_the_others_take_over(tmp_path, tiny_model):
    with Mesh(tmp_path, tiny_model, 2) as mesh:
        clients = waiting_clients(mesh, 2, max_tokens=200)
        assert mesh.stages["s1"].stop() == 0
        for client in clients:
            client.join()
            assert client.error is None and client.finished is not None
        mesh.start_stage("s2")
        mesh.wait_ready()
        assert answers(mesh)


def test_a_restarted_coordinator_finds_its_stages_again(tmp_path, tiny_model):
    with Mesh(tmp_path, tiny_model, 2) as mesh:
        mesh.coordinator.signal(signal.SIGKILL)
        mesh.coordinator.wait()
        mesh.start_coordinator()
        mesh.wait_ready()
        assert answers(mesh)


def test_load_and_unload_by_hand(tmp_path, tiny_model):
    with Mesh(tmp_path, tiny_model, 1) as mesh:
        mesh.client.unload_model()
        with pytest.raises(NotReadyError, match="no model is loaded"):
            list(mesh.client.generate(PROMPT))
        events = list(mesh.client.load_model(tiny_model.stem, context_length=128))
        assert events[-1].loaded and events[-1].context_length == 128
        assert answers(mesh)


def test_stages_whose_files_differ_are_refused(tmp_path, tiny_model):
    other = tmp_path / "other"
    other.mkdir()
    write_tiny_llama(other / tiny_model.name, layers=5, context=512)
    mesh = Mesh(tmp_path, tiny_model, 2)
    mesh.start_coordinator()
    mesh.start_stage("s0")
    mesh.start_stage("s1", "--model-dir", str(other))
    try:
        refusal = "not the coordinator's file"
        mesh.wait(lambda: refusal in mesh.client.status(timeout_s=5).state, "the refusal")
        with pytest.raises(UnavailableError, match="copy the same file"):
            list(mesh.client.generate(PROMPT, timeout_s=10))
    finally:
        mesh.__exit__()


def test_a_model_that_does_not_fit_says_both_numbers(tmp_path, tiny_model):
    mesh = Mesh(tmp_path, tiny_model, 1)
    mesh._flags = ["--model-dir", str(tiny_model.parent)]
    mesh.start_coordinator()
    mesh.start_stage("s0", "--memory", "100000")
    try:
        mesh.wait(lambda: len(mesh.client.status(timeout_s=5).stages) == 1, "the stage")
        with pytest.raises(OutOfCapacityError, match=r"\d.*\d"):
            list(mesh.client.load_model(tiny_model.stem))
    finally:
        mesh.__exit__()


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        ("coordinator", ["--config", "{tmp}/bad.toml"], "unknown key 'colour'"),
        ("stage", ["--config", "{tmp}/bad.toml"], "unknown key 'colour'"),
        ("coordinator", ["--listen", "nonsense"], "nonsense"),
        ("coordinator", ["--model-dir", "{tmp}/nowhere"], "nowhere"),
        ("coordinator", ["--model-dir", "{tmp}", "--model", "absent"], "no model 'absent'"),
        ("coordinator", ["--max-sequences", "0"], "max_sequences"),
        ("stage", ["--backend", "abacus"], "abacus"),
        ("stage", ["--listen", "0.0.0.0:0"], "--advertise"),
    ],
)
def test_a_bad_start_ends_with_a_sentence(tmp_path, module, arguments, message):
    (tmp_path / "bad.toml").write_text('colour = "red"\n')
    daemon = Daemon(module, [part.format(tmp=tmp_path) for part in arguments], tmp_path / "log")
    assert daemon.wait() in (1, 2)
    said = daemon.log.read_text()
    assert message in said and "Traceback" not in said


@pytest.mark.parametrize("address", ["unix:{tmp}/c.sock", "127.0.0.1:{port}"])
def test_a_second_coordinator_on_the_same_address_is_refused(tmp_path, address):
    address = address.format(tmp=tmp_path, port=_free_port())
    first = Daemon("coordinator", ["--listen", address], tmp_path / "first")
    try:
        with Client(address) as client:
            deadline = time.monotonic() + 20
            while not client.is_running(timeout_s=1.0) and time.monotonic() < deadline:
                time.sleep(0.05)
            second = Daemon("coordinator", ["--listen", address], tmp_path / "second")
            assert second.wait() == 2
            assert "cannot listen on" in second.log.read_text()
            assert client.is_running()
    finally:
        assert first.stop() == 0


def test_a_stage_of_another_protocol_version_is_refused(tmp_path):
    address = f"unix:{tmp_path}/c.sock"
    coordinator = Daemon("coordinator", ["--listen", address], tmp_path / "log")
    try:
        with rpc.dial(address) as channel:
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            request = coordinator_pb2.RegisterStageRequest(
                stage_id="old", instance_id="1", address="127.0.0.1:1", protocol_version=999
            )
            with pytest.raises(rpc.grpc.RpcError) as refused:
                stub.RegisterStage(request, timeout=20, wait_for_ready=True)
        assert refused.value.code().name == "FAILED_PRECONDITION"
        assert "version 999" in refused.value.details()
    finally:
        coordinator.stop()


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
