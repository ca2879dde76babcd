"""Engines joined to a ring within this process: relayed tokens, repeats, groups, frees, damaged frames."""

from __future__ import annotations

import queue
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common.errors import CorruptDataError, InvalidRequestError, PipeLLMError
from common.wire import Frame, FrameKind
from protos import stage_pb2
from stage.engine import Engine
from stage.sequences import SequenceTable
from tests.gguf_files import spoil_token, write_tiny_llama
from tests.stage import steps

LAYERS, VOCAB, EPOCH = 4, 512, 7
HIDDEN_SIZE = 64
SPOILT = 410  # a token with an embedding of NaN, in a model of its own
TIMEOUT_S = 20
PROMPT = [1, 300, 40, 270, 333]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", layers=LAYERS)


class InProcessLink:
    """Carries frames over as bytes; `hold` tells which ones wait until `release`."""

    carrier = "in-process"
    round_trip_s = 0.0

    def __init__(self, receiver: Engine, window: int) -> None:
        self._receiver = receiver
        self._window = window
        self.held: list[Frame] = []
        self.hold: Callable[[Frame], bool] = lambda frame: False

    def send(self, frame: Frame) -> None:
        if self.hold(frame):
            self.held.append(frame)
        else:
            self._receiver.post_frame(Frame.decode(replace(frame, window=self._window).encode()))

    def release(self) -> None:
        self.hold = lambda frame: False
        for frame in self.held:
            self.send(frame)

    def close(self) -> None:
        pass


class Ring:
    """A first and a last stage of one model. What they say arrives in `said`, as (stage, response)."""

    def __init__(self, model: Path) -> None:
        self.said: queue.SimpleQueue[tuple[int, stage_pb2.ExecuteResponse]] = queue.SimpleQueue()
        self.failures: list[queue.SimpleQueue[PipeLLMError]] = [queue.SimpleQueue(), queue.SimpleQueue()]
        self.engines = [self._engine(model, 0, (0, 2)), self._engine(model, 1, (2, 4))]
        self.links = [InProcessLink(self.engines[1 - index], 1 - index) for index in range(2)]
        for engine, link in zip(self.engines, self.links, strict=True):
            engine.post_link(link)
        self.tokens: dict[int, list[int]] = {}  # drawn so far, by sequence
        self.failed: dict[int, list[int]] = {}  # positions without a token
        self._unacknowledged: set[tuple[int, int]] = set()  # (stage, step)

    def _engine(self, model: Path, index: int, layers: tuple[int, int]) -> Engine:
        return Engine(
            steps.load_runner(model, *layers, LAYERS),
            SequenceTable(steps.NUM_BLOCKS, steps.BLOCK_SIZE, max_step_tokens=64, vocab_size=VOCAB),
            EPOCH,
            index,
            lambda response: self.said.put((index, response)),
            self.failures[index].put,
        )

    def post(self, *described: stage_pb2.Step) -> None:
        for index, engine in enumerate(self.engines):
            engine.post_steps(list(described))
            self._unacknowledged |= {(index, step.step_id) for step in described}

    def listen(self) -> None:
        """Takes in one response."""
        index, response = self.said.get(timeout=TIMEOUT_S)
        for step_id in response.acknowledged_steps:
            self._unacknowledged.remove((index, step_id))
        for result in response.results:
            assert index == 1, "only the last stage draws"
            for token in result.tokens:
                drawn = self.tokens.setdefault(token.sequence_id, [])
                drawn.append(token.token_id)
                assert token.position == len(PROMPT) + len(drawn) - 1
            for failure in result.failures:
                positions = self.failed.setdefault(failure.sequence_id, [])
                positions.append(failure.position)
                assert "not numbers" in failure.reason

    def results(self, step_id: int) -> list[stage_pb2.StepResult]:
        """What the last stage says until it has acknowledged a step."""
        results: list[stage_pb2.StepResult] = []
        while (1, step_id) in self._unacknowledged:
            index, response = self.said.get(timeout=TIMEOUT_S)
            self._unacknowledged -= {(index, acknowledged) for acknowledged in response.acknowledged_steps}
            results += response.results
        return results

    def finish(self) -> None:
        """Until both stages have acknowledged all they were told."""
        while self._unacknowledged:
            self.listen()
        assert all(failures.empty() for failures in self.failures)

    def failure(self, index: int) -> PipeLLMError:
        return self.failures[index].get(timeout=TIMEOUT_S)


@pytest.fixture
def ring(model: Path) -> Iterator[Ring]:
    made = Ring(model)
    yield made
    for engine in made.engines:
        engine.close()


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    return steps.greedy_by_hand(model, LAYERS, PROMPT, 10)


def tokens_frame(step_id: int, *tokens: int, repeat: int = 0, epoch: int = EPOCH) -> Frame:
    payload = np.asarray(tokens, np.int32)[:, None]
    return Frame(FrameKind.TOKENS, epoch, step_id, repeat, payload)


def hidden_frame(step_id: int, rows: int, *, window: int = 1, epoch: int = EPOCH) -> Frame:
    payload = np.zeros((rows, HIDDEN_SIZE), np.float32)
    return Frame(FrameKind.HIDDEN_STATES, epoch, step_id, 0, payload, window=window)


def test_tokens_come_round_by_the_ring(ring: Ring, expected: list[int]) -> None:
    """All steps are there at once: the first stage can know the tokens by the ring alone."""
    ring.post(steps.prompt_step(1, 9, PROMPT, [4, 2, 11]))
    ring.post(*(steps.decode_step(2 + n, 9, len(PROMPT) + n) for n in range(9)))
    ring.finish()
    assert ring.tokens == {9: expected}
    # The last one may still be on its way.
    assert ring.engines[0].sequences[9].tokens[: len(PROMPT) + 9] == PROMPT + expected[:-1]


def test_a_repeated_step_draws_as_many_tokens(ring: Ring, expected: list[int]) -> None:
    ring.post(steps.prompt_step(1, 9, PROMPT, [0, 1]), steps.decode_step(2, 9, len(PROMPT), repeat=6))
    ring.post(steps.decode_step(3, 9, len(PROMPT) + 6, repeat=3))
    ring.finish()
    assert ring.tokens == {9: expected}


def test_one_groups_wait_is_anothers_time(ring: Ring, model: Path, expected: list[int]) -> None:
    """The tokens of group 0 are held up on their way; group 1 goes on, and then group 0 too."""
    other = [1, 77, 500, 301, 299]
    ring.links[1].hold = lambda frame: frame.step_id % 2 == 1  # the steps of group 0
    ring.post(
        steps.prompt_step(1, 9, PROMPT, [4, 2], group=0), steps.prompt_step(2, 5, other, [6, 3], group=1)
    )
    for n in range(9):
        ring.post(steps.decode_step(3 + 2 * n, 9, len(PROMPT) + n, group=0))
        ring.post(steps.decode_step(4 + 2 * n, 5, len(other) + n, group=1))
    while len(ring.tokens.get(5, [])) < 10:
        ring.listen()
    assert ring.tokens[9] == expected[:1]
    ring.links[1].release()
    ring.finish()
    assert ring.tokens == {9: expected, 5: steps.greedy_by_hand(model, LAYERS, other, 10)}


def test_a_group_of_two_sequences(ring: Ring, model: Path, expected: list[int]) -> None:
    other = [1, 77, 500, 301, 299]
    first = steps.prompt_step(1, 9, PROMPT, [4, 2])
    first.items.extend(steps.prompt_step(1, 5, other, [6, 3]).items)
    second = steps.decode_step(2, 9, len(PROMPT), repeat=9)
    second.items.extend(steps.decode_step(2, 5, len(other)).items)
    ring.post(first, second)
    ring.finish()
    assert ring.tokens == {9: expected, 5: steps.greedy_by_hand(model, LAYERS, other, 10)}


def test_a_sequence_whose_logits_are_not_numbers_fails_alone(model: Path, tmp_path: Path) -> None:
    """It keeps step with its group until it is freed, and the group's other draws are what they were."""
    spoilt = spoil_token(Path(shutil.copy(model, tmp_path / "spoilt.gguf")), SPOILT)
    ring = Ring(spoilt)
    broken = [1, 77, SPOILT, 301, 299]
    first = steps.prompt_step(1, 9, PROMPT, [4, 2])
    first.items.extend(steps.prompt_step(1, 5, broken, [6, 3]).items)
    second = steps.decode_step(2, 9, len(PROMPT), repeat=3)
    second.items.extend(steps.decode_step(2, 5, len(broken)).items)
    ring.post(first, second)
    ring.finish()
    ring.post(steps.free_step(3, 5), steps.prompt_step(4, 6, PROMPT, [6, 3]))  # where the NaNs lie
    ring.finish()
    wanted = steps.greedy_by_hand(model, LAYERS, PROMPT, 4)
    assert ring.tokens == {9: wanted, 6: wanted[:1]}
    assert ring.failed == {5: [5, 6, 7, 8]}
    for engine in ring.engines:
        engine.close()


def test_a_sequence_is_freed_while_its_steps_are_pending(ring: Ring, expected: list[int]) -> None:
    """The steps before the free still run (their tokens are overrun), and then nothing is left."""
    ring.links[1].hold = lambda frame: True  # so that the free is there before the steps have run
    ring.post(
        steps.prompt_step(1, 9, PROMPT, [4, 2]), steps.decode_step(2, 9, len(PROMPT), repeat=4, group=1)
    )
    ring.post(steps.free_step(3, 9))
    while not ring.tokens:
        ring.listen()
    assert [len(engine.sequences) for engine in ring.engines] == [1, 1]
    ring.links[1].release()
    ring.finish()
    assert ring.tokens == {9: expected[:5]}
    deadline = time.monotonic() + TIMEOUT_S
    while any(len(engine.sequences) for engine in ring.engines) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [engine.sequences.blocks_in_use for engine in ring.engines] == [0, 0]
    # The number is free for another sequence.
    ring.tokens.clear()
    ring.post(steps.prompt_step(4, 9, PROMPT, [4, 2]))
    ring.finish()
    assert ring.tokens == {9: expected[:1]}


def test_a_cut_drops_the_tokens_that_are_still_on_their_way(ring: Ring, model: Path) -> None:
    """The first stage hears late what was drawn before the cut, while it waits for what is drawn after."""
    end = len(PROMPT)
    ring.links[1].hold = lambda frame: frame.step_id > 1
    ring.post(steps.prompt_step(1, 9, PROMPT, [4, 2]), steps.decode_step(2, 9, end))
    ring.post(steps.cut_step(3, 9, end, [77]), steps.decode_step(4, 9, end + 1, repeat=3))
    results = [result for result in ring.results(3) if result.step_id == 3]
    late, due = ring.links[1].held
    assert (late.step_id, due.step_id) == (2, 3)
    ring.engines[0].post_frame(Frame.decode(late.encode()))
    time.sleep(0.1)  # for a stage that would take it
    ring.engines[0].post_frame(Frame.decode(due.encode()))
    ring.links[1].hold = lambda frame: False
    results += ring.results(4)
    drawn = [token.token_id for result in results for token in result.tokens]
    assert drawn == steps.greedy_by_hand(model, LAYERS, [*PROMPT, 77], 4)


def test_frames_of_another_epoch_are_dropped(ring: Ring, expected: list[int]) -> None:
    ring.engines[0].post_frame(tokens_frame(1, 5, epoch=EPOCH - 1))
    ring.engines[1].post_frame(hidden_frame(1, len(PROMPT), epoch=EPOCH + 1))
    ring.post(steps.prompt_step(1, 9, PROMPT, [4, 2]), steps.decode_step(2, 9, len(PROMPT), repeat=3))
    ring.finish()
    assert ring.tokens == {9: expected[:4]}


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (tokens_frame(99, 5), "1 tokens of step 99, repeat 0, came where 0 were due"),
        (tokens_frame(1, 5, 6), "2 tokens of step 1, repeat 0, came where 1 were due"),
        (tokens_frame(1), "0 tokens of step 1"),
        (tokens_frame(1, 5, repeat=1), "repeat 1"),
        (hidden_frame(1, 5, window=0), "window 0"),
    ],
    ids=["unknown step", "too many", "none", "a repeat to come", "hidden states"],
)
def test_damage_ends_the_first_stage(ring: Ring, frame: Frame, message: str) -> None:
    ring.links[1].hold = lambda frame: True  # the true tokens; the damaged frame comes first
    ring.post(steps.prompt_step(1, 9, PROMPT, [4, 2]))
    ring.finish()
    ring.engines[0].post_frame(frame)
    error = ring.failure(0)
    assert type(error) is CorruptDataError and message in str(error)


@pytest.mark.parametrize(
    "frame", [hidden_frame(1, 5, window=0), hidden_frame(1, 5, window=2), tokens_frame(1, 5)]
)
def test_frames_for_another_window_end_the_last_stage(ring: Ring, frame: Frame) -> None:
    ring.engines[1].post_frame(frame)
    assert type(ring.failure(1)) is CorruptDataError


def test_a_frame_of_too_few_rows_ends_the_last_stage(ring: Ring) -> None:
    ring.links[0].hold = lambda frame: True
    ring.post(steps.prompt_step(1, 9, PROMPT, [4, 2]))
    ring.engines[1].post_frame(hidden_frame(1, len(PROMPT) - 1))
    assert isinstance(ring.failure(1), PipeLLMError)


def test_a_contradictory_step_ends_both_stages_once(ring: Ring) -> None:
    ring.post(steps.decode_step(1, 9, 5))
    for index in range(2):
        error = ring.failure(index)
        assert type(error) is InvalidRequestError and "sequence 9 is not here" in str(error)
        ring.engines[index].post_steps([steps.free_step(2)])  # nobody takes it any more
        ring.engines[index].close()
        assert ring.failures[index].empty()
    assert ring.said.empty()


def test_a_failure_told_from_outside_ends_the_engine(ring: Ring) -> None:
    error = CorruptDataError("the link broke")
    ring.engines[0].post_failure(error)
    assert ring.failure(0) is error
