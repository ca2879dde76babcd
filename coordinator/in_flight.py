"""Steps between their issue and the last word on them: their descriptions, and what is still to come back.

Which sequences a step holds is the scheduler's choice, and what a finished step means for blocks its affair.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.errors import PipeLLMError
from coordinator.pace import Pace
from coordinator.sequence import Residency
from protos import stage_pb2


@dataclass(eq=False)
class Group:
    """Sequences that go round the ring together, and how much of theirs is on its way."""

    index: int
    residencies: dict[int, Residency] = field(default_factory=dict)  # by wire id, oldest first
    to_free: list[Residency] = field(default_factory=list)  # ended, the stages not yet told
    pace: Pace = field(default_factory=Pace)
    iterations_in_flight: int = 0  # issued, of steps that sample, without their result
    sampling_steps_in_flight: int = 0  # the steps these belong to
    prompt_steps_in_flight: int = 0  # issued steps that hold prompt chunks, not acknowledged by all


@dataclass(eq=False, slots=True)
class _IssuedStep:
    group: Group
    repeat: int
    issued_s: float
    freed: list[Residency]
    waiting_for: int  # bit set of the stages that have not acknowledged it
    rows: list[tuple[Residency, int]] = field(default_factory=list)  # with the end of its computed positions
    samples: bool = False
    has_prompt: bool = False
    num_results: int = 0

    @property
    def num_missing(self) -> int:
        """Iterations whose results have not come."""
        return self.repeat - self.num_results if self.samples else 0


class InFlight:
    """All issued steps of an epoch that some stage has not acknowledged.

    The last stage sends a step's results before it acknowledges it, or with that. It may acknowledge a step
    without having run all of it once all its sequences have been freed: the results of the iterations it
    skipped then never come. (Of a step that samples nothing no result tells, so once a sequence is freed its
    rows in such a step count as not computed.)
    """

    def __init__(self, num_stages: int) -> None:
        self._all_stages = (1 << num_stages) - 1
        self._steps: dict[int, _IssuedStep] = {}
        self._last_step_id = 0

    def __len__(self) -> int:
        return len(self._steps)

    def issue(
        self, group: Group, rows: list[tuple[Residency, int]], repeat: int, now: float
    ) -> stage_pb2.Step:
        """The next step: each row's next so many tokens, and the group's frees."""
        self._last_step_id += 1
        step = stage_pb2.Step(step_id=self._last_step_id, group=group.index, repeat=repeat)
        issued = _IssuedStep(group, repeat, now, group.to_free, self._all_stages)
        group.to_free = []
        for residency in issued.freed:
            step.freed_sequence_ids.append(residency.wire_id)
            residency.freed = True
            residency.unacknowledged += 1
        for residency, num_tokens in rows:
            issued.has_prompt |= residency.is_prefilling
            issued.samples |= _add_item(step, residency, num_tokens)
            residency.num_issued += num_tokens + repeat - 1
            residency.unacknowledged += 1
            issued.rows.append((residency, residency.num_issued))
        group.iterations_in_flight += repeat * issued.samples
        group.sampling_steps_in_flight += issued.samples
        group.prompt_steps_in_flight += issued.has_prompt
        self._steps[step.step_id] = issued
        return step

    def on_result(self, step_id: int, repeat: int, now: float) -> None:
        """One iteration's tokens have come. PipeLLMError if they were not next."""
        issued = self._steps.get(step_id)
        if issued is None or not issued.num_missing or repeat != issued.num_results:
            raise PipeLLMError(f"an unexpected result came for step {step_id}, repeat {repeat}")
        issued.num_results += 1
        issued.group.iterations_in_flight -= 1
        if not issued.num_missing:
            self._sampled(issued, now)

    def on_acknowledged(self, stage: int, step_id: int, now: float) -> list[Residency]:
        """A stage is done with a step. If it was the last to say so: the residencies the step named, one
        for each time, their computed tokens counted up. PipeLLMError if it had said so, is no stage, or
        results are missing that some sequence still waits for."""
        issued = self._steps.get(step_id)
        if issued is None or not issued.waiting_for >> stage & 1:
            raise PipeLLMError(f"stage {stage} acknowledged step {step_id} unexpectedly")
        issued.waiting_for &= ~(1 << stage)
        if issued.waiting_for:
            return []
        del self._steps[step_id]
        group, missing = issued.group, issued.num_missing
        if missing:
            if not all(residency.freed for residency, _ in issued.rows):
                raise PipeLLMError(f"step {step_id} was acknowledged without {missing} of its results")
            group.iterations_in_flight -= missing
            self._sampled(issued, now)
        elif not issued.samples:
            group.pace.passed(now)
        group.prompt_steps_in_flight -= issued.has_prompt
        named = list(issued.freed)
        for residency, end in issued.rows:
            if issued.num_results or not (issued.samples or residency.freed):
                residency.num_computed_tokens = end - missing
            named.append(residency)
        for residency in named:
            residency.unacknowledged -= 1
        return named

    def _sampled(self, issued: _IssuedStep, now: float) -> None:
        """The last result of a step has come, or nothing more of it will."""
        issued.group.sampling_steps_in_flight -= 1
        if issued.has_prompt or issued.num_missing:
            issued.group.pace.passed(now)
        else:
            issued.group.pace.decoded(issued.repeat, issued.issued_s, now)


def _add_item(step: stage_pb2.Step, residency: Residency, num_tokens: int) -> bool:
    """Adds the residency's next `num_tokens` tokens to a step; returns whether a token is drawn there."""
    sequence = residency.sequence
    start, end = residency.num_issued, residency.num_issued + num_tokens
    item = step.items.add(sequence_id=residency.wire_id, start_position=start, num_tokens=num_tokens)
    if residency.is_prefilling:
        item.token_ids.extend(sequence.tokens[start:end])
    else:
        item.from_ring = True
    samples = end >= residency.num_prefill
    if samples:
        item.sample_positions.append(end - 1)
    if residency.num_announced == 0:
        item.start.sampling.CopyFrom(sequence.sampling)
        item.start.prior_token_ids.extend(sequence.tokens[:start])
        item.start.logprobs = sequence.logprobs
        item.start.top_logprobs = sequence.top_logprobs
    item.new_blocks.extend(residency.block_table[residency.num_announced :])
    residency.num_announced = len(residency.block_table)
    return samples
