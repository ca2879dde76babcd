"""The coordinator daemon: `python -m coordinator`, or `pipellm-coordinator`."""

from __future__ import annotations

import asyncio
import signal
import sys

import sdnotify

from common import log, rpc, settings
from common.errors import InvalidRequestError, PipeLLMError, UnknownModelError
from coordinator.config import CoordinatorConfig
from protos import coordinator_pb2, coordinator_pb2_grpc

_SERVICE = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"].full_name
_GRACE_S = 1.0
_HEALTH_CHECK_S = 0.2
_STAGE_METRICS_S = 5.0


def main(argv: list[str] | None = None) -> int:
    try:
        config = settings.load(CoordinatorConfig, "PipeLLM coordinator daemon", argv).checked()
        return asyncio.run(run(config))
    except PipeLLMError as error:
        print(f"pipellm-coordinator: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidRequestError | UnknownModelError) else 1


async def run(config: CoordinatorConfig) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code."""
    from coordinator.catalog import Catalog  # tokenizers and gguf: after the settings are known good
    from coordinator.mesh import Mesh
    from coordinator.metrics import Metrics
    from coordinator.service import CoordinatorService

    log.configure(config.log_level)
    logger = log.get_logger()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    catalog = Catalog(config.model_dir)
    if config.model:
        catalog.find(config.model)  # a name that is not there is told at the start
    metrics = Metrics()
    mesh = Mesh(config, catalog, metrics)
    server, health = rpc.make_async_server(_SERVICE)
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(CoordinatorService(mesh), server)
    address = rpc.listen(server, config.listen)
    if config.metrics_listen:
        metrics.serve(config.metrics_listen)
    await server.start()
    mesh.start()
    await health.set("", rpc.serving(True))
    tasks = [asyncio.create_task(_report_health(mesh, health), name="health")]
    if config.metrics_listen:
        tasks.append(asyncio.create_task(_report_stages(mesh), name="stage-metrics"))
    logger.info("listening", address=address, model=config.model or None)
    sdnotify.SystemdNotifier().notify("READY=1")

    await stop.wait()
    logger.info("stopping")
    sdnotify.SystemdNotifier().notify("STOPPING=1")
    for task in tasks:
        task.cancel()
    await health.enter_graceful_shutdown()
    await mesh.stop()
    await server.stop(_GRACE_S)
    await asyncio.gather(*tasks, return_exceptions=True)
    return 0


async def _report_health(mesh: object, health: object) -> None:
    """The service is healthy while a model answers: a token has gone round the ring it is served on."""
    ready: bool | None = None
    while True:
        now = mesh.state == "ready"  # type: ignore[attr-defined]
        if now != ready:
            ready = now
            await health.set(_SERVICE, rpc.serving(ready))  # type: ignore[attr-defined]
        await asyncio.sleep(_HEALTH_CHECK_S)


async def _report_stages(mesh: object) -> None:
    """Prometheus may scrape at any moment, and is told what the stages said last."""
    from coordinator.status import mesh_status

    while True:
        status = await mesh_status(mesh)  # type: ignore[arg-type]
        mesh.metrics.stages.show(status.stages)  # type: ignore[attr-defined]
        await asyncio.sleep(_STAGE_METRICS_S)


if __name__ == "__main__":
    sys.exit(main())
