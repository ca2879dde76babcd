"""A long random life of a stage, played several ways that must not differ in a bit.

A schedule of steps (prompts in chunks, decode with repeats, joins and leaves, all kinds of sampling) goes
through a real engine: as the stage runs it, without CUDA graphs, and with delays thrown onto the device's
stream. Its tokens and logprobs are compared.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from common.errors import CorruptDataError, DeadlineError, PipeLLMError
from common.gguf.reader import GGUFFile
from protos import stage_pb2
from stage.backends.base import Backend
from stage.engine import Engine
from stage.model.spec import ModelSpec
from stage.runner import Runner
from stage.sequences import SequenceTable

BLOCK_SIZE = 16
_MAX_SEQUENCES = 10
_MAX_LENGTH = 700  # over the border of the first context bucket
_MAX_STEP_TOKENS = 256
_RESPONSE_TIMEOUT_S = 120.0
_MAX_IN_FLIGHT = 4  # steps
_MAX_DELAY_CYCLES = 2_000_000  # about a millisecond

Drawn = tuple[int, int, int, float]  # sequence, position, token, logprob


@dataclass(frozen=True)
class Schedule:
    steps: tuple[stage_pb2.Step, ...]
    num_blocks: int
    num_sequences: int
    num_iterations: int


@dataclass(frozen=True)
class Difference:
    """The first draw that two plays disagree on."""

    one: Drawn
    other: Drawn


def make_schedule(seed: int, num_iterations: int, vocab_size: int, max_context: int) -> Schedule:
    """About `num_iterations` forwards. Pure: the same arguments give the same schedule."""
    longest = min(_MAX_LENGTH, max_context)
    writer = _ScheduleWriter(random.Random(seed), vocab_size, longest)
    while writer.num_iterations < num_iterations:
        writer.write_step()
    writer.write_end()
    return Schedule(tuple(writer.steps), writer.num_blocks, writer.num_sequences, writer.num_iterations)


def play(
    file: GGUFFile,
    spec: ModelSpec,
    backend: Backend,
    schedule: Schedule,
    delays: bool = False,
    loaded: Callable[[Backend], None] = lambda backend: None,
) -> list[Drawn]:
    """All draws of a schedule, in order. `loaded` is called once the layers are there. Closes the backend.
    Raises what the engine ends with."""
    answers: queue.SimpleQueue[stage_pb2.ExecuteResponse | PipeLLMError] = queue.SimpleQueue()
    num_layers = len(spec.layers)
    runner = Runner.load(
        backend, file, spec, 0, num_layers, embedding=True, head=True,
        num_kv_blocks=schedule.num_blocks, kv_block_size=BLOCK_SIZE,
    )  # fmt: skip
    loaded(backend)
    table = SequenceTable(schedule.num_blocks, BLOCK_SIZE, _MAX_STEP_TOKENS, spec.vocab_size)
    engine = Engine(runner, table, 1, 0, answers.put, answers.put)
    listener = _Listener(answers)
    try:
        with _delayed(backend.device) if delays else nullcontext():
            for step in schedule.steps:
                # What is freed is not computed any more: a free follows when all before it has been.
                listener.listen_until(0 if step.freed_sequence_ids else _MAX_IN_FLIGHT - 1)
                engine.post_steps([step])
                listener.num_waiting += 1
            listener.listen_until(0)
    finally:
        engine.close()
        runner.close()
    return listener.drawn


class _Listener:
    def __init__(self, answers: queue.SimpleQueue[stage_pb2.ExecuteResponse | PipeLLMError]) -> None:
        self.drawn: list[Drawn] = []
        self.num_waiting = 0  # steps posted and not acknowledged
        self._answers = answers

    def listen_until(self, num_waiting: int) -> None:
        while self.num_waiting > num_waiting:
            try:
                answer = self._answers.get(timeout=_RESPONSE_TIMEOUT_S)
            except queue.Empty:
                raise DeadlineError(f"soak: no answer within {_RESPONSE_TIMEOUT_S:g} s") from None
            if isinstance(answer, PipeLLMError):
                raise answer
            self.num_waiting -= len(answer.acknowledged_steps)
            for result in answer.results:
                for failure in result.failures:
                    raise CorruptDataError(f"soak: sequence {failure.sequence_id}: {failure.reason}")
                for token in result.tokens:
                    self.drawn.append((token.sequence_id, token.position, token.token_id, token.logprob))


def first_difference(one: Sequence[Drawn], other: Sequence[Drawn]) -> Difference | None:
    for a, b in zip(one, other, strict=True):
        if a != b:
            return Difference(a, b)
    return None


@contextmanager
def _delayed(device: torch.device) -> Iterator[None]:
    """Throws waits of random length onto the device's stream, or pauses between the host's own threads."""
    stop = threading.Event()
    draw = random.Random(0)

    def disturb() -> None:
        while not stop.wait(draw.uniform(0.0002, 0.004)):
            if device.type == "cuda":
                with torch.cuda.device(device):
                    torch.cuda._sleep(draw.randrange(_MAX_DELAY_CYCLES))
            else:
                until = time.monotonic() + draw.uniform(0.0, 0.001)
                while time.monotonic() < until:  # holds the interpreter
                    pass

    thread = threading.Thread(target=disturb, name="delays", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@dataclass
class _Alive:
    sequence_id: int
    prompt: list[int]
    length: int  # tokens it will have computed at its end
    blocks: list[int]
    start: stage_pb2.SequenceStart
    computed: int = 0


class _ScheduleWriter:
    def __init__(self, draw: random.Random, vocab_size: int, longest: int) -> None:
        self.steps: list[stage_pb2.Step] = []
        self.num_blocks = _MAX_SEQUENCES * -(-longest // BLOCK_SIZE)
        self.num_sequences = 0
        self.num_iterations = 0
        self._draw, self._vocab_size, self._longest = draw, vocab_size, longest
        self._free = list(range(self.num_blocks))
        self._alive: list[_Alive] = []

    def write_step(self) -> None:
        """Now and then a newcomer; prompts in chunks beside decode rows; else decode, repeated."""
        step = stage_pb2.Step(step_id=len(self.steps) + 1, repeat=1)
        while len(self._alive) < _MAX_SEQUENCES and (not self._alive or self._draw.random() < 0.1):
            self._alive.append(self._newcomer())
        decoding = [one for one in self._alive if one.computed >= len(one.prompt)]
        prompts = [one for one in self._alive if one.computed < len(one.prompt)]
        if not prompts:
            left = min(one.length - one.computed for one in decoding)
            step.repeat = self._draw.randint(1, min(left, 12))
        for one in decoding:
            self._add_decode(step, one)
        room = _MAX_STEP_TOKENS - len(decoding)
        for one in prompts:
            room -= self._add_chunk(step, one, room)
            if room <= 0:
                break
        self.num_iterations += step.repeat
        self.steps.append(step)
        over = [one for one in self._alive if one.computed >= one.length]
        if over:
            self._write_frees(over)

    def write_end(self) -> None:
        if self._alive:
            self._write_frees(list(self._alive))

    def _newcomer(self) -> _Alive:
        self.num_sequences += 1
        length = self._draw.randint(8, self._longest - 1)
        prompt_length = self._draw.randint(1, max(1, length // self._draw.randint(1, 8)))
        prompt = [self._draw.randrange(self._vocab_size) for _ in range(prompt_length)]
        blocks = [
            self._free.pop(self._draw.randrange(len(self._free))) for _ in range(-(-length // BLOCK_SIZE))
        ]
        return _Alive(self.num_sequences, prompt, length, blocks, self._options())

    def _options(self) -> stage_pb2.SequenceStart:
        greedy = self._draw.random() < 0.5
        sampling = stage_pb2.ResolvedSampling(
            temperature=0.0 if greedy else self._draw.choice((0.7, 1.0, 1.5)),
            top_k=self._draw.choice((0, 1, 40, 200)), top_p=self._draw.choice((0.9, 1.0)),
            min_p=self._draw.choice((0.0, 0.05)), typical_p=self._draw.choice((0.8, 1.0)),
            repeat_penalty=self._draw.choice((1.0, 1.1)), repeat_last_n=64,
            seed=self._draw.randrange(2**64),
        )  # fmt: skip
        return stage_pb2.SequenceStart(sampling=sampling, logprobs=self._draw.random() < 0.5)

    def _add_decode(self, step: stage_pb2.Step, one: _Alive) -> None:
        step.items.add(
            sequence_id=one.sequence_id, start_position=one.computed, num_tokens=1, from_ring=True,
            sample_positions=[one.computed],
        )  # fmt: skip
        one.computed += step.repeat

    def _add_chunk(self, step: stage_pb2.Step, one: _Alive, room: int) -> int:
        count = self._draw.randint(1, min(room, len(one.prompt) - one.computed))
        end = one.computed + count
        item = step.items.add(
            sequence_id=one.sequence_id, start_position=one.computed, num_tokens=count,
            token_ids=one.prompt[one.computed : end],
        )  # fmt: skip
        if one.computed == 0:
            item.start.CopyFrom(one.start)
            item.new_blocks.extend(one.blocks)
        if end == len(one.prompt):
            item.sample_positions.append(end - 1)
        one.computed = end
        return count

    def _write_frees(self, over: Sequence[_Alive]) -> None:
        """One group's steps run in order: what a later step does with the blocks comes after."""
        freed = [one.sequence_id for one in over]
        self.steps.append(stage_pb2.Step(step_id=len(self.steps) + 1, repeat=1, freed_sequence_ids=freed))
        for one in over:
            self._free += one.blocks
            self._alive.remove(one)
