"""The mesh as a whole: which stages are there, which model they serve, and what happens when one is lost.

One model is served at a time. `Mesh` owns loading, unloading, loss and recovery; the requests of the served
model are `serving.Served`'s, the attempt to load is `loading`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from common.errors import InvalidRequestError, NotReadyError, PipeLLMError, UnavailableError
from common.gguf.reader import GGUFFile
from common.log import get_logger
from coordinator import loading
from coordinator.catalog import Catalog, CatalogEntry, model_info
from coordinator.config import CoordinatorConfig
from coordinator.loading import Report, make_plan
from coordinator.membership import Member, Membership, StageError, prove_reachable, reason_of
from coordinator.metrics import Metrics
from coordinator.serving import Served
from coordinator.text import ModelText
from protos import coordinator_pb2, stage_pb2

_EXPIRY_CHECK_S = 0.25
_IDLE_CHECK_S = 0.05
_RETRY_FIRST_S = 0.5  # between attempts to load the wanted model, doubled up to the last
_RETRY_LAST_S = 30.0


class Mesh:
    def __init__(self, config: CoordinatorConfig, catalog: Catalog, metrics: Metrics) -> None:
        self.config = config
        self.catalog = catalog
        self.metrics = metrics
        self.membership = Membership(config.lease_s)
        self.served: Served | None = None
        self.problem = ""  # why the wanted model is not served, for status
        self._wanted = config.model
        self._wanted_context = config.context_length
        self._load_lock = asyncio.Lock()  # one load or unload at a time
        self.loading_members: list[Member] = []
        self._stopping = False
        self._leaving: set[Member] = set()  # stages whose requests may finish, and that take no new ones
        self._epoch = time.time_ns()  # so that no epoch of an earlier coordinator comes again
        self._profiles: dict[tuple[str, str, int], stage_pb2.ProfileResponse] = {}
        self._changed = asyncio.Event()  # members or the served model changed
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._log = get_logger()
        self._offer_metrics()

    def _offer_metrics(self) -> None:
        def of_scheduler(name: str) -> Callable[[], float]:
            return lambda: getattr(self.served.scheduler, name) if self.served is not None else 0

        gauge = self.metrics.gauge
        gauge("requests_running", "Requests being computed", of_scheduler("num_running"))
        gauge("requests_waiting", "Requests queued", of_scheduler("num_waiting"))
        gauge("kv_blocks_free", "Free KV blocks", of_scheduler("num_free_blocks"))
        gauge("stages", "Registered stages", lambda: len(self.membership.members))

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._expire_leases(), name="leases"),
            asyncio.create_task(self._recover(), name="recover"),
        ]

    async def stop(self) -> None:
        """Drains, then ends what is left with UNAVAILABLE and frees the stages."""
        self._stopping = True
        await self._wait_idle()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._end_served(UnavailableError("the coordinator is shutting down"))
        await asyncio.gather(*self._closing, return_exceptions=True)
        for member in self.membership.members:
            await member.channel.close()

    # --- requests ----------------------------------------------------------------------------------------

    async def require(self, model: str) -> Served:
        """The served model, if it is the one asked for.

        Raises UnavailableError while draining or after a loss, NotReadyError while nothing is loaded,
        UnknownModelError for a model that is not there at all."""
        if self._stopping:
            raise UnavailableError("the coordinator is shutting down")
        served = self.served
        if served is not None and self._is_leaving(served):
            raise UnavailableError("a stage is leaving; the mesh is planned anew when it has")
        if served is not None and model in ("", served.entry.name, served.entry.file, str(served.entry.path)):
            return served
        name = (await asyncio.to_thread(self.catalog.find, model)).name if model else self._wanted
        if served is not None and served.entry.name == name:
            return served
        if self.is_loading:
            raise NotReadyError(f"model {name!r} is loading; try again when it is done")
        if served is not None:
            raise NotReadyError(f"model {name!r} is not loaded, {served.entry.name!r} is; load it first")
        if not name:
            raise NotReadyError("no model is loaded; load one first (pipellm-client load NAME)")
        if self.problem:
            raise UnavailableError(f"model {name!r} is not served: {self.problem}")
        raise NotReadyError(f"model {name!r} is not loaded yet: {self.state}")

    def _is_leaving(self, served: Served) -> bool:
        return not self._leaving.isdisjoint(served.members)

    async def _wait_idle(self) -> None:
        """Waits for the running requests, up to the drain time."""
        deadline = time.monotonic() + self.config.drain_s
        while self.served is not None and self.served.num_requests and time.monotonic() < deadline:
            await asyncio.sleep(_IDLE_CHECK_S)

    @property
    def is_loading(self) -> bool:
        return bool(self.loading_members)

    @property
    def state(self) -> str:
        if self._stopping or (self.served is not None and self._is_leaving(self.served)):
            return "draining"
        if self.is_loading:
            return "loading"
        if self.served is not None:
            return "ready"
        if self.problem:
            return self.problem
        missing = self.config.min_stages - len(self.membership.members)
        return f"waiting for {missing} more stage(s)" if missing > 0 else "no model loaded"

    # --- membership --------------------------------------------------------------------------------------

    async def register(self, request: coordinator_pb2.RegisterStageRequest) -> None:
        if self.membership.find(request.stage_id, request.instance_id) is None:
            await prove_reachable(request)
        member, is_new, previous = self.membership.register(request, time.monotonic())
        if previous is not None:
            self._lose(previous, "its process was restarted")
        if is_new:
            self._log.info("stage_registered", stage=member.stage_id, address=member.address)
            self._changed.set()

    async def deregister(self, stage_id: str, instance_id: str) -> None:
        """A stage leaves: its requests may finish first, within the drain time."""
        member = self.membership.find(stage_id, instance_id)
        if member is None:
            return
        self._leaving.add(member)
        member.expires_at += self.config.drain_s  # it renews its lease no more
        try:
            if self.served is not None and member in self.served.members:
                await self._wait_idle()
        finally:  # whether it waited for the answer or not, it goes
            self._leaving.discard(member)
            if self.membership.find(stage_id, instance_id) is member:  # not lost meanwhile
                self._lose(member, "it was shut down")

    def _lose(self, member: Member, reason: str) -> None:
        self._log.warning("stage_lost", stage=member.stage_id, reason=reason)
        self.membership.remove(member, reason)
        self._later(member.channel.close())
        if self.served is not None and member in self.served.members:
            self._end_served(UnavailableError(f"stage {member.stage_id!r} was lost: {reason}"))
        self._changed.set()

    def _end_served(self, error: PipeLLMError) -> None:
        """Every request of the served model ends with `error`; its stages drop the epoch."""
        served, self.served = self.served, None
        if served is None:
            return
        self.problem = str(error)
        served.fail(error)
        self._later(served.close())
        self._changed.set()

    def _on_pipeline_failure(self, epoch: int, member: Member | None, error: PipeLLMError) -> None:
        if self.served is None or self.served.epoch != epoch:
            return
        self._log.warning("epoch_failed", epoch=epoch, reason=str(error))
        if member is not None and isinstance(error, UnavailableError):
            # If it lives, it is back with the next renewal of its lease.
            self._lose(member, reason_of(member, error))
        elif member is not None:
            reason = reason_of(member, error)
            self._end_served(UnavailableError(f"stage {member.stage_id!r} failed: {reason}"))
        else:
            self._end_served(error)

    async def _expire_leases(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(_EXPIRY_CHECK_S)
            now = time.monotonic()
            # Renewals that came while this process itself was held up have not been looked at yet.
            late_s = now - before - _EXPIRY_CHECK_S
            for member in self.membership.expired(now - late_s):
                self._lose(member, f"it has not renewed its lease for {self.config.lease_s:g} s")

    # --- loading -----------------------------------------------------------------------------------------

    async def _recover(self) -> None:
        """Loads the wanted model whenever it is not served and enough stages are there."""
        wait_s = _RETRY_FIRST_S
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._wanted and self.served is None and not self._stopping and self._enough_stages():
                try:
                    entry = await asyncio.to_thread(self.catalog.find, self._wanted)
                    async with self._load_lock:
                        if self.served is None and self._wanted:  # else somebody was faster
                            await self._load(entry, self._wanted_context, lambda _: None)
                    wait_s = _RETRY_FIRST_S
                    break
                except PipeLLMError as error:
                    self.problem = str(error)
                    self._log.warning("load_failed", model=self._wanted, reason=self.problem)
                except Exception as error:
                    self.problem = "loading failed; the coordinator's log says why"
                    self._log.error("load_failed", model=self._wanted, exc_info=error)
                with contextlib.suppress(TimeoutError):  # a stage that comes may be what was missing
                    await asyncio.wait_for(self._changed.wait(), wait_s)
                self._changed.clear()
                wait_s = min(2 * wait_s, _RETRY_LAST_S)

    def _enough_stages(self) -> bool:
        return len(self.membership.members) >= self.config.min_stages

    async def load(
        self, model: str, context_length: int, force: bool
    ) -> AsyncIterator[coordinator_pb2.LoadModelResponse]:
        """Loads a model, telling of its progress; what was served before is unloaded first, and loaded again
        if this fails."""
        if self._stopping:
            raise UnavailableError("the coordinator is shutting down")
        if context_length == 1:
            raise InvalidRequestError("context_length is 1: a sequence needs room for a prompt and an answer")
        entry = await asyncio.to_thread(self.catalog.find, model)
        with await asyncio.to_thread(GGUFFile.open, entry.path) as file:  # a bad file ends nothing
            file.require("general.architecture", str)
        before = (self._wanted, self._wanted_context)
        events: asyncio.Queue[coordinator_pb2.LoadModelResponse | None] = asyncio.Queue()

        async def replace() -> Served:
            async with self._load_lock:
                if self.served is not None:
                    await self._unload(self.served, force)
                return await self._load(
                    entry, context_length or self.config.context_length, events.put_nowait
                )

        task = asyncio.create_task(replace())
        task.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
            served = await task
            before = (self._wanted, self._wanted_context)
            yield coordinator_pb2.LoadModelResponse(loaded=served.info)
        finally:
            self._wanted, self._wanted_context = before
            self._changed.set()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def unload(self, force: bool) -> None:
        async with self._load_lock:
            if self.served is None:
                raise NotReadyError("no model is loaded")
            await self._unload(self.served, force)

    async def _unload(self, served: Served, force: bool) -> None:
        """With the load lock held."""
        if served.num_requests and not force:
            raise NotReadyError(f"{served.num_requests} requests are running; wait for them, or force it")
        self._wanted = ""
        self._end_served(UnavailableError(f"model {served.entry.name!r} was unloaded"))
        await asyncio.gather(*self._closing, return_exceptions=True)
        await loading.unload(served.members)
        self.problem = ""

    async def _load(self, entry: CatalogEntry, context_length: int, report: Report) -> Served:
        """With the load lock held, and nothing served."""
        members = self.membership.members
        if not self._enough_stages():
            raise NotReadyError(
                f"{len(members)} stages are registered, {self.config.min_stages} are needed; start more"
            )
        self.loading_members = members
        try:
            served = await self._load_on(members, entry, context_length, report)
        except StageError as error:
            await loading.unload(members)
            raise error.error from error
        except BaseException:
            await loading.unload(members)
            raise
        finally:
            self.loading_members = []
        self.served = served
        self.problem = ""
        self._wanted, self._wanted_context = entry.name, context_length
        self._log.info("model_ready", model=entry.name, epoch=served.epoch, stages=len(served.members))
        return served

    async def _load_on(
        self, members: list[Member], entry: CatalogEntry, context_length: int, report: Report
    ) -> Served:
        with await asyncio.to_thread(GGUFFile.open, entry.path) as file:
            info, fingerprint = model_info(entry, file), file.fingerprint
            reading = asyncio.create_task(asyncio.to_thread(ModelText, entry.name, file))
            try:
                if len(members) > 1:  # whose times decide the plan: reading may be on a core of theirs
                    await asyncio.shield(reading)
                report(loading.load_progress("measure"))
                profiles = await self._measure(members, entry, fingerprint, context_length)
                text = await asyncio.shield(reading)
            except BaseException:
                await _dropped(reading)
                raise
        try:
            made = make_plan(members, profiles, context_length, self.config)
            by_id = {member.stage_id: member for member in members}
            ring = [by_id[window.stage_id] for window in made.windows]
            self._epoch += 1
            epoch = self._epoch
            async with loading.loaded(made, ring, entry, fingerprint, epoch, self.config, report):
                report(loading.load_progress("link"))
                carriers = await loading.link(ring, epoch)
                report(coordinator_pb2.LoadModelResponse(plan=loading.plan_status(made, epoch, carriers)))
                report(loading.load_progress("check"))
                served = Served(
                    epoch, entry, info, text, made, ring, carriers, self.config, self.metrics,
                    self._on_pipeline_failure,
                )  # fmt: skip
                try:
                    await served.check()
                except BaseException:
                    await served.close()
                    raise
                return served
        except BaseException:
            text.close()
            raise

    async def _measure(
        self, members: list[Member], entry: CatalogEntry, fingerprint: str, context_length: int
    ) -> list[stage_pb2.ProfileResponse]:
        """Measured costs, those of an earlier load of the same file by the same processes reused."""
        keys = [(member.instance_id, fingerprint, context_length) for member in members]
        unknown = [index for index, key in enumerate(keys) if key not in self._profiles]
        fresh = await loading.measure(
            [members[index] for index in unknown], entry, fingerprint, context_length
        )
        self._profiles.update((keys[index], profile) for index, profile in zip(unknown, fresh, strict=True))
        return [self._profiles[key] for key in keys]

    def _later(self, closing: Coroutine[Any, Any, None]) -> None:
        """Lets a close run on its own; `stop` waits for it."""
        task = asyncio.create_task(closing)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


async def _dropped(reading: asyncio.Task[ModelText]) -> None:
    """Closes what was read for a load that failed, once it is read: the thread has the file open."""
    await asyncio.wait([reading])
    if reading.exception() is None:
        reading.result().close()
