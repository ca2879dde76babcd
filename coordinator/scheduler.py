"""Continuous batching: which sequences compute which tokens in the next step, in which KV blocks.

Pure: it knows no stage, stream or task, and no clock but the one it is given; `pipeline` sends what
`schedule` returns and reports what comes back. Every call costs time in proportion to the items it touches.

What it keeps to, and stages may rely on:
- Stages run the steps of one group in the order of `step_id`; steps of different groups may interleave.
- A sequence stays in one group, and its free travels in a step of that group, so that it follows every
  step that names the sequence. Nothing names it afterwards: each stay has a wire id of its own.
- Blocks go back to the pool when every stage has acknowledged every step that named their holder, the free
  included. So no stage ever sees a block in two live block tables, except full blocks of a shared prefix,
  which nobody writes; a block can be found as a prefix only once every stage has computed it.

What it keeps to, and clients may rely on: first come, first admitted; when blocks run out the youngest
running sequence gives way, is queued first again and recomputed later; the oldest always gets on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields

from common.errors import ConfigError, OutOfCapacityError, PipeLLMError
from coordinator.blocks import BlockPool, extend_block_hashes
from coordinator.in_flight import Group, InFlight
from coordinator.sequence import Residency, Sequence
from protos import stage_pb2

_MAY_BE_0 = ("max_waiting", "run_ahead", "repeat")


@dataclass(frozen=True)
class SchedulerConfig:
    num_blocks: int
    block_size: int  # tokens
    num_groups: int
    num_stages: int
    max_step_tokens: int  # rows of one forward
    max_sequences: int  # running
    max_waiting: int  # beyond those that may run
    context_length: int
    run_ahead: int = 0  # decode iterations of a group issued ahead of their results; 0: two steps
    repeat: int = 0  # iterations one step may hold; 0: as many as `pace` says

    def __post_init__(self) -> None:
        for each in fields(self):
            value, least = getattr(self, each.name), 0 if each.name in _MAY_BE_0 else 1
            if value < least:
                raise ConfigError(f"{each.name} is {value}, at least {least} is needed")


class Scheduler:
    """Holds every sequence of one epoch from `add` until its blocks are back.

    With a `clock`, sequences are told when their first step was issued and their tokens came, and the steps
    of a group hold as many iterations as take `pace.STEP_S`.
    """

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float] = lambda: 0.0) -> None:
        self.config = config
        self._clock = clock
        # Every running sequence must find a row in one step.
        self._max_running = min(config.max_sequences, config.max_step_tokens)
        self._pool = BlockPool(config.num_blocks, config.block_size)
        self._waiting: OrderedDict[int, Sequence] = OrderedDict()  # by sequence id, next one first
        self._running: dict[int, Residency] = {}  # by sequence id, oldest first; all older than any waiting
        self._by_wire_id: dict[int, Residency] = {}
        self._groups = [Group(index) for index in range(config.num_groups)]
        self._in_flight = InFlight(config.num_stages)
        self._last_wire_id = 0
        self._num_returning = 0  # stays that ended and still hold blocks

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def is_idle(self) -> bool:
        """No sequence is here and no step in flight: every stage has forgotten everything."""
        return not (self._waiting or self._running or self._in_flight or self._num_returning)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. OutOfCapacityError: the queue is full, or it could never be computed."""
        config = self.config
        present, most = len(self._running) + len(self._waiting), config.max_sequences + config.max_waiting
        if present >= most:
            raise OutOfCapacityError(
                f"the queue is full: {present} requests run or wait, at most {most} may; try again later"
            )
        length = len(sequence.tokens)
        if length >= config.context_length:
            raise OutOfCapacityError(
                f"a prompt of {length} tokens leaves no room for an answer in a context of"
                f" {config.context_length} tokens"
            )
        sequence.max_length = min(sequence.num_prompt + sequence.max_tokens, config.context_length)
        needed = self._blocks_for(sequence.max_length - 1)
        if needed > config.num_blocks:
            raise OutOfCapacityError(
                f"{sequence.max_length} tokens (prompt and answer) need {needed} KV blocks, there are"
                f" {config.num_blocks} of {config.block_size} tokens; shorten the prompt or lower max_tokens"
            )
        sequence.block_hashes = []
        sequence.residency = None
        self._waiting[sequence.sequence_id] = sequence

    def finish(self, sequence_id: int) -> None:
        """Ends a sequence at the next step boundary; nothing more of it is accepted. Unknown ids are ignored,
        since a sequence may just have ended by itself."""
        self._waiting.pop(sequence_id, None)
        residency = self._running.get(sequence_id)
        if residency is not None:
            self._end(residency)

    def schedule(self, group: int) -> stage_pb2.Step | None:
        """The group's next step, to be sent to every stage; None if none may be issued now.

        To be called after every change, for each group in turn until none has a step left. Frees go along
        with a step, or alone where there is nothing to compute.
        """
        state = self._groups[group]
        rows, repeat = self._pick(state)
        if not rows and not state.to_free:
            return None
        return self._in_flight.issue(state, rows, repeat, self._clock())

    def on_result(self, result: stage_pb2.StepResult) -> list[tuple[Sequence, stage_pb2.SampledToken]]:
        """Takes in one iteration's drawn tokens; returns those accepted, appended to their sequences.

        What was drawn for a stay that has ended is dropped. A sequence that has reached its length ends.
        """
        now = self._clock()
        self._in_flight.on_result(result.step_id, result.repeat, now)
        accepted = []
        for token in result.tokens:
            residency = self._by_wire_id.get(token.sequence_id)
            if residency is None:
                continue
            sequence = residency.sequence
            if token.position != len(sequence.tokens):
                raise PipeLLMError(
                    f"step {result.step_id} drew a token for position {token.position} of sequence"
                    f" {token.sequence_id}, whose next is {len(sequence.tokens)}"
                )
            sequence.tokens.append(token.token_id)
            sequence.last_token_s = now
            if sequence.first_token_s is None:
                sequence.first_token_s = now
            if len(sequence.tokens) == sequence.max_length:
                self._end(residency)
            accepted.append((sequence, token))
        return accepted

    def on_failed(self, failure: stage_pb2.SequenceFailure) -> Sequence | None:
        """Takes in that the stages cannot go on with a sequence, and ends it; None if its stay had ended.
        What it has computed since its blocks were last registered is not to be found by others."""
        residency = self._by_wire_id.get(failure.sequence_id)
        if residency is None:
            return None
        self._end(residency)
        residency.num_known = 0
        return residency.sequence

    def on_acknowledged(self, stage: int, step_id: int) -> None:
        """Takes in that a stage (its place in the ring) is done with a step."""
        for residency in self._in_flight.on_acknowledged(stage, step_id, self._clock()):
            self._register_computed(residency)
            if residency.freed and not residency.unacknowledged:
                self._pool.release(residency.block_table)
                self._num_returning -= 1

    # --- choosing rows -----------------------------------------------------------------------------------

    def _pick(self, group: Group) -> tuple[list[tuple[Residency, int]], int]:
        """The rows of the group's next step, as (residency, number of tokens), and its repeat.

        Decodes first, then prompts fill what is left. All decodes of a group go in every step of it: were
        each issued as its own results come in, they would fall out of step and each run a forward alone.
        """
        nothing: tuple[list[tuple[Residency, int]], int] = ([], 1)
        decodes: list[Residency] = []
        prompts: list[Residency] = []
        for residency in group.residencies.values():
            if residency.is_prefilling:
                prompts.append(residency)
            elif residency.num_unissued > 0:
                decodes.append(residency)
        repeat = 1
        has_prompt = bool(prompts) or self._admissible(group) is not None
        if has_prompt:
            # Wait rather than decode past it: the prompt would have to wait behind those iterations.
            if group.prompt_steps_in_flight >= self._prompt_steps_allowed(group):
                return nothing
        elif decodes:
            repeat = min(self._most_iterations(group), *map(self._most_repeats, decodes))
        if not self._may_run_ahead(group, repeat, has_prompt):
            return nothing
        decodes, repeat = self._extend_tables(decodes, repeat)
        rows = [(residency, 1) for residency in decodes]
        budget = self.config.max_step_tokens - len(rows)
        candidates = iter(prompts)
        while has_prompt and budget > 0:
            prompt = next(candidates, None) or self._admit(group)
            if prompt is None:
                break
            if not prompt.ended:
                rows.append((prompt, min(budget, prompt.num_prefill - prompt.num_issued)))
                budget -= rows[-1][1]
        return rows, repeat

    def _most_iterations(self, group: Group) -> int:
        """How many iterations a step of the group may hold: so many that two such steps may be in flight."""
        config = self.config
        most = config.repeat or group.pace.repeat
        return min(most, max(1, config.run_ahead // 2)) if config.run_ahead else most

    def _most_repeats(self, residency: Residency) -> int:
        """How many tokens of a decoding sequence one step may compute. Steps begin small and double, so that
        the first tokens of an answer come at once."""
        if self.config.repeat:
            return residency.num_unissued
        return min(residency.num_unissued, 1 + residency.num_issued - residency.num_prefill)

    def _may_run_ahead(self, group: Group, repeat: int, has_prompt: bool) -> bool:
        """Whether a step of `repeat` iterations may follow those in flight. A prompt need not wait: it runs
        after them in any case, and its own steps are counted."""
        in_flight = group.iterations_in_flight + repeat
        if self.config.run_ahead:
            return in_flight <= self.config.run_ahead
        return (
            has_prompt
            or group.sampling_steps_in_flight < 2
            or in_flight <= self._most_iterations(group) // 2  # the small steps of a beginning
        )

    def _prompt_steps_allowed(self, group: Group) -> int:
        """How many steps with prompt chunks a group may have in flight: enough to fill the ring and have one
        queued, shared with the other groups that have some, so that a newcomer does not wait behind many."""
        sharing = 1 + sum(other is not group and other.prompt_steps_in_flight > 0 for other in self._groups)
        return -(-(self.config.num_stages + 1) // sharing)

    def _admissible(self, group: Group) -> list[int] | None:
        """The blocks that the next waiting sequence would reuse if it were admitted to this group now; None
        if there is none, it belongs to a group with fewer sequences, or would leave the running ones no
        block each to grow into."""
        if not self._waiting or len(self._running) >= self._max_running:
            return None
        if len(group.residencies) > min(len(other.residencies) for other in self._groups):
            return None
        sequence = next(iter(self._waiting.values()))
        length, block_size = len(sequence.tokens), self.config.block_size
        extend_block_hashes(sequence.block_hashes, sequence.tokens, block_size)
        # The last token is always computed: a token must be drawn after it.
        reused = self._pool.lookup(sequence.block_hashes[: (length - 1) // block_size])
        needed = self._blocks_for(length) - len(reused) + len(self._running)
        return reused if needed <= self._pool.num_free - self._pool.num_idle(reused) else None

    def _admit(self, group: Group) -> Residency | None:
        """Begins a stay of the next waiting sequence, with the blocks of its whole prompt, if it may be."""
        reused = self._admissible(group)
        if reused is None:
            return None
        _, sequence = self._waiting.popitem(last=False)
        length, cached = len(sequence.tokens), len(reused) * self.config.block_size
        self._pool.acquire(reused)
        self._last_wire_id += 1
        residency = Residency(
            wire_id=self._last_wire_id,
            sequence=sequence,
            group=group.index,
            block_table=reused + self._pool.allocate(self._blocks_for(length) - len(reused)),
            num_prefill=length,
            num_issued=cached,
            num_computed_tokens=cached,
            num_registered=len(reused),
        )
        if sequence.first_step_s is None:
            sequence.first_step_s = self._clock()
            sequence.cached_tokens = cached
        sequence.residency = residency
        group.residencies[residency.wire_id] = residency
        self._by_wire_id[residency.wire_id] = residency
        self._running[sequence.sequence_id] = residency
        return residency

    # --- blocks ------------------------------------------------------------------------------------------

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def _extend_tables(self, decodes: list[Residency], repeat: int) -> tuple[list[Residency], int]:
        """Gives decodes the blocks for `repeat` further tokens, oldest first; returns those that have them.

        Where blocks run out, `repeat` shrinks; at 1 the youngest running sequence gives way, one at a time:
        while any blocks are on their way back, the others wait for them.
        """
        missing = [self._num_missing(residency, repeat) for residency in decodes]
        while sum(missing) > self._pool.num_free and repeat > 1:
            repeat //= 2
            missing = [self._num_missing(residency, repeat) for residency in decodes]
        if sum(missing) > self._pool.num_free and not self._num_returning:
            self._preempt(next(reversed(self._running.values())))
        served = []
        for residency, count in zip(decodes, missing, strict=True):
            if count <= self._pool.num_free and not residency.ended:
                residency.block_table += self._pool.allocate(count)
                served.append(residency)
        return served, repeat

    def _num_missing(self, residency: Residency, repeat: int) -> int:
        return max(0, self._blocks_for(residency.num_issued + repeat) - len(residency.block_table))

    def _preempt(self, residency: Residency) -> None:
        self._end(residency)
        sequence = residency.sequence
        self._waiting[sequence.sequence_id] = sequence
        self._waiting.move_to_end(sequence.sequence_id, last=False)

    def _end(self, residency: Residency) -> None:
        """Ends a stay. Its blocks stay taken until the stages have run, and then forgotten, all of it."""
        sequence = residency.sequence
        group = self._groups[residency.group]
        residency.num_known = len(sequence.tokens)
        sequence.residency = None
        del self._running[sequence.sequence_id]
        del self._by_wire_id[residency.wire_id]
        del group.residencies[residency.wire_id]
        group.to_free.append(residency)
        self._num_returning += 1

    def _register_computed(self, residency: Residency) -> None:
        """Lets others find the full blocks whose content is computed and known."""
        sequence, block_size = residency.sequence, self.config.block_size
        # Tokens drawn but never accepted are in the KV too; what later stays know may differ from them.
        known = len(sequence.tokens) if residency.num_known is None else residency.num_known
        full = min(residency.num_computed_tokens, known) // block_size
        if full > residency.num_registered:
            extend_block_hashes(sequence.block_hashes, sequence.tokens, block_size)
            for index in range(residency.num_registered, full):
                self._pool.register(residency.block_table[index], sequence.block_hashes[index])
            residency.num_registered = full
