"""The engine of a stage: one thread that takes steps, runs them, and hands on.

It owns the runner, the sequences and the order of work; it knows no gRPC. Steps and frames come in through
`post_steps` and `post_frame`, hidden states and drawn tokens leave through the link, results and
acknowledgements through `on_response`.

A stage with the embedding runs a step when the tokens of all its rows are known; any other when the frame
with its hidden states is there. Within a group steps run in the order of issue; between groups whatever is
ready runs, taken in turn, so that one group's wait for the ring is another's time to compute.

Where the whole model is here and its backend decodes by itself (`Decoder`), decode steps are only issued: the
device feeds each drawn token to the next iteration, a second thread waits for the tokens, and they come back
through the engine's inbox like everything else. A step whose sequences are all freed is not computed.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.errors import CorruptDataError, PipeLLMError
from common.log import get_logger
from common.wire import Frame, FrameKind
from protos import model_pb2, stage_pb2
from stage.backends.base import Decoder, DecodeRow, make_batch
from stage.draws import DrawReader
from stage.faults import device_fault
from stage.links.base import Link
from stage.runner import Runner
from stage.sampler import Drawn, SamplingOptions
from stage.sequences import SequenceTable

# Hidden states that may wait for their step's description; a coordinator has far fewer steps under way.
_MAX_FRAMES = 4096


@dataclass
class _Work:
    """A step on its way through this stage."""

    step: stage_pb2.Step
    repeat: int = 0  # the next one to run
    generations: list[int] | None = None  # of its sequences, once it has begun


class Engine:
    """Runs one epoch's steps. `on_failure` is told once if the engine stops by itself."""

    def __init__(
        self,
        runner: Runner,
        sequences: SequenceTable,
        epoch: int,
        window: int,
        on_response: Callable[[stage_pb2.ExecuteResponse], None],
        on_failure: Callable[[PipeLLMError], None],
    ) -> None:
        self.sequences = sequences
        self.epoch = epoch
        self._window = window
        self._runner = runner
        self._on_response = on_response
        self._on_failure = on_failure
        self._log = get_logger(epoch=epoch)
        self._next_link: Link | None = None  # absent in a ring of one
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._groups: dict[int, deque[_Work]] = {}
        self._turns: deque[int] = deque()  # groups, the one served longest ago first
        self._frames: dict[tuple[int, int], torch.Tensor] = {}  # hidden states by (step, repeat)
        self._undrawn: dict[int, _Work] = {}  # first stage: steps whose drawn tokens are to come by the ring
        self._busy_s = 0.0
        self._reported = (time.monotonic(), 0.0)
        self._computes_alone = runner.has_embedding and runner.has_head
        self._draws = DrawReader(self._inbox.put, self.post_failure)
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._thread.start()

    # --- called from other threads ---------------------------------------------------------------------

    def post_link(self, link: Link) -> None:
        self._inbox.put(lambda: setattr(self, "_next_link", link))

    def post_steps(self, steps: list[stage_pb2.Step]) -> None:
        self._inbox.put(lambda: self._take_steps(steps))

    def post_frame(self, frame: Frame) -> None:
        self._inbox.put(lambda: self._take_frame(frame))

    def post_failure(self, error: Exception) -> None:
        def fail() -> None:
            raise error

        self._inbox.put(fail)

    def close(self) -> None:
        """Ends the threads after the forward they are in. Idempotent."""
        self._inbox.put(None)
        self._draws.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def busy_fraction(self) -> float:
        """Share of the time since the last call that was spent computing."""
        now, busy = time.monotonic(), self._busy_s + self._draws.busy_s
        (then, before), self._reported = self._reported, (now, busy)
        return (busy - before) / max(now - then, 1e-9)

    # --- the engine's thread -----------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            with torch.inference_mode():
                while self._turn():
                    pass
        except Exception as error:
            known = device_fault(error) or error
            if isinstance(known, PipeLLMError):
                self._on_failure(known)
                return
            self._log.error("engine_failed", exc_info=error)
            self._on_failure(PipeLLMError(f"the stage's engine failed: {type(error).__name__}: {error}"))

    def _turn(self) -> bool:
        """Takes in what has arrived, then runs one forward. False when told to end."""
        work = self._next_ready()
        while work is None or not self._inbox.empty():
            event = self._inbox.get()
            if event is None:
                return False
            event()
            work = work or self._next_ready()
        self._run(work)
        return True

    def _take_steps(self, steps: list[stage_pb2.Step]) -> None:
        for step in steps:
            self.sequences.enter(step)
            if not step.items:
                self._respond(acknowledged=step.step_id)
                continue
            if step.group not in self._groups:
                self._groups[step.group] = deque()
                self._turns.append(step.group)
            self._groups[step.group].append(_Work(step))

    def _take_frame(self, frame: Frame) -> None:
        if frame.epoch != self.epoch:
            self._log.warning("foreign_frame_dropped", frame_epoch=frame.epoch)
        elif frame.kind == FrameKind.TOKENS:
            self._take_tokens(frame)
        elif (
            len(self._frames) >= _MAX_FRAMES
            or frame.window != self._window
            or frame.payload.dtype != np.float32
            or self._runner.has_embedding
        ):
            raise CorruptDataError(
                f"link: hidden states for window {frame.window} (step {frame.step_id}) came to window "
                f"{self._window}, where {len(self._frames)} frames wait"
            )
        else:
            # The frame's bytes are read-only; a backend may work in place.
            self._frames[frame.step_id, frame.repeat] = torch.from_numpy(frame.payload.copy())

    def _take_tokens(self, frame: Frame) -> None:
        work = self._undrawn.get(frame.step_id)
        expected = sum(len(item.sample_positions) for item in work.step.items) if work is not None else 0
        if work is None or frame.repeat >= work.repeat or frame.payload.shape != (expected, 1):
            raise CorruptDataError(
                f"link: {frame.payload.shape[0]} tokens of step {frame.step_id}, repeat {frame.repeat}, came "
                f"where {expected} were due"
            )
        self._enter_drawn(work, frame.repeat, frame.payload[:, 0].tolist())
        if frame.repeat == work.step.repeat - 1:
            del self._undrawn[frame.step_id]

    def _enter_drawn(self, work: _Work, repeat: int, tokens: list[int]) -> None:
        drawn = iter(tokens)
        for item, generation in zip(work.step.items, work.generations or (), strict=True):
            sequence = self.sequences.get(item.sequence_id)
            for position in item.sample_positions:
                token = next(drawn)
                # Else freed or cut meanwhile: the token is overrun.
                if sequence is not None and sequence.generation == generation:
                    sequence.set_tokens(position + repeat + 1, (token,))

    def _next_ready(self) -> _Work | None:
        for _ in range(len(self._turns)):
            group = self._turns[0]
            self._turns.rotate(-1)
            works = self._groups[group]
            if works and self._is_ready(works[0]):
                return works[0]
        return None

    def _is_ready(self, work: _Work) -> bool:
        step = work.step
        if self._is_overrun(step):
            return True
        if work.generations is None:
            work.generations = self.sequences.begin(step, needs_tokens=self._runner.has_embedding)
            if work.generations is None:
                return False
        if not self._runner.has_embedding:
            return (step.step_id, work.repeat) in self._frames
        if all(
            len(self.sequences[item.sequence_id].tokens)
            >= item.start_position + item.num_tokens + work.repeat
            for item in step.items
        ):
            return True
        decoder = self._decoder_for(step)
        return decoder is not None and decoder.continues(self._decode_rows(work))

    def _is_overrun(self, step: stage_pb2.Step) -> bool:
        """Nobody waits for what the step computes. In a ring the others would wait for its frames."""
        return self._computes_alone and all(self.sequences[item.sequence_id].freed for item in step.items)

    def _run(self, work: _Work) -> None:
        if self._is_overrun(work.step):
            self.sequences.fill_skipped(work.step)
            self._end(work.step, queued=True)
            self._respond([], work.step.step_id)
        elif (decoder := self._decoder_for(work.step)) is not None:
            self._issue(work, decoder)
        else:
            self._compute(work)

    def _compute(self, work: _Work) -> None:
        started = time.monotonic()
        step, repeat = work.step, work.repeat
        hidden_states = self._forward(work)
        if not self._runner.has_head:
            self._send(FrameKind.HIDDEN_STATES, step, repeat, hidden_states.cpu().numpy())
            if self._runner.has_embedding and any(item.sample_positions for item in step.items):
                self._undrawn.setdefault(step.step_id, work)
        work.repeat += 1
        done = work.repeat == step.repeat
        result = self._draw(work, repeat, hidden_states) if self._runner.has_head else None
        if done:
            self._end(step, queued=True)
        self._busy_s += time.monotonic() - started
        if done or result is not None:
            self._respond([result] if result is not None else [], step.step_id if done else None)

    def _end(self, step: stage_pb2.Step, queued: bool) -> None:
        if queued:
            self._groups[step.group].popleft()
        self.sequences.step_done(step)

    # --- decoding ahead of the host ------------------------------------------------------------------------

    def _decoder_for(self, step: stage_pb2.Step) -> Decoder | None:
        decoder = self._runner.decoder
        if decoder is None or len(step.items) > decoder.max_rows:
            return None
        single = all(item.num_tokens == 1 and len(item.sample_positions) == 1 for item in step.items)
        return decoder if single else None

    def _decode_rows(self, work: _Work) -> list[DecodeRow]:
        rows = []
        for item in work.step.items:
            sequence = self.sequences[item.sequence_id]
            rows.append(
                DecodeRow(
                    sequence_id=item.sequence_id,
                    generation=sequence.generation,
                    position=item.start_position + work.repeat,
                    tokens=sequence.tokens,
                    block_table=sequence.block_table,
                    options=sequence.options,
                )
            )
        return rows

    def _issue(self, work: _Work, decoder: Decoder) -> None:
        step, repeat = work.step, work.repeat
        count = min(step.repeat - repeat, decoder.max_repeat)
        draws = decoder.issue(self._decode_rows(work), count)
        work.repeat += count
        if work.repeat == step.repeat:
            self._groups[step.group].popleft()
        self._draws.put(draws, functools.partial(self._take_draws, work, repeat))

    def _take_draws(self, work: _Work, first: int, drawn: list[list[Drawn]]) -> None:
        step, results = work.step, []
        for repeat, row in enumerate(drawn, first):
            self._enter_drawn(work, repeat, [one.token_id for one in row])
            places = [(item.sequence_id, item.start_position + repeat + 1) for item in step.items]
            results.append(_result(step, repeat, places, row))
        done = first + len(drawn) == step.repeat
        if done:
            self._end(step, queued=False)
        self._respond(results, step.step_id if done else None)

    # --- one forward at a time -----------------------------------------------------------------------------

    def _forward(self, work: _Work) -> torch.Tensor:
        placed = []
        tokens: list[int] = []
        for item in work.step.items:
            sequence = self.sequences[item.sequence_id]
            start = item.start_position + work.repeat
            placed.append((start, item.num_tokens, sequence.block_table))
            if self._runner.has_embedding:
                tokens += sequence.tokens[start : start + item.num_tokens]
        batch = make_batch(placed, self.sequences.block_size)
        if self._runner.has_embedding:
            return self._runner.forward(batch, np.asarray(tokens, dtype=np.int32))
        hidden_states = self._frames.pop((work.step.step_id, work.repeat))
        if len(hidden_states) != batch.num_rows:
            step_id = work.step.step_id
            raise CorruptDataError(
                f"link: {len(hidden_states)} rows of step {step_id} came where {batch.num_rows} were due"
            )
        return self._runner.forward(batch, hidden_states)

    def _draw(
        self, work: _Work, repeat: int, hidden_states: torch.Tensor
    ) -> stage_pb2.StepResult | None:
        """Draws a token after each position the step samples; enters, relays and reports them."""
        step = work.step
        rows: list[int] = []
        options: list[SamplingOptions] = []
        histories: list[list[int]] = []
        places: list[tuple[int, int]] = []  # sequence, position of the drawn token
        row = 0
        for item in step.items:
            sequence = self.sequences[item.sequence_id]
            for position in item.sample_positions:
                end = position + repeat + 1
                known = sequence.tokens
                rows.append(row + position - item.start_position)
                options.append(sequence.options)
                histories.append(known if len(known) == end else known[:end])
                places.append((item.sequence_id, end))
            row += item.num_tokens
        if not rows:
            return None
        drawn = self._runner.sample(hidden_states, np.asarray(rows), options, histories)
        tokens = [one.token_id for one in drawn]
        self._enter_drawn(work, repeat, tokens)
        if not self._runner.has_embedding:
            self._send(FrameKind.TOKENS, step, repeat, np.asarray(tokens, dtype=np.int32)[:, None])
        return _result(step, repeat, places, drawn)

    def _send(self, kind: FrameKind, step: stage_pb2.Step, repeat: int, payload: np.ndarray) -> None:
        if self._next_link is None:
            raise PipeLLMError("a step came before the link to the next stage was attached")
        self._next_link.send(Frame(kind, self.epoch, step.step_id, repeat, payload))

    def _respond(self, results: Sequence[stage_pb2.StepResult] = (), acknowledged: int | None = None) -> None:
        self._on_response(
            stage_pb2.ExecuteResponse(
                results=results, acknowledged_steps=() if acknowledged is None else (acknowledged,)
            )
        )


def _result(
    step: stage_pb2.Step, repeat: int, places: Sequence[tuple[int, int]], drawn: Sequence[Drawn]
) -> stage_pb2.StepResult:
    """One iteration's tokens; `places`: the sequence and position of each.

    A sequence without one is computed on, with a filler, until the coordinator frees it: the others' steps
    are on their way with it."""
    result = stage_pb2.StepResult(step_id=step.step_id, repeat=repeat)
    for (sequence_id, position), one in zip(places, drawn, strict=True):
        if one.failure:
            result.failures.add(sequence_id=sequence_id, position=position, reason=one.failure)
            continue
        result.tokens.add(
            sequence_id=sequence_id,
            position=position,
            token_id=one.token_id,
            logprob=one.logprob,
            top=[model_pb2.TokenLogprob(token_id=token, logprob=value) for token, value in one.top],
        )
    return result
