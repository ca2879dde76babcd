"""Step descriptions as a coordinator sends them, and the tokens they should lead to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from common.gguf.reader import GGUFFile
from protos import stage_pb2
from stage.backends.base import make_batch
from stage.backends.reference import ReferenceBackend
from stage.model.registry import build_spec
from stage.runner import Runner

BLOCK_SIZE = 8
NUM_BLOCKS = 32

# top_p and the penalties have neutral values of 1; everything else is off at 0. Temperature 0 is greedy.
GREEDY = stage_pb2.SequenceStart(
    sampling=stage_pb2.ResolvedSampling(top_p=1.0, typical_p=1.0, repeat_penalty=1.0)
)


def prompt_step(
    step_id: int, sequence_id: int, ids: Sequence[int], blocks: Sequence[int], group: int = 0
) -> stage_pb2.Step:
    """A sequence's whole prompt, greedy; a token is drawn after its last position."""
    item = stage_pb2.StepItem(
        sequence_id=sequence_id, num_tokens=len(ids), token_ids=ids, sample_positions=[len(ids) - 1],
        new_blocks=blocks, start=GREEDY,
    )  # fmt: skip
    return stage_pb2.Step(step_id=step_id, group=group, repeat=1, items=[item])


def decode_step(
    step_id: int, sequence_id: int, position: int, repeat: int = 1, group: int = 0
) -> stage_pb2.Step:
    """`repeat` tokens more, the first computed row at `position`, tokens from the ring."""
    item = stage_pb2.StepItem(
        sequence_id=sequence_id, start_position=position, num_tokens=1, from_ring=True,
        sample_positions=[position],
    )  # fmt: skip
    return stage_pb2.Step(step_id=step_id, group=group, repeat=repeat, items=[item])


def cut_step(step_id: int, sequence_id: int, position: int, ids: Sequence[int]) -> stage_pb2.Step:
    """What the sequence holds from `position` on gives way to `ids`; a token is drawn after the last one."""
    item = stage_pb2.StepItem(
        sequence_id=sequence_id, start_position=position, num_tokens=len(ids), token_ids=ids,
        sample_positions=[position + len(ids) - 1], truncate_to=position,
    )  # fmt: skip
    return stage_pb2.Step(step_id=step_id, repeat=1, items=[item])


def free_step(step_id: int, *sequence_ids: int) -> stage_pb2.Step:
    return stage_pb2.Step(step_id=step_id, repeat=1, freed_sequence_ids=sequence_ids)


def load_runner(path: Path, layer_start: int, layer_end: int, num_layers: int) -> Runner:
    with GGUFFile.open(path) as file:
        return Runner.load(
            ReferenceBackend(), file, build_spec(file), layer_start, layer_end,
            embedding=layer_start == 0, head=layer_end == num_layers,
            num_kv_blocks=NUM_BLOCKS, kv_block_size=BLOCK_SIZE,
        )  # fmt: skip


def greedy_by_hand(path: Path, num_layers: int, ids: Sequence[int], count: int) -> list[int]:
    """The `count` tokens that a runner with the whole model picks, driven row by row."""
    runner = load_runner(path, 0, num_layers, num_layers)
    table = np.arange(NUM_BLOCKS, dtype=np.int32)
    known, computed = list(ids), 0
    while len(known) < len(ids) + count:
        batch = make_batch([(computed, len(known) - computed, table)], BLOCK_SIZE)
        hidden_states = runner.forward(batch, np.asarray(known[computed:], np.int32))
        computed = len(known)
        known.append(int(runner.logits(hidden_states, np.array([batch.num_rows - 1])).argmax()))
    runner.close()
    return known[len(ids) :]
