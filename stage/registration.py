"""Keeps this stage registered with the coordinator: registers, renews the lease, and leaves cleanly."""

from __future__ import annotations

import threading
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common import rpc
from common.errors import InvalidRequestError, NotReadyError, PipeLLMError
from common.log import get_logger
from protos import coordinator_pb2, coordinator_pb2_grpc

_CALL_TIMEOUT_S = 2.0
_LEAVE_TIMEOUT_S = 60.0  # the coordinator lets running requests finish first
_ALIVE_TIMEOUT_S = 2.0  # a coordinator that says nothing for so long need not be told
_RETRY_S = 0.5
_LEASES_S = (0.3, 60.0)  # whatever the coordinator says, renewals keep to these


class Registration:
    """A thread that registers and renews. `on_registered` is called at the first success; `on_refused` when
    the coordinator will never take this stage (another protocol version, an address it cannot dial)."""

    def __init__(
        self,
        coordinator: str,
        request: coordinator_pb2.RegisterStageRequest,
        on_registered: Callable[[], None],
        on_refused: Callable[[PipeLLMError], None],
    ) -> None:
        self._coordinator = coordinator
        self._request = request
        self._on_registered = on_registered
        self._on_refused = on_refused
        self._log = get_logger()
        self._stop = threading.Event()
        self._registered: bool | None = None  # None: nothing is known yet
        self._thread = threading.Thread(target=self._main, name="registration", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Stops renewing and tells the coordinator; returns when running requests have ended, or at once
        where the coordinator does not answer."""
        self._stop.set()
        self._thread.join()
        with rpc.dial(self._coordinator) as channel:
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            try:
                health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=_ALIVE_TIMEOUT_S
                )
                stub.DeregisterStage(
                    coordinator_pb2.DeregisterStageRequest(
                        stage_id=self._request.stage_id, instance_id=self._request.instance_id
                    ),
                    timeout=_LEAVE_TIMEOUT_S,
                )
            except grpc.RpcError as error:
                self._log.info("deregistration_failed", reason=str(rpc.from_rpc_error(error, "coordinator")))

    def _main(self) -> None:
        with rpc.dial(self._coordinator) as channel:
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            wait_s: float | None = 0.0
            while wait_s is not None and not self._stop.wait(wait_s):
                try:
                    wait_s = self._renew(stub)
                except Exception as error:  # without renewals the stage would be lost, and nobody know why
                    self._log.error("registration_failed", exc_info=error)
                    wait_s = _RETRY_S

    def _renew(self, stub: coordinator_pb2_grpc.CoordinatorServiceStub) -> float | None:
        """Registers, or renews; returns the seconds until it is due again, None if it never is."""
        try:
            answer = stub.RegisterStage(self._request, timeout=_CALL_TIMEOUT_S)
        except grpc.RpcError as failure:
            error = rpc.from_rpc_error(failure, f"the coordinator at {self._coordinator}")
            if isinstance(error, NotReadyError | InvalidRequestError):
                self._on_refused(error)
                return None
            if self._registered is not False:
                self._log.warning("not_registered", reason=str(error))
            self._registered = False
            return _RETRY_S
        if not self._registered:
            self._log.info("registered", coordinator=self._coordinator, lease_s=answer.lease_s)
            self._on_registered()
        self._registered = True
        shortest, longest = _LEASES_S
        return min(longest, max(shortest, answer.lease_s)) / 3
