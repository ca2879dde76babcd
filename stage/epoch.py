"""What one Load leaves on a stage: the runner and its engine, the link out, and where results go."""

from __future__ import annotations

import queue

from common.errors import PipeLLMError
from protos import stage_pb2
from stage.engine import Engine
from stage.links.base import Link
from stage.model.spec import ModelSpec
from stage.runner import Runner
from stage.sequences import SequenceTable


class LoadedEpoch:
    def __init__(self, request: stage_pb2.LoadRequest, runner: Runner, spec: ModelSpec) -> None:
        self.request = request
        self.hidden_size = spec.hidden_size
        self.runner = runner
        self.link: Link | None = None
        self.executing = False
        # Responses for the Execute stream; an exception ends it.
        self.responses: queue.SimpleQueue[stage_pb2.ExecuteResponse | PipeLLMError] = queue.SimpleQueue()
        sequences = SequenceTable(
            request.num_kv_blocks, request.kv_block_size, request.max_step_tokens, spec.vocab_size
        )
        self.engine = Engine(
            runner, sequences, request.epoch, request.window, self.responses.put, self.responses.put
        )

    def next_responses(self) -> tuple[stage_pb2.ExecuteResponse | None, PipeLLMError | None]:
        """All responses that are there, in one message (waits for the first), and what ends the stream.

        A coordinator that is behind gets fewer, larger messages."""
        merged = None
        while merged is None or not self.responses.empty():
            response = self.responses.get()
            if isinstance(response, PipeLLMError):
                return merged, response
            if merged is None:
                merged = response
            else:
                merged.MergeFrom(response)
        return merged, None

    def close(self, error: PipeLLMError) -> None:
        self.responses.put(error)
        if self.link is not None:
            self.link.close()
        self.engine.close()
        self.runner.close()
