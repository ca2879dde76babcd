"""What one Load leaves on a stage: the runner and its engine, the link out, and where results go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from common.errors import PipeLLMError
from protos import stage_pb2
from stage.engine import Engine
from stage.links.base import Link
from stage.model.spec import ModelSpec
from stage.runner import Runner
from stage.sequences import SequenceTable

# A message costs as much as several tokens' work, whatever it carries, so results wait for their step's
# end, but no longer than this. Steps that the coordinator sizes by time are shorter.
REPORT_S = 0.08


class Responses:
    """What the engine reports, gathered into messages: a step's results go together with its
    acknowledgement, those of a long step as often as `REPORT_S` allows."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[stage_pb2.ExecuteResponse] = []
        self._complete = False  # a step's end is among them
        self._urgent = False  # the reader has waited long enough for that
        self._reason: PipeLLMError | None = None
        self._taken_s = 0.0

    def put(self, response: stage_pb2.ExecuteResponse) -> None:
        with self._changed:
            self._waiting.append(response)
            complete = bool(response.acknowledged_steps)
            # The engine has better to do than to wake the reader for each iteration.
            if self._urgent or (complete and not self._complete):
                self._changed.notify()
            self._urgent = False
            self._complete |= complete

    def end(self, reason: PipeLLMError) -> None:
        """Nothing is worth sending after this. The first reason counts."""
        with self._changed:
            self._reason = self._reason or reason
            self._changed.notify()

    def take(self) -> tuple[stage_pb2.ExecuteResponse | None, PipeLLMError | None]:
        """The next message, and what ends the stream. Waits until there is one or the other."""
        with self._changed:
            wait_s = self._taken_s + REPORT_S - time.monotonic()
            self._changed.wait_for(lambda: self._complete or self._reason, max(0.0, wait_s))
            self._urgent = not self._waiting
            self._changed.wait_for(lambda: self._waiting or self._reason)
            waiting, self._waiting, self._complete = self._waiting, [], False
            self._taken_s = time.monotonic()
            reason = self._reason
        if not waiting:
            return None, reason
        merged = waiting[0]
        for response in waiting[1:]:
            merged.MergeFrom(response)
        return merged, reason


class LoadedEpoch:
    """`on_failure` is told when the engine stops by itself, after the Execute stream."""

    def __init__(
        self,
        request: stage_pb2.LoadRequest,
        runner: Runner,
        spec: ModelSpec,
        on_failure: Callable[[PipeLLMError], None],
    ) -> None:
        self.request = request
        self.hidden_size = spec.hidden_size
        self.runner = runner
        self.link: Link | None = None
        self.taken = threading.Event()  # by an Execute stream, or it has ended: no load holds it any more
        self.responses = Responses()  # for the Execute stream
        sequences = SequenceTable(
            request.num_kv_blocks, request.kv_block_size, request.max_step_tokens, spec.vocab_size
        )

        def failed(error: PipeLLMError) -> None:
            self.responses.end(error)
            on_failure(error)

        self.engine = Engine(runner, sequences, request.epoch, request.window, self.responses.put, failed)

    def close(self, error: PipeLLMError) -> None:
        self.taken.set()
        self.responses.end(error)
        if self.link is not None:
            self.link.close()
        self.engine.close()
        self.runner.close()
