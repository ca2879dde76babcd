"""What a stage remembers of the sequences it serves: tokens, block tables, options, steps still to run.

Step descriptions arrive in the order they were issued; what they say of blocks is entered on arrival. What
they say of tokens is entered when their turn to run comes (`begin`): a cut drops what the steps before it
still read, and a new generation tells the draws of those steps, which may come late, from its own. A freed
sequence is forgotten when its last step has run, since steps of different groups may run in another order
than they were issued.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import count, pairwise

import numpy as np

from common.errors import InvalidRequestError
from protos import stage_pb2
from stage.sampler import SamplingOptions

_GROWTH = 64
_MAX_TOP_LOGPROBS = 20


class Sequence:
    """One sequence: `tokens[p]` is the token at position p as far as this stage knows it."""

    def __init__(self, options: SamplingOptions, generation: int) -> None:
        self.options = options
        self.generation = generation  # another one after each cut; no two sequences ever have the same
        self.tokens: list[int] = []
        self.next_position = 0  # where the next row must start: all before it is in KV or on its way there
        self.drawn_position: int | None = None  # of the last token that an entered step draws
        self.pending_steps = 0
        self.freed = False
        self._blocks = np.zeros(_GROWTH, dtype=np.int32)
        self._num_blocks = 0

    @property
    def block_table(self) -> np.ndarray:
        return self._blocks[: self._num_blocks]

    def add_blocks(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self._num_blocks == len(self._blocks):
                self._blocks = np.concatenate([self._blocks, np.zeros_like(self._blocks)])
            self._blocks[self._num_blocks] = block
            self._num_blocks += 1

    def set_tokens(self, position: int, tokens: Iterable[int]) -> None:
        """Enters tokens from `position` on. The same token may arrive twice (by ring and by description)."""
        if position > len(self.tokens):
            return  # a stage inside the ring is never told drawn tokens, and needs none
        for at, token in enumerate(tokens, position):
            if at < len(self.tokens):
                self.tokens[at] = token
            else:
                self.tokens.append(token)


class SequenceTable:
    """All live sequences of a stage, with every step's claims checked before they are believed."""

    def __init__(self, num_blocks: int, block_size: int, max_step_tokens: int, vocab_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_step_tokens = max_step_tokens
        self.vocab_size = vocab_size
        self._live: dict[int, Sequence] = {}
        self._generations = count()
        self._last_step_id = 0

    def __len__(self) -> int:
        return len(self._live)

    def __getitem__(self, sequence_id: int) -> Sequence:
        return self._live[sequence_id]

    def get(self, sequence_id: int) -> Sequence | None:
        return self._live.get(sequence_id)

    @property
    def blocks_in_use(self) -> int:
        """Distinct blocks that live sequences' tables name."""
        if not self._live:
            return 0
        return len(np.unique(np.concatenate([sequence.block_table for sequence in self._live.values()])))

    def enter(self, step: stage_pb2.Step) -> None:
        """Takes in a step's description. Raises InvalidRequestError for one that contradicts this state."""
        where = f"step {step.step_id}"
        if step.step_id <= self._last_step_id:
            raise InvalidRequestError(f"{where} came after step {self._last_step_id}; step ids must grow")
        self._last_step_id = step.step_id
        if step.repeat < 1:
            raise InvalidRequestError(f"{where}: repeat is {step.repeat}, at least 1 is needed")
        if sum(item.num_tokens for item in step.items) > self.max_step_tokens:
            raise InvalidRequestError(f"{where}: more than the {self.max_step_tokens} tokens agreed at load")
        for sequence_id in step.freed_sequence_ids:
            sequence = self._live.get(sequence_id)
            if sequence is None:
                raise InvalidRequestError(f"{where}: frees sequence {sequence_id}, which is not here")
            sequence.freed = True
            self._forget_if_done(sequence_id, sequence)
        if len({item.sequence_id for item in step.items}) < len(step.items):
            raise InvalidRequestError(f"{where}: names a sequence twice")
        for item in step.items:
            self._enter_item(item, step.repeat, where)

    def _enter_item(self, item: stage_pb2.StepItem, repeat: int, where: str) -> None:
        where = f"{where}: sequence {item.sequence_id}"
        sequence = self._live.get(item.sequence_id)
        if item.HasField("start"):
            if sequence is not None:
                raise InvalidRequestError(f"{where} starts twice")
            _check_start(item.start, self.vocab_size, where)
            sequence = Sequence(_options(item.start), next(self._generations))
            self._live[item.sequence_id] = sequence
            sequence.set_tokens(0, item.start.prior_token_ids)
            sequence.next_position = len(item.start.prior_token_ids)
        elif sequence is None or sequence.freed:
            raise InvalidRequestError(f"{where} is not here")
        if item.HasField("truncate_to"):
            if item.truncate_to > sequence.next_position:
                held = f"it has {sequence.next_position} positions"
                raise InvalidRequestError(f"{where}: cut at {item.truncate_to}, {held}")
            sequence.next_position = item.truncate_to
            sequence.drawn_position = None
        self._check_rows(item, sequence, repeat, where)
        sequence.add_blocks(item.new_blocks)
        sequence.next_position = item.start_position + item.num_tokens + repeat - 1
        sequence.drawn_position = item.sample_positions[-1] + repeat if item.sample_positions else None
        sequence.pending_steps += 1

    def _check_rows(self, item: stage_pb2.StepItem, sequence: Sequence, repeat: int, where: str) -> None:
        start, num_tokens, samples = item.start_position, item.num_tokens, list(item.sample_positions)
        if any(block >= self.num_blocks for block in item.new_blocks):
            raise InvalidRequestError(f"{where}: block {max(item.new_blocks)} of {self.num_blocks}")
        num_blocks = len(sequence.block_table) + len(item.new_blocks)
        if num_blocks > self.num_blocks:
            raise InvalidRequestError(f"{where}: a table of {num_blocks} blocks, there are {self.num_blocks}")
        end = start + num_tokens + repeat - 1
        if num_tokens < 1 or end > num_blocks * self.block_size:
            held = f"{num_blocks} blocks of {self.block_size}"
            raise InvalidRequestError(f"{where}: {num_tokens} tokens up to position {end} in {held}")
        if start != sequence.next_position:
            raise InvalidRequestError(f"{where}: starts at {start}, {sequence.next_position} is next")
        if any(not 0 <= position - start < num_tokens for position in samples):
            raise InvalidRequestError(f"{where}: samples {samples}, not of its tokens")
        if any(one >= other for one, other in pairwise(samples)):
            raise InvalidRequestError(f"{where}: samples {samples}, not one after the other")
        if (repeat > 1 or item.from_ring) and not (num_tokens == 1 and samples == [start]):
            raise InvalidRequestError(f"{where}: only a single sampled row can repeat or come from the ring")
        if item.from_ring:
            if item.token_ids or sequence.drawn_position != start:
                raise InvalidRequestError(f"{where}: no token for position {start} comes by the ring")
        elif len(item.token_ids) != num_tokens:
            raise InvalidRequestError(f"{where}: {len(item.token_ids)} ids for {num_tokens} rows")
        _check_ids(item.token_ids, self.vocab_size, where)

    def begin(self, step: stage_pb2.Step, needs_tokens: bool) -> list[int] | None:
        """Cuts sequences and enters tokens as a step says whose turn has come; its sequences' generations.

        None, and nothing is done, where `needs_tokens` and some before a cut are yet to be drawn: the
        coordinator may know them before this stage does."""
        cuts = [item for item in step.items if item.HasField("truncate_to")]
        if needs_tokens and any(len(self[item.sequence_id].tokens) < item.truncate_to for item in cuts):
            return None
        for item in cuts:
            sequence = self[item.sequence_id]
            del sequence.tokens[item.truncate_to :]
            sequence.generation = next(self._generations)
        for item in step.items:
            if not item.from_ring:
                self[item.sequence_id].set_tokens(item.start_position, item.token_ids)
        return [self[item.sequence_id].generation for item in step.items]

    def fill_skipped(self, step: stage_pb2.Step) -> None:
        """Puts fillers where a step that is not computed would have drawn tokens. Its sequences are freed;
        but a later step may have them in company, and the others must not wait for what never comes."""
        for item in step.items:
            tokens = self._live[item.sequence_id].tokens
            tokens += [0] * (item.start_position + item.num_tokens + step.repeat - len(tokens))

    def step_done(self, step: stage_pb2.Step) -> None:
        for item in step.items:
            sequence = self._live[item.sequence_id]
            sequence.pending_steps -= 1
            self._forget_if_done(item.sequence_id, sequence)

    def _forget_if_done(self, sequence_id: int, sequence: Sequence) -> None:
        if sequence.freed and not sequence.pending_steps:
            del self._live[sequence_id]


def _check_ids(ids: Collection[int], vocab_size: int, where: str) -> None:
    if ids and max(ids) >= vocab_size:
        raise InvalidRequestError(f"{where}: token id {max(ids)} of {vocab_size}")


def _check_start(start: stage_pb2.SequenceStart, vocab_size: int, where: str) -> None:
    _check_ids(start.prior_token_ids, vocab_size, f"{where}: prior tokens")
    _check_ids([bias.token_id for bias in start.sampling.logit_bias], vocab_size, f"{where}: logit_bias")
    _check_ids(start.sampling.banned_token_ids, vocab_size, f"{where}: banned tokens")
    most = min(_MAX_TOP_LOGPROBS, vocab_size)
    if start.top_logprobs > most:
        raise InvalidRequestError(f"{where}: top_logprobs is {start.top_logprobs}, at most {most}")


def _options(start: stage_pb2.SequenceStart) -> SamplingOptions:
    sampling = start.sampling
    return SamplingOptions(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        typical_p=sampling.typical_p,
        repeat_penalty=sampling.repeat_penalty,
        repeat_last_n=sampling.repeat_last_n,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed,
        logit_bias=tuple((bias.token_id, bias.bias) for bias in sampling.logit_bias),
        banned_token_ids=tuple(sampling.banned_token_ids),
        logprobs=start.logprobs,
        top_logprobs=start.top_logprobs,
    )
