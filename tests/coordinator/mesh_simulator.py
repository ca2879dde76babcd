"""A mesh that executes step descriptions as real stages would, and holds the scheduler to its promises.

Every stage keeps its own KV: the token id that was computed into each slot. A row reads its whole context
back through its block table, so that a block shared or reused wrongly shows in the tokens that come out. Only
pure logic is proved here; real daemons are tested elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from zlib import crc32

from coordinator.pace import MAX_REPEAT
from coordinator.scheduler import Scheduler, SchedulerConfig
from coordinator.sequence import Sequence as ScheduledSequence
from protos import stage_pb2

VOCAB_SIZE = 7  # small, so that sequences share prefixes by chance too


def draw(context: Sequence[int]) -> int:
    """The token a pure sampler would put after `context`."""
    return crc32(bytes(context)) % VOCAB_SIZE


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(draw(tokens))
    return tokens[len(prompt) :]


@dataclass
class SimulatedSequence:
    group: int
    num_prior: int
    block_table: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # as known to the stages that need them
    num_entered: int = 0  # positions that arrived steps compute
    pending_steps: int = 0
    freed: bool = False


class SimulatedStage:
    def __init__(self, index: int, config: SchedulerConfig) -> None:
        self.index = index
        self.config = config
        self.slots: dict[int, int] = {}
        self.live: dict[int, SimulatedSequence] = {}
        self.queues: list[deque[list[int]]] = [deque() for _ in range(config.num_groups)]  # [step_id, repeat]
        self.outbox: deque[stage_pb2.StepResult | int] = deque()  # results and ids of steps done, in order

    def enter(self, step: stage_pb2.Step) -> None:
        for wire_id in step.freed_sequence_ids:
            sequence = self.live[wire_id]
            assert not sequence.freed
            assert sequence.group == step.group
            sequence.freed = True
            self._forget_if_done(wire_id)
        for item in step.items:
            self._enter_item(item, step)
        if step.items:
            self.queues[step.group].append([step.step_id, 0])
        else:
            self.outbox.append(step.step_id)

    def _enter_item(self, item: stage_pb2.StepItem, step: stage_pb2.Step) -> None:
        block_size = self.config.block_size
        if item.HasField("start"):
            prior = list(item.start.prior_token_ids)
            assert item.sequence_id not in self.live
            assert len(prior) == item.start_position
            assert len(prior) % block_size == 0
            sequence = SimulatedSequence(step.group, len(prior), tokens=prior, num_entered=len(prior))
            self.live[item.sequence_id] = sequence
        sequence = self.live[item.sequence_id]
        assert not sequence.freed
        assert sequence.group == step.group
        assert item.start_position == sequence.num_entered
        for block in item.new_blocks:
            assert 0 <= block < self.config.num_blocks
            assert block not in sequence.block_table
            if len(sequence.block_table) >= sequence.num_prior // block_size:
                assert all(block not in other.block_table for other in self.live.values())
            sequence.block_table.append(block)
        if item.HasField("start"):  # reused: it must have been computed, here, before this step was issued
            assert self.context(sequence, sequence.num_prior) == sequence.tokens
        sequence.num_entered += item.num_tokens + step.repeat - 1
        assert sequence.num_entered <= len(sequence.block_table) * block_size
        if not item.from_ring:
            assert len(sequence.tokens) == item.start_position
            sequence.tokens.extend(item.token_ids)
        sequence.pending_steps += 1

    def context(self, sequence: SimulatedSequence, length: int) -> list[int]:
        return [self.slots[self._slot(sequence, position)] for position in range(length)]

    def compute(self, wire_id: int, position: int, token: int) -> list[int]:
        """One row: writes the token's KV, returns all it attends over."""
        sequence = self.live[wire_id]
        slot = self._slot(sequence, position)
        block = slot // self.config.block_size
        holders = [other for other in self.live.values() if block in other.block_table]
        assert holders == [sequence], "a shared block was written"
        self.slots[slot] = token
        return self.context(sequence, position + 1)

    def done(self, step: stage_pb2.Step) -> None:
        self.queues[step.group].popleft()
        for item in step.items:
            self.live[item.sequence_id].pending_steps -= 1
            self._forget_if_done(item.sequence_id)
        self.outbox.append(step.step_id)

    def _slot(self, sequence: SimulatedSequence, position: int) -> int:
        block_size = self.config.block_size
        return sequence.block_table[position // block_size] * block_size + position % block_size

    def _forget_if_done(self, wire_id: int) -> None:
        if self.live[wire_id].freed and not self.live[wire_id].pending_steps:
            del self.live[wire_id]


class SimulatedMesh:
    """All stages, the ring between them, and the rules that hold for what is issued as a whole.

    The clock `now` goes on by `forward_s` with each forward of any stage, and a little with each step. With
    `skips`, a single stage acknowledges what is left of a step whose sequences are all freed.
    """

    def __init__(self, config: SchedulerConfig, forward_s: float, skips: bool) -> None:
        self.config = config
        self.forward_s = forward_s
        self.skips = skips and config.num_stages == 1
        self.now = 0.0
        self.num_skipped = 0
        self.stages = [SimulatedStage(index, config) for index in range(config.num_stages)]
        self.steps: dict[int, stage_pb2.Step] = {}
        self.num_steps = 0
        self._frames: dict[tuple[int, int, int], list[list[int]]] = {}  # contexts, by (stage, step, repeat)
        self._holders: dict[int, set[int]] = {}  # wire id -> blocks it holds until all is acknowledged
        self._naming: dict[int, set[tuple[int, int]]] = {}  # wire id -> (stage, step) not acknowledged
        self._freed: set[int] = set()
        self._undrawn: dict[int, int] = {}  # wire id -> samples issued without a delivered result

    # --- what the coordinator issues ------------------------------------------------------------------------

    def issue(self, step: stage_pb2.Step) -> None:
        config = self.config
        self.num_steps += 1
        self.now += 1e-6
        assert step.step_id == self.num_steps
        assert step.items or step.freed_sequence_ids
        assert sum(item.num_tokens for item in step.items) <= config.max_step_tokens
        assert 1 <= step.repeat <= (config.repeat or MAX_REPEAT)
        names = [item.sequence_id for item in step.items]
        assert len(set(names)) == len(names)
        assert not self._freed & {*names, *step.freed_sequence_ids}
        for item in step.items:
            assert item.num_tokens >= 1
            assert item.start_position + item.num_tokens + step.repeat - 1 < config.context_length
            if item.from_ring or step.repeat > 1:
                assert item.from_ring
                assert not item.token_ids
                assert item.num_tokens == 1
                assert list(item.sample_positions) == [item.start_position]
            else:
                assert len(item.token_ids) == item.num_tokens
            self._check_blocks(item)
            undrawn = self._undrawn.get(item.sequence_id, 0) + len(item.sample_positions) * step.repeat
            # Two steps, or else what rides along with prompts.
            assert undrawn <= (config.run_ahead or 2 * MAX_REPEAT + config.num_stages + 1)
            self._undrawn[item.sequence_id] = undrawn
        for wire_id in [*names, *step.freed_sequence_ids]:
            naming = self._naming.setdefault(wire_id, set())
            naming |= {(stage, step.step_id) for stage in range(config.num_stages)}
        self._freed |= set(step.freed_sequence_ids)
        self.steps[step.step_id] = step
        for stage in self.stages:
            stage.enter(step)

    def _check_blocks(self, item: stage_pb2.StepItem) -> None:
        reused = len(item.start.prior_token_ids) // self.config.block_size
        for block in item.new_blocks[reused:]:
            for wire_id, blocks in self._holders.items():
                assert block not in blocks, f"block {block} is still held by {wire_id}"
        self._holders.setdefault(item.sequence_id, set()).update(item.new_blocks)

    # --- what the stages do ---------------------------------------------------------------------------------

    def runnable(self) -> list[tuple[int, int]]:
        """(stage, group) pairs whose next forward has all it needs."""
        return [
            (stage.index, group)
            for stage in self.stages
            for group, queue in enumerate(stage.queues)
            if queue and (self._may_skip(stage, queue[0][0]) or self._is_ready(stage, *queue[0]))
        ]

    def _may_skip(self, stage: SimulatedStage, step_id: int) -> bool:
        return self.skips and all(stage.live[item.sequence_id].freed for item in self.steps[step_id].items)

    def _is_ready(self, stage: SimulatedStage, step_id: int, repeat: int) -> bool:
        if stage.index:
            return (stage.index, step_id, repeat) in self._frames
        return all(
            len(stage.live[item.sequence_id].tokens) >= item.start_position + item.num_tokens + repeat
            for item in self.steps[step_id].items
        )

    def run(self, index: int, group: int) -> None:
        """One forward of a group on a stage."""
        stage = self.stages[index]
        entry = stage.queues[group][0]
        step_id, repeat = entry
        step = self.steps[step_id]
        if self._may_skip(stage, step_id):
            self.num_skipped += 1
            for item in step.items:
                self._undrawn[item.sequence_id] -= len(item.sample_positions) * (step.repeat - repeat)
                tokens = stage.live[item.sequence_id].tokens  # fillers: others must not wait for it
                tokens += [0] * (item.start_position + item.num_tokens + step.repeat - len(tokens))
            stage.done(step)
            return
        self.now += self.forward_s
        frame = self._frames.pop((index, step_id, repeat), None)
        contexts: list[list[int]] = []
        result = stage_pb2.StepResult(step_id=step_id, repeat=repeat)
        for item in step.items:
            for offset in range(item.num_tokens):
                position = item.start_position + repeat + offset
                if frame is None:
                    token = stage.live[item.sequence_id].tokens[position]
                else:
                    token = frame[len(contexts)][-1]
                context = stage.compute(item.sequence_id, position, token)
                assert frame is None or context == frame[len(contexts)], "stages disagree on a context"
                contexts.append(context)
                if position - repeat in item.sample_positions:
                    result.tokens.add(
                        sequence_id=item.sequence_id, position=position + 1, token_id=draw(context)
                    )
        if index + 1 < len(self.stages):
            self._frames[index + 1, step_id, repeat] = contexts
        elif result.tokens:
            self._relay(result)
            stage.outbox.append(result)
        entry[1] += 1
        if entry[1] == step.repeat:
            stage.done(step)

    def _relay(self, result: stage_pb2.StepResult) -> None:
        for token in result.tokens:
            sequence = self.stages[0].live.get(token.sequence_id)
            if sequence is not None:
                assert len(sequence.tokens) == token.position
                sequence.tokens.append(token.token_id)

    # --- what comes back ------------------------------------------------------------------------------------

    def deliver(self, index: int) -> stage_pb2.StepResult | int:
        """The next message of a stage: a result, or the id of a step it has done."""
        message = self.stages[index].outbox.popleft()
        if isinstance(message, int):
            self._acknowledged(index, message)
        else:
            for token in message.tokens:
                self._undrawn[token.sequence_id] -= 1
        return message

    def _acknowledged(self, index: int, step_id: int) -> None:
        step = self.steps[step_id]
        for wire_id in [*(item.sequence_id for item in step.items), *step.freed_sequence_ids]:
            self._naming[wire_id].discard((index, step_id))
            if wire_id in self._freed and not self._naming[wire_id]:
                self._holders.pop(wire_id, None)


class Driver:
    """A scheduler and a mesh, wired as the coordinator wires them; every accepted token is checked."""

    def __init__(self, config: SchedulerConfig, forward_s: float = 0.004, skips: bool = False) -> None:
        self.config = config
        self.mesh = SimulatedMesh(config, forward_s, skips)
        self.scheduler = Scheduler(config, clock=lambda: self.mesh.now)
        self.requests: dict[int, ScheduledSequence] = {}
        self.finished: set[int] = set()

    def add(self, prompt: Sequence[int], max_tokens: int) -> ScheduledSequence:
        sequence = ScheduledSequence(
            len(self.requests) + 1, list(prompt), stage_pb2.ResolvedSampling(seed=1), max_tokens
        )
        self.scheduler.add(sequence)
        self.requests[sequence.sequence_id] = sequence
        return sequence

    def finish(self, sequence_id: int) -> None:
        self.finished.add(sequence_id)
        self.scheduler.finish(sequence_id)

    def schedule(self, group: int) -> stage_pb2.Step | None:
        step = self.scheduler.schedule(group)
        if step is not None:
            self.mesh.issue(step)
        running = [key for key, sequence in self.requests.items() if sequence.residency]
        waiting = [
            key
            for key, sequence in self.requests.items()
            if not sequence.residency
            and key not in self.finished
            and len(sequence.tokens) < sequence.max_length
        ]
        assert max(running, default=0) < min(waiting, default=len(self.requests) + 1), "overtaken"
        return step

    def schedule_all(self) -> list[stage_pb2.Step]:
        steps: list[stage_pb2.Step] = []
        issued = True
        while issued:
            new = [self.schedule(group) for group in range(self.config.num_groups)]
            issued = any(new)
            steps += [step for step in new if step]
        return steps

    @property
    def num_preemptions(self) -> int:
        stays = sum(item.HasField("start") for step in self.mesh.steps.values() for item in step.items)
        return stays - sum(sequence.first_step_s is not None for sequence in self.requests.values())

    def go_round(self) -> None:
        self.schedule_all()
        self.run_all()
        self.deliver_all()

    def stream(self, num_steps: int) -> None:
        """Goes on until so many further steps are issued, each result being delivered as it comes."""
        most = self.mesh.num_steps + num_steps
        while True:
            self.schedule_all()
            if self.mesh.num_steps >= most:
                return
            self.mesh.run(*self.mesh.runnable()[0])
            self.deliver_all()

    def run_all(self) -> None:
        """Every forward that can run without a further step."""
        while runnable := self.mesh.runnable():
            for stage, group in runnable:
                self.mesh.run(stage, group)

    def deliver(self, stage: int) -> None:
        message = self.mesh.deliver(stage)
        if isinstance(message, int):
            self.scheduler.on_acknowledged(stage, message)
            return
        for sequence, token in self.scheduler.on_result(message):
            assert sequence.sequence_id not in self.finished
            assert sequence.tokens[token.position] == token.token_id
            assert token.position == len(sequence.tokens) - 1

    def deliver_all(self) -> None:
        for index, stage in enumerate(self.mesh.stages):
            while stage.outbox:
                self.deliver(index)

    def drain(self) -> None:
        """Runs to the end, and checks it: all tokens right, every block free, every stage empty."""
        most = 50 + 20 * sum(sequence.max_length for sequence in self.requests.values())
        for _ in range(most):
            self.go_round()
            if self.scheduler.is_idle:
                break
        else:
            raise AssertionError("the mesh stalls")
        assert self.scheduler.num_free_blocks == self.config.num_blocks
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert all(not stage.live for stage in self.mesh.stages)
        for sequence in self.requests.values():
            generated = sequence.tokens[sequence.num_prompt :]
            assert generated == continuation(sequence.tokens[: sequence.num_prompt], len(generated))
            if sequence.sequence_id not in self.finished:
                assert len(sequence.tokens) == sequence.max_length
