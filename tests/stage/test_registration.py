"""The stage's registration against a real server that answers as no coordinator should, or not at all."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from common import rpc
from common.errors import PipeLLMError
from protos import coordinator_pb2, coordinator_pb2_grpc
from stage import registration
from stage.registration import Registration

TIMEOUT_S = 10
REQUEST = coordinator_pb2.RegisterStageRequest(stage_id="tested", instance_id="instance")

# Answers, and is then frozen by the test.
COORDINATOR = """
import sys
from common import rpc
server, _ = rpc.make_server("pipellm.v1.CoordinatorService", 2)
rpc.listen(server, sys.argv[1])
server.start()
print("up", flush=True)
server.wait_for_termination()
"""


class Coordinator(coordinator_pb2_grpc.CoordinatorServiceServicer):
    def __init__(self, address: str) -> None:
        self.lease_s = 3.0
        self.draining_s = 0.0
        self.asked = 0
        self.left = threading.Event()
        self.server, _ = rpc.make_server("pipellm.v1.CoordinatorService", 4)
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(self, self.server)
        self.address = rpc.listen(self.server, address)
        self.server.start()

    def RegisterStage(self, request: Any, context: Any) -> coordinator_pb2.RegisterStageResponse:
        self.asked += 1
        return coordinator_pb2.RegisterStageResponse(lease_s=self.lease_s)

    def DeregisterStage(self, request: Any, context: Any) -> coordinator_pb2.DeregisterStageResponse:
        time.sleep(self.draining_s)
        self.left.set()
        return coordinator_pb2.DeregisterStageResponse()


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    made = Coordinator(f"unix:{tmp_path}/c.sock")
    yield made
    made.server.stop(0).wait()


def nothing() -> None:
    pass


def unexpected(error: PipeLLMError) -> None:
    raise error


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("lease_s", [math.inf, math.nan, -1.0, 0.0, 1e300])
def test_no_lease_ends_the_renewals_or_makes_them_a_flood(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch, lease_s: float
) -> None:
    monkeypatch.setattr(registration, "_LEASES_S", (0.3, 0.9))
    coordinator.lease_s = lease_s
    started = time.monotonic()
    made = Registration(coordinator.address, REQUEST, nothing, unexpected)
    wait_until(lambda: coordinator.asked == 4)
    assert time.monotonic() - started > 3 * 0.09
    made.leave()
    assert coordinator.left.is_set()


def test_a_fault_in_the_loop_does_not_end_it(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "_RETRY_S", 0.05)
    calls = []

    def registered() -> None:
        calls.append(None)
        if len(calls) < 3:
            raise RuntimeError("no notification socket")

    made = Registration(coordinator.address, REQUEST, registered, unexpected)
    wait_until(lambda: len(calls) == 3)
    made.leave()


def test_leaving_waits_for_a_coordinator_that_drains(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "_ALIVE_TIMEOUT_S", 0.5)
    coordinator.draining_s = 1.5
    made = Registration(coordinator.address, REQUEST, nothing, unexpected)
    wait_until(lambda: coordinator.asked == 1)
    made.leave()
    assert coordinator.left.is_set()


def test_leaving_a_frozen_coordinator_takes_seconds(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/frozen.sock"
    process = subprocess.Popen(
        [sys.executable, "-c", COORDINATOR, address], stdout=subprocess.PIPE, text=True, cwd=os.getcwd()
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        made = Registration(address, REQUEST, nothing, lambda error: None)
        process.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        made.leave()
        assert time.monotonic() - started < 6
    finally:
        process.kill()
        process.wait()
