"""The stage daemon: `python -m stage`, or `pipellm-stage`; its commands `verify` and `profile` measure a
backend."""

from __future__ import annotations

import os
import signal
import sys
import threading
import uuid

import sdnotify

from common import log, rpc, settings
from common.errors import InvalidRequestError, PipeLLMError
from protos import coordinator_pb2, stage_pb2, stage_pb2_grpc
from stage.config import StageConfig
from stage.registration import Registration

_SERVICE = stage_pb2.DESCRIPTOR.services_by_name["StageService"].full_name
# Execute streams and incoming links (see stage/service.py), tools' reflection, and short calls beside them.
_WORKERS = 32
_GRACE_S = 2.0
_BROKEN_END_S = 10.0


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["verify"]:
        from stage import verify

        return verify.main(argv[1:])
    if argv[:1] == ["profile"]:
        from stage import profile_command

        return profile_command.main(argv[1:])
    try:
        config = settings.load(StageConfig, "PipeLLM stage daemon", argv).checked()
        return run(config)
    except PipeLLMError as error:
        print(f"pipellm-stage: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidRequestError) else 1


def run(config: StageConfig) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code."""
    # These import torch: after the settings are known good.
    from stage.backends.choose import backend_factory, resolve_device
    from stage.service import StageService

    stop = threading.Event()
    failure: list[PipeLLMError] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())

    instance_id = uuid.uuid4().hex
    server, health = rpc.make_server(_SERVICE, _WORKERS)
    address = rpc.listen(server, config.listen)
    config = config.named(str(resolve_device(config)), address)
    log.configure(config.log_level, stage_id=config.stage_id)
    logger = log.get_logger()

    def device_lost(error: PipeLLMError) -> None:
        logger.error("device_lost", reason=str(error))
        failure.append(error)
        # A clean end may hang in a broken driver.
        last_resort = threading.Timer(_BROKEN_END_S, os._exit, (1,))
        last_resort.daemon = True
        last_resort.start()
        stop.set()

    service = StageService(config, instance_id, backend_factory(config), device_lost)
    stage_pb2_grpc.add_StageServiceServicer_to_server(service, server)
    server.start()
    logger.info("listening", address=address, device=service.device.name, backend=service.device.backend)

    def registered() -> None:
        health.set("", rpc.serving(True))
        health.set(_SERVICE, rpc.serving(True))
        sdnotify.SystemdNotifier().notify("READY=1")

    def refused(error: PipeLLMError) -> None:
        failure.append(error)
        stop.set()

    registration = Registration(
        config.coordinator,
        coordinator_pb2.RegisterStageRequest(
            stage_id=config.stage_id,
            address=config.advertise or address,
            protocol_version=rpc.PROTOCOL_VERSION,
            device=service.device,
            instance_id=instance_id,
        ),
        registered,
        refused,
    )
    stop.wait()
    logger.info("stopping")
    sdnotify.SystemdNotifier().notify("STOPPING=1")
    health.enter_graceful_shutdown()
    if not failure:
        registration.leave()
    service.close()
    server.stop(_GRACE_S).wait()
    if failure:
        raise failure[0]
    return 0


if __name__ == "__main__":
    sys.exit(main())
