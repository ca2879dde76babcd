"""A model that is served: its requests, and the way of every token from a stage's result to its client."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from common.errors import CorruptDataError, DeadlineError, InvalidRequestError, PipeLLMError
from coordinator.catalog import CatalogEntry
from coordinator.config import CoordinatorConfig
from coordinator.membership import Member
from coordinator.metrics import Metrics
from coordinator.pipeline import Pipeline
from coordinator.planner import Plan
from coordinator.request import ModelLimits, Request
from coordinator.scheduler import Scheduler, SchedulerConfig
from coordinator.text import ModelText
from protos import coordinator_pb2, model_pb2, stage_pb2

_CHECK_TIMEOUT_S = 60.0
_TEXT_THREADS = 2

P = ParamSpec("P")
R = TypeVar("R")

Event = coordinator_pb2.GenerationDelta | coordinator_pb2.GenerationFinished
OnFailure = Callable[[int, Member | None, PipeLLMError], None]


class ActiveRequest:
    """A request on its way, and its client's waiting for news of it."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._news = asyncio.Event()
        self._error: PipeLLMError | None = None

    def tell(self) -> None:
        """The request has something for its client."""
        self._news.set()

    def fail(self, error: PipeLLMError) -> None:
        self._error = error
        self._news.set()

    async def events_until_finished(self) -> AsyncIterator[Event]:
        """Deltas, then the finish. Raises the error that ended the request otherwise.

        What came while the client was busy with the last delta is told as one."""
        while True:
            await self._news.wait()
            self._news.clear()
            for event in self.request.take():
                yield event
                if isinstance(event, coordinator_pb2.GenerationFinished):
                    return
            if self._error is not None:
                raise self._error


class Served:
    """One loaded model, from its plan to its end. `members` and `carriers` are in ring order.

    Creating it opens the streams of steps; `check` proves the ring; `close` ends it all."""

    def __init__(
        self,
        epoch: int,
        entry: CatalogEntry,
        info: model_pb2.ModelInfo,
        text: ModelText,
        plan: Plan,
        members: Sequence[Member],
        carriers: Sequence[str],
        config: CoordinatorConfig,
        metrics: Metrics,
        on_failure: OnFailure,
    ) -> None:
        self.epoch = epoch
        self.entry = entry
        self.info = model_pb2.ModelInfo()
        self.info.CopyFrom(info)
        self.info.context_length = plan.context_length
        self.info.loaded = True
        self.text = text
        self.plan = plan
        self.members = list(members)
        self.carriers = carriers
        self._metrics = metrics
        tokenizer = text.tokenizer
        self._limits = ModelLimits(
            name=entry.name,
            vocab_size=info.vocab_size,
            context_length=plan.context_length,
            eog_ids=tokenizer.eog_ids if tokenizer is not None else (),
            sampling_defaults=text.sampling_defaults,
            vocabulary=tokenizer,
        )
        self._active: dict[int, ActiveRequest] = {}  # by sequence id
        self._last_id = 0
        self._text_threads = ThreadPoolExecutor(_TEXT_THREADS, thread_name_prefix="text")
        self._ended: PipeLLMError | None = None
        self._checked = False  # a canary token has gone round; only what comes after it is counted
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=plan.num_kv_blocks,
                block_size=plan.kv_block_size,
                num_groups=len(members),
                num_stages=len(members),
                max_step_tokens=config.max_step_tokens,
                max_sequences=config.max_sequences,
                max_waiting=config.max_waiting,
                context_length=plan.context_length,
                run_ahead=config.run_ahead,
                repeat=config.repeat,
            ),
            clock=time.monotonic,
        )
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_failure = on_failure
        self._pipeline = Pipeline(
            epoch, members, self.scheduler, config.step_timeout_s, self._on_results, self._on_pipeline_failure
        )

    @property
    def num_requests(self) -> int:
        return len(self._active)

    async def prepare(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs work on texts in the few threads for it; work that waits is dropped when its caller goes.

        Raises what ended the model if it has ended meanwhile: its texts are of no use then."""
        call = functools.partial(work, *args, **kwargs)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._text_threads, call)
        except PipeLLMError:
            if self._ended is not None:
                raise self._ended from None
            raise

    def submit(self, ids: list[int], options: coordinator_pb2.GenerationOptions) -> ActiveRequest:
        """Queues a request. Raises InvalidRequestError, OutOfCapacityError, or what ended this model."""
        if self._ended is not None:
            raise self._ended
        self._last_id += 1
        request = Request(ids, options, self._limits, self._last_id, time.monotonic())
        request_id = request.started.request_id
        if any(other.request.started.request_id == request_id for other in self._active.values()):
            raise InvalidRequestError(f"request_id {request_id!r} is already running")
        self.scheduler.add(request.sequence)
        active = self._active[self._last_id] = ActiveRequest(request)
        self._pipeline.wake()
        return active

    def cancel(self, active: ActiveRequest) -> None:
        """Ends a request at the next step boundary; one that has ended is left alone."""
        self._finish(active, "cancelled")

    def abort(self, request_id: str) -> bool:
        for active in list(self._active.values()):
            if active.request.started.request_id == request_id:
                self._finish(active, "aborted")
                active.request.abort()
                active.tell()
                return True
        return False

    async def check(self) -> None:
        """Sends a canary token round the ring. Raises what went wrong on the way."""
        options = coordinator_pb2.GenerationOptions(max_tokens=1, request_id="check")
        options.sampling.temperature = 0.0
        active = self.submit([min(1, self.info.vocab_size - 1)], options)
        answer = asyncio.ensure_future(_drain(active))
        try:
            done, _ = await asyncio.wait(
                {answer, self._failed}, timeout=_CHECK_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            self.cancel(active)
            answer.cancel()
        if self._failed in done:
            self._failed.result()
        if not done:
            raise DeadlineError(f"no token came round the ring within {_CHECK_TIMEOUT_S:.0f} s")
        answer.result()
        self._checked = True

    def fail(self, error: PipeLLMError) -> None:
        """Every request ends with `error`, those still being prepared too."""
        self._ended = error
        for active in list(self._active.values()):
            self._finish(active, "failed")
            active.fail(error)

    async def close(self) -> None:
        await self._pipeline.close()
        self._text_threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self.text.close)  # may wait for a template that is being rendered

    def _finish(self, active: ActiveRequest, reason: str) -> None:
        sequence_id = active.request.sequence.sequence_id
        if self._active.pop(sequence_id, None) is not None:
            self.scheduler.finish(sequence_id)
            if self._checked:
                self._metrics.finished(reason)
            self._pipeline.wake()

    def _on_results(self, results: Sequence[stage_pb2.StepResult]) -> None:
        """Takes in what one message brought, one iteration after the other; clients hear of it as a whole."""
        num_generated = num_prefilled = 0
        told: dict[int, ActiveRequest] = {}
        for result in results:
            accepted = self.scheduler.on_result(result)
            num_generated += len(accepted)
            for sequence, token in accepted:
                active = self._active.get(sequence.sequence_id)
                if active is None:
                    continue
                if sequence.num_generated == 1:
                    num_prefilled += sequence.num_prompt - sequence.cached_tokens
                told[sequence.sequence_id] = active
                reason = active.request.push(token)
                if reason:
                    self._finish(active, coordinator_pb2.FinishReason.Name(reason))
            for failure in result.failures:
                self._fail_one(failure)
        for active in told.values():
            active.tell()
        if self._checked and num_generated:
            self._metrics.generated(num_generated)
            if num_prefilled:
                self._metrics.prefilled(num_prefilled)

    def _fail_one(self, failure: stage_pb2.SequenceFailure) -> None:
        sequence = self.scheduler.on_failed(failure)
        active = self._active.get(sequence.sequence_id) if sequence is not None else None
        if sequence is None or active is None:
            return
        self._finish(active, "failed")
        request_id = active.request.started.request_id
        active.fail(
            CorruptDataError(
                f"request {request_id!r} ended after {sequence.num_generated} tokens, and no other with it:"
                f" {failure.reason}"
            )
        )

    def _on_pipeline_failure(self, member: Member | None, error: PipeLLMError) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)
            self._failed.exception()  # seen: who does not wait for it need not hear of it
        self._on_failure(self.epoch, member, error)


async def _drain(active: ActiveRequest) -> None:
    async for _ in active.events_until_finished():
        pass
