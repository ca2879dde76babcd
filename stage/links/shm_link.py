"""The link between processes of one host: frames in a shared ring buffer, wake-ups over a local socket.

The sender makes the ring (an anonymous file, so that nothing stays behind whoever dies), connects to the
receiver's socket and hands the ring over. A frame is one copy in and one copy out; the socket carries a note
(start, length) to the receiver and one byte back for each frame taken out, for several frames at a time while
those are few bytes, since every message wakes a thread. Self-test frames (`FrameKind.ECHO`) come back whole,
over the socket.

Linux only: the socket lives in the abstract namespace, under the receiving process's instance id, and admits
processes of the same user.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from common.errors import CorruptDataError, PipeLLMError, UnavailableError
from common.log import get_logger
from common.wire import HEADER_BYTES, Frame, FrameKind
from stage.links.base import OnBroken

_HELLO = struct.Struct("<Q")  # the ring's size
_NOTE = struct.Struct("<QQ")  # start and length of a frame in the ring
_TAKEN = b"\1"
_MAX_TAKEN = 64  # told at a time
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_TIMEOUT_S = 10.0
_MIN_RING_BYTES = 1 << 20
_SELF_TEST_BYTES = (1, 4096, 65_000)
_MAX_CONNECTIONS = 64
_ACCEPT_RETRY_S = 0.2


class ShmLink:
    """The sending half, to the process `instance_id`; `max_payload_bytes` is the most a frame will hold.

    Construction connects and proves the link, or raises UnavailableError (another host, user or network
    namespace, or a system without what it takes) or CorruptDataError (other bytes came back)."""

    carrier = "shm"

    def __init__(
        self, instance_id: str, epoch: int, window: int, max_payload_bytes: int, on_broken: OnBroken
    ) -> None:
        self._window = window
        self._on_broken = on_broken
        self._closed = False
        self._next_number = 0
        # A frame, the padding before it, and what is taken out and not told (the receiver's sixteenth, twice
        # for its padding) never fill the ring, so that a sender that waits for room is always told of it.
        self._size = max(_MIN_RING_BYTES, 5 * (max_payload_bytes + HEADER_BYTES) // 2)
        self._head = 0  # where the next frame starts, if it fits before the end
        self._room = threading.Condition()  # guards what the watcher and the sender both change:
        self._held: deque[int] = deque()  # ring bytes of each frame not yet taken out
        self._free = self._size
        self._broken: PipeLLMError | None = None
        self._connection, self._ring = _offer_ring(instance_id, self._size)
        try:
            self.round_trip_s = self._self_test(epoch)
        except BaseException:
            self._connection.close()
            raise
        self._connection.settimeout(None)
        self._watcher = threading.Thread(target=self._watch, name="link-watcher", daemon=True)
        self._watcher.start()

    def send(self, frame: Frame) -> None:
        data = replace(frame, window=self._window, sequence_number=self._next_number).encode()
        self._next_number += 1
        padding = self._size - self._head if self._head + len(data) > self._size else 0
        with self._room:
            enough = self._room.wait_for(
                lambda: self._broken or self._free >= padding + len(data), timeout=_TIMEOUT_S
            )
            if self._broken:
                raise self._broken
            if not enough:
                raise UnavailableError(f"the next stage took nothing off the link for {_TIMEOUT_S:g} s")
            self._free -= padding + len(data)
            self._held.append(padding + len(data))
        start = (self._head + padding) % self._size
        self._ring[start : start + len(data)] = data
        self._head = start + len(data)
        try:
            self._connection.send(_NOTE.pack(start, len(data)))
        except OSError as error:
            raise UnavailableError(f"the link to the next stage broke: {error}") from error

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):  # the peer may have been faster
            self._connection.shutdown(socket.SHUT_RDWR)
        self._watcher.join(timeout=_TIMEOUT_S)
        self._connection.close()

    def _self_test(self, epoch: int) -> float:
        random = np.random.default_rng()
        self._connection.settimeout(_TIMEOUT_S)
        for size in _SELF_TEST_BYTES:
            payload = random.integers(0, 256, (1, size), dtype=np.uint8)
            started = time.perf_counter()
            self.send(Frame(FrameKind.ECHO, epoch, 0, 0, payload))
            try:
                answer = self._connection.recv(size + HEADER_BYTES + 1)
                self._connection.recv(len(_TAKEN))
            except OSError as error:
                raise UnavailableError(f"the shared-memory link's self-test failed: {error}") from error
            if not answer:
                raise UnavailableError("the next stage refused the shared-memory link")
            if not np.array_equal(Frame.decode(answer).payload, payload):
                raise CorruptDataError("the shared-memory link returned other bytes than were sent")
            self._taken(1)
            if size == _SELF_TEST_BYTES[0]:
                round_trip_s = time.perf_counter() - started
        return round_trip_s

    def _taken(self, frames: int) -> None:
        with self._room:
            for _ in range(frames):
                self._free += self._held.popleft()
            self._room.notify()

    def _watch(self) -> None:
        reason = "the next stage ended the link"
        try:
            while taken := self._connection.recv(_MAX_TAKEN):
                self._taken(len(taken))
        except OSError as error:
            reason = f"the link to the next stage broke: {error}"
        with self._room:
            self._broken = UnavailableError(reason)
            self._room.notify()
        if not self._closed:
            self._on_broken(self._broken)


def _offer_ring(instance_id: str, size: int) -> tuple[socket.socket, mmap.mmap]:
    """A connection to the receiving process, which holds the ring too."""
    connection = None
    try:
        descriptor = os.memfd_create("pipellm-link", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size)
            # The receiver takes no ring that could shrink: touching what is gone would kill its process.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            ring = mmap.mmap(descriptor, size)
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.settimeout(_TIMEOUT_S)
            connection.connect(_socket_name(instance_id))
            socket.send_fds(connection, [_HELLO.pack(size)], [descriptor])
        finally:
            os.close(descriptor)
    except (OSError, AttributeError) as error:
        if connection is not None:
            connection.close()
        raise UnavailableError(f"no shared-memory link to the next stage: {error}") from error
    return connection, ring


def _socket_name(instance_id: str) -> str:
    return f"\0pipellm-{instance_id}"


class ShmListener:
    """The receiving half: takes links from other processes and hands their frames to `accept`.

    `accept` raises PipeLLMError for a frame that is not wanted, which ends that link."""

    def __init__(self, instance_id: str, accept: Callable[[Frame], None]) -> None:
        self._accept = accept
        self._log = get_logger()
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(_socket_name(instance_id))
        self._socket.listen()
        threading.Thread(target=self._listen, name="shm-listener", daemon=True).start()

    def close(self) -> None:
        """Ends the listener and every link; their threads end with them."""
        with self._lock:
            self._closed = True
            for end in (self._socket, *self._connections):
                with contextlib.suppress(OSError):  # already gone
                    end.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _listen(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    return  # closed
                self._log.warning("links_wait", carrier="shm", reason=str(error))
                time.sleep(_ACCEPT_RETRY_S)
                continue
            with self._lock:
                taken = len(self._connections) < _MAX_CONNECTIONS and not self._closed
                if taken:
                    self._connections.add(connection)
            if not taken:
                self._log.warning("link_refused", carrier="shm", reason=f"{_MAX_CONNECTIONS} are open")
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="shm-link", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, _take_ring(connection) as ring:
                self._serve_frames(connection, ring)
        except (OSError, PipeLLMError) as error:
            self._log.warning("link_ended", carrier="shm", reason=str(error))
        finally:
            with self._lock:
                self._connections.discard(connection)

    def _serve_frames(self, connection: socket.socket, ring: mmap.mmap) -> None:
        expected = taken = taken_bytes = 0
        while note := connection.recv(_NOTE.size):
            if len(note) != _NOTE.size:
                raise CorruptDataError(f"link: a note of {len(note)} bytes, {_NOTE.size} are due")
            start, length = _NOTE.unpack(note)
            if start + length > len(ring):
                raise CorruptDataError(f"link: a frame of {length} bytes at {start} in a ring of {len(ring)}")
            data = ring[start : start + length]
            frame = Frame.decode(data)
            if frame.sequence_number != expected:
                raise CorruptDataError(f"link: frame {frame.sequence_number} came where {expected} was due")
            expected += 1
            taken, taken_bytes = taken + 1, taken_bytes + length
            if frame.kind == FrameKind.ECHO:
                connection.send(data)
            else:
                self._accept(frame)
            if frame.kind == FrameKind.ECHO or taken == _MAX_TAKEN or 16 * taken_bytes > len(ring):
                connection.send(_TAKEN * taken)
                taken = taken_bytes = 0


def _take_ring(connection: socket.socket) -> mmap.mmap:
    """The ring that a new peer hands over, if it is a process of this user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid != os.getuid():
        raise PipeLLMError(f"a process of user {uid} tried to link to this stage; it runs as {os.getuid()}")
    connection.settimeout(_TIMEOUT_S)
    hello, descriptors, _, _ = socket.recv_fds(connection, _HELLO.size + 1, 1)
    try:
        connection.settimeout(None)
        if len(hello) != _HELLO.size or len(descriptors) != 1:
            raise CorruptDataError("link: the peer handed over no ring buffer")
        return _map_ring(descriptors[0], *_HELLO.unpack(hello))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _map_ring(descriptor: int, size: int) -> mmap.mmap:
    if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise CorruptDataError("link: the peer's ring buffer could shrink (it lacks F_SEAL_SHRINK)")
    if size < 1 or os.fstat(descriptor).st_size != size:
        raise CorruptDataError(f"link: the peer's ring buffer is not of the {size} bytes it says")
    return mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
