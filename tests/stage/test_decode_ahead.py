"""An engine whose backend decodes by itself: steps are issued ahead, read behind, and lose nothing."""

from __future__ import annotations

import queue
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import DeviceLostError, PipeLLMError
from common.gguf.reader import GGUFFile
from protos import stage_pb2
from stage.engine import Engine
from stage.model.registry import build_spec
from stage.runner import Runner
from stage.sequences import SequenceTable
from tests.gguf_files import spoil_token, write_tiny_llama
from tests.stage import steps
from tests.stage.eager_decoder import DecodingBackend

LAYERS, VOCAB, TIMEOUT_S = 2, 512, 20
PROMPT = [1, 300, 40, 270, 333]
OTHER = [1, 77, 500, 301, 299]


class Stage:
    def __init__(self, model: Path) -> None:
        backend = DecodingBackend()
        with GGUFFile.open(model) as file:
            runner = Runner.load(
                backend, file, build_spec(file), 0, LAYERS, embedding=True, head=True,
                num_kv_blocks=steps.NUM_BLOCKS, kv_block_size=steps.BLOCK_SIZE,
            )  # fmt: skip
        self.decoder = backend.made
        self.said: queue.SimpleQueue[stage_pb2.ExecuteResponse] = queue.SimpleQueue()
        self.failures: queue.SimpleQueue[PipeLLMError] = queue.SimpleQueue()
        sequences = SequenceTable(steps.NUM_BLOCKS, steps.BLOCK_SIZE, max_step_tokens=64, vocab_size=VOCAB)
        self.engine = Engine(runner, sequences, 1, 0, self.said.put, self.failures.put)
        self.tokens: dict[int, list[int]] = {}
        self.failed: dict[int, list[int]] = {}  # positions without a token, by sequence
        self.acknowledged: list[int] = []

    def results_until(self, step_id: int) -> Iterator[stage_pb2.StepResult]:
        """All that comes to the acknowledgement of a step; iterations must come in order."""
        repeats: dict[int, int] = {}
        while step_id not in self.acknowledged:
            response = self.said.get(timeout=TIMEOUT_S)
            for result in response.results:
                assert result.repeat == repeats.get(result.step_id, 0)
                repeats[result.step_id] = result.repeat + 1
                yield result
            self.acknowledged += response.acknowledged_steps
        assert self.failures.empty()

    def listen_until(self, step_id: int) -> None:
        """Takes in what is drawn to the acknowledgement of a step, token after token."""
        for result in self.results_until(step_id):
            for token in result.tokens:
                drawn = self.tokens.setdefault(token.sequence_id, [])
                drawn.append(token.token_id)
                assert token.position == len(PROMPT) + len(drawn) - 1
            for failure in result.failures:
                self.failed.setdefault(failure.sequence_id, []).append(failure.position)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", layers=LAYERS)


@pytest.fixture
def stage(model: Path) -> Iterator[Stage]:
    made = Stage(model)
    yield made
    made.decoder.may_tell.set()
    made.engine.close()


def together(*described: stage_pb2.Step) -> stage_pb2.Step:
    """One step with the items of several."""
    first, *others = described
    for other in others:
        first.items.extend(other.items)
    return first


def test_steps_are_issued_before_the_tokens_of_those_before_are_read(stage: Stage, model: Path) -> None:
    stage.decoder.may_tell.clear()
    stage.engine.post_steps([
        steps.prompt_step(1, 9, PROMPT, [4, 2, 11]),
        *(steps.decode_step(2 + n, 9, len(PROMPT) + 4 * n, repeat=4) for n in range(3)),
    ])  # fmt: skip
    stage.listen_until(1)
    while len(stage.decoder.issued) < 3:
        assert stage.failures.empty()
    assert stage.decoder.issued == [([9], 4, False), ([9], 4, True), ([9], 4, True)]
    assert len(stage.tokens[9]) == 1
    stage.decoder.may_tell.set()
    stage.listen_until(4)
    assert stage.tokens[9] == steps.greedy_by_hand(model, LAYERS, PROMPT, 13)


def test_a_newcomer_is_computed_between_and_joins(stage: Stage, model: Path) -> None:
    stage.engine.post_steps([
        steps.prompt_step(1, 9, PROMPT, [4, 2]),
        steps.decode_step(2, 9, len(PROMPT), repeat=4),
        together(steps.decode_step(3, 9, len(PROMPT) + 4), steps.prompt_step(3, 5, OTHER, [6, 3])),
        together(steps.decode_step(4, 9, len(PROMPT) + 5, repeat=3), steps.decode_step(4, 5, len(OTHER))),
        together(steps.decode_step(5, 9, len(PROMPT) + 8, repeat=2), steps.decode_step(5, 5, len(OTHER) + 3)),
    ])  # fmt: skip
    stage.listen_until(5)
    assert stage.decoder.issued == [([9], 4, False), ([9, 5], 3, False), ([9, 5], 2, True)]
    assert stage.tokens[9] == steps.greedy_by_hand(model, LAYERS, PROMPT, 11)
    assert stage.tokens[5] == steps.greedy_by_hand(model, LAYERS, OTHER, 6)


def test_a_long_repeat_is_issued_in_parts(stage: Stage, model: Path) -> None:
    stage.engine.post_steps([
        steps.prompt_step(1, 9, PROMPT, [4, 2, 11, 7]), steps.decode_step(2, 9, len(PROMPT), repeat=19)
    ])  # fmt: skip
    stage.listen_until(2)
    assert [repeat for _, repeat, _ in stage.decoder.issued] == [8, 8, 3]
    assert stage.tokens[9] == steps.greedy_by_hand(model, LAYERS, PROMPT, 20)


def test_overrun_of_a_freed_sequence_is_not_computed(stage: Stage) -> None:
    stage.decoder.may_tell.clear()
    stage.engine.post_steps([
        steps.prompt_step(1, 9, PROMPT, [4, 2, 11]), steps.decode_step(2, 9, len(PROMPT), repeat=4)
    ])  # fmt: skip
    stage.listen_until(1)
    # Its tokens are not known, and the sequence leaves the rows: it waits, until it is freed.
    stage.engine.post_steps([
        steps.prompt_step(3, 5, OTHER, [6, 3]), steps.decode_step(4, 5, len(OTHER)),
        steps.decode_step(5, 9, len(PROMPT) + 4, repeat=4), steps.free_step(6, 9),
    ])  # fmt: skip
    stage.decoder.may_tell.set()
    stage.listen_until(5)
    stage.listen_until(6)
    assert ([9], 4, True) not in stage.decoder.issued[1:]
    assert len(stage.engine.sequences) == 1


def test_a_freed_sequence_keeps_no_other_waiting(stage: Stage, model: Path) -> None:
    """What it would have drawn next to none but itself is skipped; a later step has it in company."""
    stage.engine.post_steps([
        steps.prompt_step(1, 9, PROMPT, [4, 2, 11]), steps.decode_step(2, 9, len(PROMPT), repeat=4),
        together(steps.prompt_step(3, 5, OTHER, [6, 3]), steps.decode_step(3, 9, len(PROMPT) + 4)),
        together(steps.decode_step(4, 5, len(OTHER), repeat=3), steps.decode_step(4, 9, len(PROMPT) + 5)),
        steps.free_step(5, 9),
    ])  # fmt: skip
    drawn = [token for result in stage.results_until(4) for token in result.tokens if token.sequence_id == 5]
    assert [token.token_id for token in drawn] == steps.greedy_by_hand(model, LAYERS, OTHER, 4)
    stage.listen_until(5)
    assert len(stage.engine.sequences) == 1


def drawn_after(stage: Stage, cut: int, last: int) -> list[int]:
    """The tokens of step `cut` and those after it, to the acknowledgement of step `last`."""
    results = [result for result in stage.results_until(last) if result.step_id >= cut]
    return [token.token_id for result in results for token in result.tokens]


def test_a_cut_drops_the_draws_that_are_under_way(stage: Stage, model: Path) -> None:
    end = len(PROMPT)
    first = steps.greedy_by_hand(model, LAYERS, PROMPT, 1)
    stage.decoder.may_tell.clear()
    stage.engine.post_steps([
        steps.prompt_step(1, 9, PROMPT, [4, 2, 11]), steps.decode_step(2, 9, end, repeat=8),
    ])  # fmt: skip
    stage.listen_until(1)
    stage.engine.post_steps([
        steps.cut_step(3, 9, end + 1, [77]), steps.decode_step(4, 9, end + 2, repeat=3)
    ])  # fmt: skip
    while len(stage.decoder.issued) < 3:  # they wait for nothing that is dropped
        assert stage.failures.empty()
    stage.decoder.may_tell.set()
    assert drawn_after(stage, 3, 4) == steps.greedy_by_hand(model, LAYERS, [*PROMPT, *first, 77], 4)


def test_a_cut_waits_for_the_tokens_before_it_and_no_longer(stage: Stage, model: Path) -> None:
    end = len(PROMPT)
    kept = steps.greedy_by_hand(model, LAYERS, PROMPT, 3)
    stage.engine.post_steps([
        steps.prompt_step(1, 9, PROMPT, [4, 2, 11]), steps.decode_step(2, 9, end, repeat=8),
        steps.cut_step(3, 9, end + 3, [77, 5]), steps.decode_step(4, 9, end + 5, repeat=3),
    ])  # fmt: skip
    assert drawn_after(stage, 3, 4) == steps.greedy_by_hand(model, LAYERS, [*PROMPT, *kept, 77, 5], 4)


def test_the_device_does_not_go_on_with_what_was_cut(stage: Stage, model: Path) -> None:
    """What follows a cut may stand at the very position where the device was to go on."""
    end, others = len(PROMPT), [77, 5, 301, 9]
    stage.engine.post_steps([
        steps.prompt_step(1, 9, PROMPT, [4, 2, 11]), steps.decode_step(2, 9, end, repeat=4),
        steps.cut_step(3, 9, end, others), steps.decode_step(4, 9, end + 4, repeat=3),
    ])  # fmt: skip
    assert drawn_after(stage, 3, 4) == steps.greedy_by_hand(model, LAYERS, [*PROMPT, *others], 4)


def test_the_device_does_not_go_on_with_a_sequence_that_had_the_same_number(
    stage: Stage, model: Path
) -> None:
    for first, ids in ((1, PROMPT), (4, OTHER)):
        step = steps.prompt_step(first, 9, ids, [4, 2])
        stage.engine.post_steps([step, steps.decode_step(first + 1, 9, len(ids), repeat=first)])
        assert drawn_after(stage, first, first + 1) == steps.greedy_by_hand(model, LAYERS, ids, 1 + first)
        stage.engine.post_steps([steps.free_step(first + 2, 9)])
        stage.listen_until(first + 2)


def test_sampled_draws_do_not_depend_on_how_far_ahead_they_are_issued(model: Path) -> None:
    def drawn(*repeats: int) -> list[int]:
        stage = Stage(model)
        prompt = steps.prompt_step(1, 9, PROMPT, [4, 2, 11])
        options = prompt.items[0].start.sampling
        options.temperature, options.seed, options.repeat_penalty, options.repeat_last_n = 0.9, 5, 1.2, 8
        described, position = [prompt], len(PROMPT)
        for step_id, repeat in enumerate(repeats, 2):
            described.append(steps.decode_step(step_id, 9, position, repeat=repeat))
            position += repeat
        stage.engine.post_steps(described)
        stage.listen_until(1 + len(repeats))
        stage.engine.close()
        return stage.tokens[9]

    assert drawn(12) == drawn(1, 2, 4, 5) == drawn(*[1] * 12)


def test_a_sequence_whose_logits_are_not_numbers_fails_alone(model: Path, tmp_path: Path) -> None:
    spoilt = 411
    stage = Stage(spoil_token(Path(shutil.copy(model, tmp_path / "spoilt.gguf")), spoilt))
    broken, end = [1, 77, spoilt, 301, 299], len(PROMPT)
    stage.engine.post_steps([
        together(steps.prompt_step(1, 9, PROMPT, [4, 2, 11]), steps.prompt_step(1, 5, broken, [6, 3])),
        together(steps.decode_step(2, 9, end, repeat=3), steps.decode_step(2, 5, end)),
        together(steps.decode_step(3, 9, end + 3, repeat=3), steps.decode_step(3, 5, end + 3)),
    ])  # fmt: skip
    stage.listen_until(3)
    stage.engine.close()
    assert stage.tokens == {9: steps.greedy_by_hand(model, LAYERS, PROMPT, 7)}
    assert stage.failed == {5: [5, 6, 7, 8, 9, 10, 11]}


def test_a_device_that_fails_ends_the_engine(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise DeviceLostError("CUDA error while launching: an illegal memory access")

    monkeypatch.setattr("tests.stage.eager_decoder.Told.wait", fail)
    stage.engine.post_steps([
        steps.prompt_step(1, 9, PROMPT, [4, 2]), steps.decode_step(2, 9, len(PROMPT), repeat=2)
    ])  # fmt: skip
    assert type(stage.failures.get(timeout=TIMEOUT_S)) is DeviceLostError
    stage.engine.close()
