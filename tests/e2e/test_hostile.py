"""A mesh that serves goes on serving, whatever is sent to it or registers with it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from client import Client
from client.events import Finished
from common import rpc
from common.errors import InvalidRequestError, PipeLLMError, UnavailableError, UnknownModelError
from protos import coordinator_pb2, coordinator_pb2_grpc, stage_pb2, stage_pb2_grpc
from tests.e2e.daemons import Mesh


def answers(mesh: Mesh) -> bool:
    return isinstance(list(mesh.client.generate("hi", max_tokens=2, timeout_s=20))[-1], Finished)


@pytest.fixture
def stub(mesh: Mesh):
    with rpc.dial(mesh.address) as channel:
        yield coordinator_pb2_grpc.CoordinatorServiceStub(channel)


def test_a_huge_prompt_is_refused_before_it_is_cut_into_tokens(mesh: Mesh):
    started = time.monotonic()
    with pytest.raises(InvalidRequestError, match=r"60000000 bytes.*512 tokens"):
        list(mesh.client.generate("a" * 60_000_000, timeout_s=60))
    with pytest.raises(InvalidRequestError, match=r"5000000 tokens.*512 tokens"):
        list(mesh.client.generate([5] * 5_000_000, timeout_s=60))
    assert time.monotonic() - started < 20
    assert answers(mesh)


def test_text_work_has_a_bound_and_what_waits_goes_with_its_caller(mesh: Mesh):
    with pytest.raises(InvalidRequestError, match="at most 1000000"):
        mesh.client.detokenize([5] * 1_000_001)

    def ask(_: int) -> None:
        with Client(mesh.address) as client, pytest.raises(PipeLLMError):
            client.detokenize([5] * 1_000_000, timeout_s=0.3)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(ask, range(12)))
    started = time.monotonic()
    assert answers(mesh)
    assert time.monotonic() - started < 15


def test_bytes_that_are_no_message_are_an_invalid_argument(mesh: Mesh):
    with rpc.dial(mesh.address) as channel:
        call = channel.unary_stream("/pipellm.v1.CoordinatorService/Generate")
        with pytest.raises(grpc.RpcError) as refused:
            list(call(b"\x12\x03\xff\xfe\x80", timeout=10))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_a_very_long_name_is_refused_with_its_own_status(mesh: Mesh):
    with pytest.raises(UnknownModelError, match="no model"):
        list(mesh.client.generate("hi", model="x" * 1_000_000))
    with pytest.raises(InvalidRequestError, match="unknown role"):
        list(mesh.client.chat([{"role": "x" * 1_000_000, "content": "hi"}]))


def test_deeply_nested_tools_are_an_invalid_argument(stub):
    request = coordinator_pb2.ChatRequest(tools_json="[" * 100_000)
    request.messages.add(role="user", content="hi")
    with pytest.raises(grpc.RpcError) as refused:
        list(stub.Chat(request, timeout=20))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"address": "127.0.0.1:1"}, grpc.StatusCode.UNAVAILABLE),
        ({"address": "127.0.0.1:0"}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"stage_id": "evil\n\x1b[31m"}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"stage_id": "x" * 1000}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"stage_id": ""}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
    ids=["unreachable", "port 0", "unprintable", "too long", "empty"],
)
def test_what_is_no_stage_is_not_admitted(mesh: Mesh, stub, changes, code):
    fields = {"stage_id": "ghost", "instance_id": "g", "address": "127.0.0.1:2"} | changes
    request = coordinator_pb2.RegisterStageRequest(protocol_version=rpc.PROTOCOL_VERSION, **fields)
    with pytest.raises(grpc.RpcError) as refused:
        stub.RegisterStage(request, timeout=10)
    assert refused.value.code() == code
    assert len(mesh.client.status(timeout_s=5).stages) == 2


class Sleeper(stage_pb2_grpc.StageServiceServicer):
    """A stage that does all that is asked of it at load, answers the canary, and then works no more."""

    def Describe(self, request, context):
        return stage_pb2.DescribeResponse(stage_id="sleeper", instance_id="z")

    def Profile(self, request, context):
        return stage_pb2.ProfileResponse(
            fingerprint=request.fingerprint, num_layers=6, context_length=512, layer_decode_s=1e-4,
            head_s=1e-4, embedding_s=1e-5, layer_weight_bytes=[1000] * 6, layer_kv_bytes_per_token=[64] * 6,
            embedding_bytes=1000, head_bytes=1000, memory_budget_bytes=1 << 30,
        )  # fmt: skip

    def Load(self, request, context):
        yield stage_pb2.LoadResponse(loaded=True)

    def Unload(self, request, context):
        return stage_pb2.UnloadResponse()

    def Execute(self, requests, context):
        canary = next(step for request in requests for step in request.steps)
        item = canary.items[0]
        response = stage_pb2.ExecuteResponse(acknowledged_steps=[canary.step_id])
        result = response.results.add(step_id=canary.step_id)
        result.tokens.add(
            sequence_id=item.sequence_id, position=item.start_position + item.num_tokens, token_id=5
        )
        yield response
        for request in requests:
            for step in request.steps:
                if not step.items:  # the canary's free
                    yield stage_pb2.ExecuteResponse(acknowledged_steps=[step.step_id])


def test_a_stage_that_lives_but_works_no_more_is_found(tmp_path, tiny_model):
    server, _ = rpc.make_server("pipellm.v1.StageService", 8)
    stage_pb2_grpc.add_StageServiceServicer_to_server(Sleeper(), server)
    address = rpc.listen(server, f"unix:{tmp_path}/z.sock")
    server.start()
    mesh = Mesh(tmp_path, tiny_model, 1, "--step-timeout-s", "2", "--lease-s", "60")
    mesh.start_coordinator()
    try:
        with rpc.dial(mesh.address) as channel:
            request = coordinator_pb2.RegisterStageRequest(
                stage_id="sleeper", instance_id="z", address=address, protocol_version=rpc.PROTOCOL_VERSION
            )
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            stub.RegisterStage(request, timeout=30, wait_for_ready=True)
            mesh.wait_ready()
            with pytest.raises(UnavailableError, match=r"'sleeper'.*has not finished step \d+ within 2 s"):
                list(mesh.client.generate("hi", timeout_s=30))
    finally:
        mesh.__exit__()
        server.stop(0).wait()
