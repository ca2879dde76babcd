"""The soak's schedules are valid and varied, plays agree, and a backend that differs is seen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.gguf.reader import GGUFFile
from stage import soak
from stage.backends.base import Backend
from stage.backends.reference import ReferenceBackend
from stage.model.registry import build_spec
from tests.gguf_files import write_tiny_llama
from tests.stage.eager_decoder import DecodingBackend


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", layers=1)


def played(model: Path, backend: Backend, schedule: soak.Schedule, delays: bool = False) -> list[soak.Drawn]:
    with GGUFFile.open(model) as file, torch.inference_mode():
        return soak.play(file, build_spec(file, 256), backend, schedule, delays)


def test_a_schedule_is_pure_and_has_all_kinds_of_steps() -> None:
    schedule = soak.make_schedule(3, 400, 512, 256)
    assert schedule == soak.make_schedule(3, 400, 512, 256)
    assert schedule != soak.make_schedule(4, 400, 512, 256)
    steps = schedule.steps
    assert schedule.num_sequences > 10
    assert any(step.repeat > 4 for step in steps)
    assert any(len({item.from_ring for item in step.items}) == 2 for step in steps), "chunks beside decode"
    freed = [sequence_id for step in steps for sequence_id in step.freed_sequence_ids]
    assert sorted(freed) == list(range(1, schedule.num_sequences + 1))


def test_every_way_draws_the_same(model: Path) -> None:
    schedule = soak.make_schedule(1, 150, 512, 256)
    want = played(model, ReferenceBackend(), schedule)
    drawn = {(sequence, position) for sequence, position, _, _ in want}
    assert len(drawn) == len(want) > 150
    assert soak.first_difference(want, played(model, ReferenceBackend(), schedule, delays=True)) is None


def test_a_backend_that_decodes_ahead_is_soaked_too(model: Path) -> None:
    """Rows of a batch are computed alike in any company on the reference, so the two must agree."""
    schedule = soak.make_schedule(2, 100, 512, 256)
    ahead, plain = (played(model, one, schedule) for one in (DecodingBackend(), ReferenceBackend()))
    assert soak.first_difference(sorted(ahead), sorted(plain)) is None


def test_one_wrong_bit_is_seen(model: Path) -> None:
    class Wrong(ReferenceBackend):
        calls = 0

        def logits(self, head: object, hidden_states: torch.Tensor) -> torch.Tensor:
            logits = super().logits(head, hidden_states)  # type: ignore[arg-type]
            self.calls += 1
            if self.calls == 60:
                logits[0] += torch.linspace(0, 60, logits.shape[1])
            return logits

    schedule = soak.make_schedule(1, 100, 512, 256)
    want, got = played(model, ReferenceBackend(), schedule), played(model, Wrong(), schedule)
    assert soak.first_difference(want, got) is not None
