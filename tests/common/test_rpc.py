"""Addresses, ports, and errors that cross the wire: raised in a real server, caught as the same class."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from common import errors, rpc
from protos import stage_pb2

TIMEOUT_S = 10
SERVICE = "test.Faulty"
TEXT = "blk.0.attn_q at byte 17: größer als erlaubt"  # beyond ASCII, as paths are
SECRET = "a line of the source that nobody else needs to see"

# What a caller catches for each class that a daemon raises.
CAUGHT = {
    errors.InvalidRequestError: errors.InvalidRequestError,
    errors.ConfigError: errors.InvalidRequestError,
    errors.UnknownModelError: errors.UnknownModelError,
    errors.NotReadyError: errors.NotReadyError,
    errors.UnsupportedVersionError: errors.NotReadyError,
    errors.OutOfCapacityError: errors.OutOfCapacityError,
    errors.UnavailableError: errors.UnavailableError,
    errors.DeviceLostError: errors.UnavailableError,
    errors.UnsupportedModelError: errors.UnsupportedModelError,
    errors.CorruptDataError: errors.CorruptDataError,
    errors.DeadlineError: errors.DeadlineError,
    errors.CancelledError: errors.CancelledError,
}
INTERNAL = {
    "base": errors.PipeLLMError(SECRET),
    "foreign": KeyError(SECRET),
    "assertion": AssertionError(SECRET),
}


def error_named(name: str) -> Exception:
    return INTERNAL[name] if name in INTERNAL else getattr(errors, name)(TEXT)


# --- two servers whose methods fail as they are asked to ----------------------------------------------------


def _unary(request: bytes, context: Any) -> bytes:
    raise error_named(request.decode())


def _stream(request: bytes, context: Any) -> Iterator[bytes]:
    yield b"first"
    raise error_named(request.decode())


async def _async_unary(request: bytes, context: Any) -> bytes:
    raise error_named(request.decode())


async def _async_stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
    yield b"first"
    raise error_named(request.decode())


async def _async_echo(request: stage_pb2.LoadRequest, context: Any) -> stage_pb2.LoadRequest:
    return request


def handlers(unary: Any, stream: Any, echo: Any) -> grpc.GenericRpcHandler:
    message = stage_pb2.LoadRequest
    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            "Unary": grpc.unary_unary_rpc_method_handler(unary),
            "Stream": grpc.unary_stream_rpc_method_handler(stream),
            "Echo": grpc.unary_unary_rpc_method_handler(echo, message.FromString, message.SerializeToString),
        },
    )


@pytest.fixture(scope="module")
def sync_server() -> Iterator[str]:
    server, _ = rpc.make_server(SERVICE, 4)
    server.add_generic_rpc_handlers((handlers(_unary, _stream, lambda request, _: request),))
    address = rpc.listen(server, "127.0.0.1:0")
    server.start()
    yield address
    server.stop(0).wait()


@pytest.fixture(scope="module")
def async_server() -> Iterator[str]:
    """On an event loop in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> tuple[grpc.aio.Server, str]:
        server, _ = rpc.make_async_server(SERVICE)
        server.add_generic_rpc_handlers((handlers(_async_unary, _async_stream, _async_echo),))
        address = rpc.listen(server, "127.0.0.1:0")
        await server.start()
        return server, address

    server, address = asyncio.run_coroutine_threadsafe(start(), loop).result(TIMEOUT_S)
    yield address
    asyncio.run_coroutine_threadsafe(server.stop(0), loop).result(TIMEOUT_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(TIMEOUT_S)
    loop.close()


@pytest.fixture(params=["sync", "async"])
def channel(request: pytest.FixtureRequest) -> Iterator[grpc.Channel]:
    with rpc.dial(request.getfixturevalue(f"{request.param}_server")) as dialled:
        yield dialled


Fail = Callable[[str], grpc.RpcError]


@pytest.fixture(params=["unary", "stream"])
def fail(request: pytest.FixtureRequest, channel: grpc.Channel) -> Fail:
    """Calls a method that fails by the named error, and returns how the call ended."""

    def call(name: str) -> grpc.RpcError:
        with pytest.raises(grpc.RpcError) as caught:
            if request.param == "unary":
                channel.unary_unary(f"/{SERVICE}/Unary")(name.encode(), timeout=TIMEOUT_S)
            else:
                responses = channel.unary_stream(f"/{SERVICE}/Stream")(name.encode(), timeout=TIMEOUT_S)
                assert next(responses) == b"first"
                next(responses)
        return caught.value

    return call


# --- errors on the wire -------------------------------------------------------------------------------------


def test_the_table_names_every_class() -> None:
    def below(cls: type[errors.PipeLLMError]) -> Iterator[type[errors.PipeLLMError]]:
        for subclass in cls.__subclasses__():
            if subclass.__module__ == errors.__name__:
                yield subclass
                yield from below(subclass)

    assert set(below(errors.PipeLLMError)) == set(CAUGHT)


def test_every_class_comes_back_with_its_words(fail: Fail) -> None:
    for raised, caught in CAUGHT.items():
        error = rpc.from_rpc_error(fail(raised.__name__), "the peer")
        assert type(error) is caught, raised
        assert str(error) == TEXT, raised


@pytest.mark.parametrize("name", INTERNAL)
def test_an_internal_fault_keeps_its_text_to_itself(fail: Fail, name: str) -> None:
    failed = fail(name)
    assert failed.code() == grpc.StatusCode.INTERNAL
    assert type(INTERNAL[name]).__name__ in failed.details() and "log" in failed.details()
    status = rpc.rpc_status_of(failed)
    assert status is not None
    assert SECRET not in failed.details() and SECRET not in str(status)
    assert type(rpc.from_rpc_error(failed, "the peer")) is errors.PipeLLMError


def test_only_unavailable_says_when_to_try_again(fail: Fail) -> None:
    status = rpc.rpc_status_of(fail("UnavailableError"))
    assert status is not None and len(status.details) == 1
    retry = error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(retry)
    assert retry.retry_delay.ToTimedelta().total_seconds() == rpc.RETRY_DELAY_S > 0
    other = rpc.rpc_status_of(fail("NotReadyError"))
    assert other is not None and not other.details


def test_an_unreachable_peer_is_named(tmp_path: Path) -> None:
    with rpc.dial(f"unix:{tmp_path}/nobody.sock") as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/x/Y")(b"", timeout=TIMEOUT_S)
        error = rpc.from_rpc_error(caught.value, "stage 'a'")
    assert type(error) is errors.UnavailableError
    assert str(error).startswith("stage 'a' cannot be reached")


def test_a_deadline_names_the_peer() -> None:
    mute = socket.create_server(("127.0.0.1", 0))  # takes connections and says nothing
    with mute, rpc.dial(f"127.0.0.1:{mute.getsockname()[1]}") as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/x/Y")(b"", timeout=0.2, wait_for_ready=True)
        error = rpc.from_rpc_error(caught.value, "stage 'a'")
    assert type(error) is errors.DeadlineError
    assert str(error) == "stage 'a' did not answer within the deadline"


def test_an_unknown_method_is_unimplemented(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/{SERVICE}/Absent")(b"", timeout=TIMEOUT_S)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_invalid_utf8_in_a_string_is_refused_and_nothing_else(channel: grpc.Channel) -> None:
    """gRPC refuses it before our code sees it; the server goes on."""
    echo = channel.unary_unary(f"/{SERVICE}/Echo")
    field = stage_pb2.LoadRequest.DESCRIPTOR.fields_by_name["model_path"].number << 3 | 2
    with pytest.raises(grpc.RpcError) as caught:
        echo(bytes([field, 2, 0xC3, 0x28]), timeout=TIMEOUT_S)
    assert caught.value.code().name in ("INVALID_ARGUMENT", "INTERNAL", "UNKNOWN")
    assert "Traceback" not in caught.value.details()
    valid = bytes([field, 2]) + "é".encode()
    assert echo(valid, timeout=TIMEOUT_S) == valid


# --- addresses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address", ["127.0.0.1:7070", "localhost:0", "my_host-1.lan:65535", "[::1]:80", "unix:/tmp/a b.sock"]
)
def test_addresses_that_can_be_dialled(address: str) -> None:
    assert rpc.check_address(address) == address


@pytest.mark.parametrize(
    "address",
    [
        "", "localhost", ":80", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1:80x", "::1:80",
        "[localhost]:80", "http://localhost:80", "a b:80", "a:80\n", "unix:", "unix:relative.sock",
        "unix:/" + "a" * 107, "unix:/" + "é" * 54,
    ],
)  # fmt: skip
def test_addresses_that_cannot(address: str) -> None:
    for check in (rpc.check_address, rpc.dial):
        with pytest.raises(errors.InvalidRequestError) as caught:
            check(address)
        assert repr(address) in str(caught.value)


def test_port_0_becomes_a_port_that_can_be_dialled(sync_server: str) -> None:
    host, _, port = sync_server.rpartition(":")
    assert host == "127.0.0.1" and int(port) > 0
    socket.create_connection((host, int(port)), TIMEOUT_S).close()


def make_async() -> grpc.aio.Server:
    return rpc.make_async_server(SERVICE)[0]


def make_sync() -> grpc.Server:
    return rpc.make_server(SERVICE, 1)[0]


async def listen_in_vain(make: Callable[[], Any], address: str) -> str:
    """On a running loop, which an asyncio server needs; what the refusal says."""
    server = make()
    with pytest.raises(errors.ConfigError) as caught:
        rpc.listen(server, address)
    stopped = server.stop(0)
    if asyncio.iscoroutine(stopped):
        await stopped
    return str(caught.value)


@pytest.mark.parametrize("make", [make_sync, make_async])
def test_a_port_in_use_is_refused(make: Callable[[], Any], sync_server: str) -> None:
    said = asyncio.run(listen_in_vain(make, sync_server))
    assert said.startswith(f"cannot listen on {sync_server}: ") and "--listen" in said


@pytest.mark.parametrize("make", [make_sync, make_async])
def test_a_living_daemons_socket_is_not_taken_over(make: Callable[[], Any], tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/d.sock"
    first, _ = rpc.make_server(SERVICE, 4)
    first.add_generic_rpc_handlers((handlers(_unary, _stream, lambda request, _: request),))
    assert rpc.listen(first, address) == address
    first.start()
    said = asyncio.run(listen_in_vain(make, address))
    assert address in said and "another daemon" in said
    with rpc.dial(address) as channel:
        assert channel.unary_unary(f"/{SERVICE}/Echo")(b"", timeout=TIMEOUT_S) == b""
    first.stop(0).wait()


def test_a_dead_daemons_socket_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "d.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    server = make_sync()
    assert rpc.listen(server, f"unix:{path}") == f"unix:{path}"
    server.start()
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(path))
    server.stop(0).wait()
