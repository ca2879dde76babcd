"""Both carriers over real sockets: order, self-test, damage, and what happens when an end goes away."""

from __future__ import annotations

import fcntl
import os
import queue
import resource
import socket
import struct
import threading
import time
import uuid
from dataclasses import replace

import numpy as np
import pytest

from common import rpc
from common.errors import PipeLLMError, UnavailableError
from common.wire import Frame, FrameKind
from protos import stage_pb2, stage_pb2_grpc
from stage.links import grpc_link, shm_link
from stage.links.connect import connect
from stage.links.grpc_link import GrpcLink
from stage.links.shm_link import ShmLink, ShmListener

TIMEOUT_S = 10


class Receiver(stage_pb2_grpc.StageServiceServicer):
    """A process's two receiving halves, with what arrived and why a link ended."""

    def __init__(self, address: str) -> None:
        self.instance_id = uuid.uuid4().hex
        self.frames: queue.Queue[Frame] = queue.Queue()
        self.refuse: PipeLLMError | None = None
        self.shm = ShmListener(self.instance_id, self.accept)
        self.server, _ = rpc.make_server("pipellm.v1.StageService", 4)
        stage_pb2_grpc.add_StageServiceServicer_to_server(self, self.server)
        self.address = rpc.listen(self.server, address)
        self.server.start()

    def accept(self, frame: Frame) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.frames.put(frame)

    def StreamFrames(self, request_iterator, context):
        yield from grpc_link.serve(request_iterator, self.accept)

    def close(self) -> None:
        self.shm.close()
        self.server.stop(0).wait()


@pytest.fixture
def receiver(tmp_path):
    end = Receiver(f"unix:{tmp_path}/r.sock")
    yield end
    end.close()


@pytest.fixture(params=["grpc", "shm"])
def make_link(request, receiver):
    made = []

    def make(on_broken=lambda error: None):
        if request.param == "grpc":
            link = GrpcLink(receiver.address, 1, 2, on_broken)
        else:
            link = ShmLink(receiver.instance_id, 1, 2, 3_000_000, on_broken)
        made.append(link)
        return link

    yield make
    for link in made:
        link.close()


def hidden(rows: int, step_id: int = 1) -> Frame:
    payload = np.random.default_rng(step_id).standard_normal((rows, 576)).astype(np.float32)
    return Frame(FrameKind.HIDDEN_STATES, 1, step_id, 0, payload)


def test_frames_arrive_whole_and_in_order(make_link, receiver):
    link = make_link()
    assert link.round_trip_s > 0
    sent = [hidden(1 + 97 * (index % 13), index) for index in range(120)]
    for frame in sent:
        link.send(frame)
    for frame in sent:
        got = receiver.frames.get(timeout=TIMEOUT_S)
        assert (got.kind, got.epoch, got.step_id, got.window) == (frame.kind, 1, frame.step_id, 2)
        assert got.payload.tobytes() == frame.payload.tobytes()


def test_a_sender_that_waits_for_room_gets_it(receiver, monkeypatch):
    monkeypatch.setattr(shm_link, "_TIMEOUT_S", 3.0)
    largest = 2_000_000
    sizes = np.random.default_rng(1).choice([1, 1000, 60_000, 170_000, 450_000, largest], 300)
    link = ShmLink(receiver.instance_id, 1, 2, largest, lambda error: None)
    try:
        for number, size in enumerate(sizes):
            payload = np.full((1, size), number % 251, np.uint8)
            link.send(Frame(FrameKind.HIDDEN_STATES, 1, number, 0, payload))
        for number, size in enumerate(sizes):
            frame = receiver.frames.get(timeout=TIMEOUT_S)
            assert frame.step_id == number and frame.payload.shape == (1, size)
            assert (frame.payload == number % 251).all()
    finally:
        link.close()


def test_a_receiver_that_goes_away_is_told_once(make_link, receiver):
    broken: queue.Queue[PipeLLMError] = queue.Queue()
    make_link(broken.put)
    receiver.close()
    assert isinstance(broken.get(timeout=TIMEOUT_S), UnavailableError)
    assert broken.empty()


def test_a_refused_frame_breaks_the_link(make_link, receiver):
    broken: queue.Queue[PipeLLMError] = queue.Queue()
    link = make_link(broken.put)
    receiver.refuse = UnavailableError("no such epoch here")
    link.send(hidden(1))
    assert isinstance(broken.get(timeout=TIMEOUT_S), PipeLLMError)


def test_closing_is_quiet_and_leaves_no_thread(make_link):
    before = threading.active_count()
    broken: queue.Queue[PipeLLMError] = queue.Queue()
    link = make_link(broken.put)
    link.close()
    link.close()
    assert broken.empty()
    assert threading.active_count() <= before + 2  # the receiver's own handler may still be ending


def test_an_absent_peer_is_an_error_and_not_a_wait(tmp_path):
    with pytest.raises(UnavailableError):
        ShmLink("nobody", 1, 0, 1000, lambda error: None)


def test_the_fastest_carrier_that_works_is_taken(receiver):
    request = stage_pb2.AttachLinkRequest(
        epoch=1, next_address=receiver.address, next_instance_id=receiver.instance_id, next_boot_id="here"
    )
    for boot_id, instance_id, wanted, carrier in (
        ("here", receiver.instance_id, "auto", "shm"),
        ("here", receiver.instance_id, "grpc", "grpc"),
        ("elsewhere", receiver.instance_id, "auto", "grpc"),
        ("here", "nobody", "auto", "grpc"),
    ):
        request.next_instance_id = instance_id
        link = connect(request, boot_id, wanted, 1000, lambda error: None)
        assert link.carrier == carrier
        link.send(replace(hidden(1), payload=np.zeros((1, 3), np.float32)))
        assert receiver.frames.get(timeout=TIMEOUT_S).payload.shape == (1, 3)
        link.close()


def test_a_carrier_asked_for_is_not_replaced(receiver):
    request = stage_pb2.AttachLinkRequest(next_address=receiver.address, next_instance_id="nobody")
    with pytest.raises(UnavailableError, match="shared-memory"):
        connect(request, "here", "shm", 1000, lambda error: None)


# --- shared memory: peers that mean harm --------------------------------------------------------------------


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def wait_until(condition) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def make_ring(size: int = 4096, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    descriptor = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def offer(receiver, hello: bytes, *descriptors: int) -> socket.socket:
    """Says `hello` as a sender would; closes the descriptors here."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.settimeout(TIMEOUT_S)
    peer.connect(shm_link._socket_name(receiver.instance_id))
    socket.send_fds(peer, [hello], descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    return peer


@pytest.mark.parametrize(
    ("hello", "size", "seals"),
    [
        (b"\1\2\3", 4096, fcntl.F_SEAL_SHRINK),
        (struct.pack("<Q", 4096) + b"\0", 4096, fcntl.F_SEAL_SHRINK),
        (struct.pack("<Q", 0), 0, fcntl.F_SEAL_SHRINK),
        (struct.pack("<Q", 1 << 63), 4096, fcntl.F_SEAL_SHRINK),
        (struct.pack("<Q", 4096), 4096, fcntl.F_SEAL_GROW),  # a ring that can shrink is SIGBUS in waiting
    ],
    ids=["short", "long", "empty ring", "another size", "can shrink"],
)
def test_bad_rings_are_refused_and_leave_no_descriptor(receiver, monkeypatch, hello, size, seals):
    died = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    before = open_descriptors()
    for _ in range(10):
        with offer(receiver, hello, make_ring(size, seals), make_ring(size, seals)) as peer:
            assert peer.recv(1) == b""
    wait_until(lambda: open_descriptors() <= before)
    assert not died
    ShmLink(receiver.instance_id, 1, 2, 1000, lambda error: None).close()


def test_the_senders_ring_cannot_change_its_size(monkeypatch, receiver):
    kept = []
    monkeypatch.setattr(shm_link.os, "close", kept.append)
    link = ShmLink(receiver.instance_id, 1, 2, 1000, lambda error: None)
    monkeypatch.undo()
    with pytest.raises(PermissionError):
        os.ftruncate(kept[0], 10)
    for descriptor in set(kept):
        os.close(descriptor)
    link.close()


def test_the_listener_outlives_a_lack_of_descriptors(receiver):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    peers = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), hard))
        filled = []
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                filled.append(os.dup(0))
        for peer in peers:
            peer.connect(shm_link._socket_name(receiver.instance_id))
        time.sleep(0.1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in filled:
            os.close(descriptor)
    ShmLink(receiver.instance_id, 1, 2, 1000, lambda error: None).close()
    for peer in peers:
        peer.close()


def test_connections_are_counted(receiver):
    peers = []
    for _ in range(shm_link._MAX_CONNECTIONS):
        peers.append(offer(receiver, struct.pack("<Q", 4096), make_ring()))
    wait_until(lambda: len(receiver.shm._connections) == len(peers))
    with pytest.raises(UnavailableError):
        ShmLink(receiver.instance_id, 1, 2, 1000, lambda error: None)
    peers.pop().close()
    wait_until(lambda: len(receiver.shm._connections) == len(peers))
    ShmLink(receiver.instance_id, 1, 2, 1000, lambda error: None).close()
    for peer in peers:
        peer.close()
