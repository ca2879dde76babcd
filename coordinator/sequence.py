"""What the coordinator remembers of a sequence, and of each of its stays on the stages.

A `Sequence` is one request's tokens from arrival to the last. A `Residency` is one stay of it on the stages,
from admission until its blocks are back; a pre-empted sequence ends one and later begins another, under
another id on the wire, so that what is still in flight for the old one cannot be taken for the new one's.
Both are plain records: the scheduler alone changes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protos import stage_pb2


@dataclass(eq=False)
class Sequence:
    """One request. Times are of its scheduler's clock, in seconds, None until they happen."""

    sequence_id: int
    tokens: list[int]  # the prompt, then every accepted token
    sampling: stage_pb2.ResolvedSampling
    max_tokens: int  # drawn at most
    logprobs: bool = False
    top_logprobs: int = 0
    arrived_s: float = 0.0

    num_prompt: int = field(init=False)
    max_length: int = 0  # tokens it may grow to, prompt included; set when it is added to a scheduler
    cached_tokens: int = 0  # of the prompt, whose KV was there already at the first admission
    residency: Residency | None = None  # its present stay on the stages
    block_hashes: list[bytes] = field(default_factory=list)  # of the full blocks of `tokens`, so far
    first_step_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt


@dataclass(eq=False, slots=True)
class Residency:
    """One stay on the stages. Positions below `num_computed_tokens` <= `num_issued` have been computed on
    every stage, those below `num_issued` are computed or on their way."""

    wire_id: int  # `sequence_id` in step descriptions and results
    sequence: Sequence
    group: int
    block_table: list[int]
    num_prefill: int  # tokens it came with; what follows is drawn during this stay
    num_issued: int  # starts at the number of reused tokens
    num_computed_tokens: int
    num_registered: int  # blocks of the table that others may find by their content
    num_announced: int = 0  # blocks of the table that the stages have been told of
    unacknowledged: int = 0  # issued steps that name it, in items or frees, not yet acknowledged by all
    num_known: int | None = None  # tokens known when the stay ended; None while it lasts
    freed: bool = False  # a step that frees it has been issued

    @property
    def is_prefilling(self) -> bool:
        return self.num_issued < self.num_prefill

    @property
    def num_unissued(self) -> int:
        """Tokens that may still be computed; the last one a sequence may have is drawn, never computed."""
        return self.sequence.max_length - 1 - self.num_issued

    @property
    def ended(self) -> bool:
        return self.num_known is not None
