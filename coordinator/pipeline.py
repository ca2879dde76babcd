"""One epoch at work: the Execute streams to all stages of a plan, and the loop that keeps them fed.

Steps go to every stage in the same order; results come from the last stage, acknowledgements from all. The
scheduler decides what a step holds; who a token belongs to, and what becomes of it, is its caller's business.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence

from common.errors import PipeLLMError, UnavailableError
from common.log import get_logger
from coordinator.membership import Member, StageError, calling
from coordinator.scheduler import Scheduler
from protos import stage_pb2

_BLAME_WAIT_S = 0.5
_WATCH_S = 0.5


class Pipeline:
    """`on_results` is called with the results of each message, in order; `on_failure` with the member that
    failed, if it was one, and why (at least once; the caller then closes the pipeline)."""

    def __init__(
        self,
        epoch: int,
        members: Sequence[Member],
        scheduler: Scheduler,
        step_timeout_s: float,
        on_results: Callable[[Sequence[stage_pb2.StepResult]], None],
        on_failure: Callable[[Member | None, PipeLLMError], None],
    ) -> None:
        self.epoch = epoch
        self.members = list(members)
        self.scheduler = scheduler
        self._on_results = on_results
        self._on_failure = on_failure
        self._step_timeout_s = step_timeout_s
        self._loop = asyncio.get_running_loop()
        self._woken = False
        self._closed = False
        # Steps that a member has not acknowledged, oldest first, with the time of their issue.
        self._unacknowledged: list[dict[int, float]] = [{} for _ in members]
        self._outboxes: list[asyncio.Queue[stage_pb2.Step]] = [asyncio.Queue() for _ in members]
        self._tasks = [
            asyncio.create_task(self._run_stage(index), name=f"stage-{member.stage_id}")
            for index, member in enumerate(self.members)
        ]
        self._tasks.append(asyncio.create_task(self._watch(), name="watch"))

    def wake(self) -> None:
        """Something changed that may let a step be issued: soon, when all that changes now is known."""
        if not self._woken:
            self._woken = True
            self._loop.call_soon(self._issue)

    async def close(self) -> None:
        """Ends the streams; the stages drop the epoch. Idempotent."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _issue(self) -> None:
        self._woken = False
        if self._closed:
            return
        try:
            self._issue_steps()
        except Exception as error:
            self._fault(None, error)

    def _issue_steps(self) -> None:
        issued = True
        while issued:  # in turn, so that every group gets its step before any gets a second
            issued = False
            for group in range(self.scheduler.config.num_groups):
                step = self.scheduler.schedule(group)
                if step is not None:
                    issued = True
                    for outbox, steps in zip(self._outboxes, self._unacknowledged, strict=True):
                        steps[step.step_id] = time.monotonic()
                        outbox.put_nowait(step)

    async def _watch(self) -> None:
        """Ends the epoch when a step makes no progress: a stage may renew its lease and compute no more.

        To blame is the first member of the ring that has not acknowledged the oldest step."""
        while True:
            await asyncio.sleep(_WATCH_S)
            overdue = time.monotonic() - self._step_timeout_s
            oldest = [next(iter(steps.items()), None) for steps in self._unacknowledged]
            late = [(step[0], index) for index, step in enumerate(oldest) if step and step[1] < overdue]
            if late:
                step_id, index = min(late)
                reason = f"it has not finished step {step_id} within {self._step_timeout_s:g} s"
                self._on_failure(self.members[index], UnavailableError(reason))
                return

    async def _run_stage(self, index: int) -> None:
        member = self.members[index]
        try:
            with calling(member):
                async for response in member.stub.Execute(self._requests(index)):
                    if response.results:
                        self._on_results(response.results)
                    for step_id in response.acknowledged_steps:
                        self._unacknowledged[index].pop(step_id, None)
                        self.scheduler.on_acknowledged(index, step_id)
                    self.wake()
            self._on_failure(member, UnavailableError("it ended the stream of steps"))
        except StageError as failure:
            if failure.reported:
                # If it is because of its neighbour, that one's own stream is about to break, and the blame
                # is the neighbour's.
                await asyncio.sleep(_BLAME_WAIT_S)
            self._on_failure(member, failure.error)
        except Exception as failure:
            self._fault(member, failure)

    async def _requests(self, index: int) -> AsyncIterator[stage_pb2.ExecuteRequest]:
        yield stage_pb2.ExecuteRequest(epoch=self.epoch)
        outbox = self._outboxes[index]
        while True:
            steps = [await outbox.get()]
            while not outbox.empty():
                steps.append(outbox.get_nowait())
            yield stage_pb2.ExecuteRequest(epoch=self.epoch, steps=steps)

    def _fault(self, member: Member | None, error: Exception) -> None:
        """An error of the coordinator's own code: the epoch ends, rather than hanging half alive."""
        get_logger().error("pipeline_failed", epoch=self.epoch, exc_info=error)
        self._on_failure(member, PipeLLMError("the coordinator failed while serving; its log says why"))
