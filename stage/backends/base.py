"""What a backend is: the batch it is handed, and the calls a runner makes on it.

A backend owns how weights lie in its memory and how a layer is computed; it knows nothing of sequences'
lives, steps, links or the plan. Layers are opaque to their caller: `prepare_*` makes them, `run_*` takes
them back. All tensors a backend hands out live on `backend.device`; hidden states are float32
[rows, hidden_size], so that they cross a link without loss and a split model equals a whole one bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from common.gguf.reader import GGUFFile
from stage.model.spec import EmbeddingSpec, HeadSpec, LayerSpec, ModelSpec, SpecPart, TensorRef
from stage.sampler import Drawn, SamplingOptions, sample
from stage.weights.quants import RawTensor

RawTensors = Mapping[TensorRef, RawTensor]


@dataclass(frozen=True)
class BatchSequence:
    """One sequence's rows in a batch: rows [row_start, row_start + num_rows) at consecutive positions."""

    row_start: int
    num_rows: int
    start_position: int  # of its first row; the KV of all earlier positions is in the cache
    block_table: np.ndarray  # int32 [blocks], block numbers in order of position; covers all its rows

    @property
    def context_length(self) -> int:
        """Tokens it attends over after this batch."""
        return self.start_position + self.num_rows


@dataclass(frozen=True)
class Batch:
    """The rows of one forward, sequence after sequence; any mix of prefill chunks and decode rows."""

    sequences: tuple[BatchSequence, ...]
    positions: np.ndarray  # int32 [rows]
    slots: np.ndarray  # int64 [rows]: block number * block size + offset, where each row's K and V go

    @property
    def num_rows(self) -> int:
        return len(self.positions)


def make_batch(sequences: Sequence[tuple[int, int, np.ndarray]], block_size: int) -> Batch:
    """A batch of (start_position, num_rows, block_table) triples, in this order of rows."""
    placed: list[BatchSequence] = []
    positions: list[np.ndarray] = []
    slots: list[np.ndarray] = []
    row = 0
    for start, num_rows, block_table in sequences:
        where = np.arange(start, start + num_rows, dtype=np.int32)
        placed.append(BatchSequence(row, num_rows, start, block_table))
        positions.append(where)
        slots.append(block_table[where // block_size].astype(np.int64) * block_size + where % block_size)
        row += num_rows
    return Batch(tuple(placed), np.concatenate(positions), np.concatenate(slots))


@dataclass(frozen=True)
class DecodeRow:
    """A sequence that decodes: its next row, and what drawing after it takes."""

    sequence_id: int
    position: int  # of the row
    # By position, up to the row's own; shorter where the last ones were drawn and not yet read.
    tokens: Sequence[int]
    block_table: np.ndarray  # int32 [blocks]; covers the row, and those that follow it in the same call
    options: SamplingOptions
    generation: int = 0  # another one where the sequence was cut: tokens drawn before are not its own


class PendingDraws(Protocol):
    """Tokens being drawn."""

    def wait(self) -> list[list[Drawn]]:
        """[iterations][rows]. Blocks until they are there; raises what went wrong on the device."""


class Decoder(Protocol):
    """Decodes on the device by itself, each drawn token feeding the next iteration. For a stage that holds
    the whole model; called by one thread."""

    max_rows: int
    max_repeat: int

    def continues(self, rows: Sequence[DecodeRow]) -> bool:
        """Whether these are the rows of the last `issue`, one iteration on: then the device knows their
        tokens, and the host need not."""

    def issue(self, rows: Sequence[DecodeRow], repeat: int) -> PendingDraws:
        """Issues `repeat` iterations and does not wait. Rows that do not continue must have all their
        tokens."""


class Replayer(Protocol):
    """Runs all of a runner's layers at once."""

    def takes(self, batch: Batch) -> bool: ...

    def run(self, batch: Batch, inputs: np.ndarray | torch.Tensor) -> torch.Tensor:
        """Token ids int32 [rows] or hidden states float32 [rows, hidden_size] -> float32 [rows, hidden_size],
        the caller's own; as embedding and layers one by one."""


@dataclass(frozen=True)
class StreamingCounters:
    """Of a backend that streams weights, since they were loaded."""

    bytes_copied: int = 0  # to the device
    file_wait_s: float = 0.0  # waited for layers to be read from the file
    gpu_wait_s: float = 0.0  # the host's layers waited for the device
    host_s: float = 0.0  # the host computed layers
    max_link_bytes_per_s: float = 0.0  # measured at load; 0: it was not


class KvCache(Protocol):
    """Paged keys and values of the layers a stage holds; block numbers mean the same on every stage."""

    block_size: int  # tokens a block
    num_blocks: int
    nbytes: int


class Backend(Protocol):
    """Computes layers on one device. Every method raises PipeLLMError subclasses for what it cannot do."""

    name: str
    device: torch.device

    def check(self, spec: ModelSpec) -> None:
        """Refuses, by name (UnsupportedModelError), a spec that asks for what this backend cannot do."""

    def stored_bytes(self, part: SpecPart, raw: RawTensors) -> int:
        """Bytes this backend will hold for a part of the model once prepared."""

    def kv_bytes_per_token(self, layer: LayerSpec) -> int:
        """Bytes of K and V a token takes in one layer."""

    def memory_budget_bytes(self) -> int:
        """What weights and KV cache may take on this device now, a reserve left out."""

    def offload_budget_bytes(self) -> int:
        """The same where layers that do not fit are streamed, or computed elsewhere; 0: they cannot be."""

    def place(self, file: GGUFFile, layers: Sequence[LayerSpec], other_bytes: int, kv_tokens: int) -> bool:
        """Told what is to be prepared: layers, and so many bytes of other parts and tokens of KV cache beside
        them. True: it was decided where the layers will lie, and they fit; False: all of them in the device's
        memory, should they fit. Raises OutOfCapacityError."""

    def prepare_embedding(self, spec: EmbeddingSpec, raw: RawTensors) -> Any: ...

    def prepare_layer(self, spec: LayerSpec, raw: RawTensors) -> Any: ...

    def prepare_head(self, spec: HeadSpec, raw: RawTensors) -> Any: ...

    def allocate_kv(self, layers: Sequence[LayerSpec], num_blocks: int, block_size: int) -> KvCache: ...

    def embed(self, embedding: Any, token_ids: np.ndarray) -> torch.Tensor:
        """int32 [rows] -> float32 [rows, hidden_size]."""

    def run_layer(self, layer: Any, kv: Any, batch: Batch, hidden_states: torch.Tensor) -> torch.Tensor:
        """float32 [rows, hidden_size] -> the same; appends the rows' K and V to `kv`. May work in place.

        `kv`: what `allocate_kv` returned.
        """

    def logits(self, head: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        """Final norm and output projection: float32 [n, hidden_size] -> float32 [n, vocab_size]."""

    def sample(
        self,
        logits: torch.Tensor,
        options: Sequence[SamplingOptions],
        histories: Sequence[Sequence[int]],
    ) -> list[Drawn]:
        """`stage.sampler.sample`, where the logits lie. They may be overwritten."""

    def decoder(
        self, embedding: Any, layers: Sequence[Any], head: Any, kv: Any, max_context: int
    ) -> Decoder | None:
        """For a whole model, if this backend decodes without the host."""

    def replayer(
        self, embedding: Any | None, layers: Sequence[Any], kv: Any, max_context: int
    ) -> Replayer | None:
        """For a part of a model, or one that does not decode by itself, if this backend has a faster way than
        layer by layer."""

    def streaming(self) -> StreamingCounters | None:
        """None: no weights are streamed. Called from any thread."""

    def close(self) -> None:
        """Frees device memory and threads; the backend is not used again."""


class HostSampling:
    """For backends whose logits lie in the host's memory, and whose steps need the host anyway."""

    def streaming(self) -> None:
        return None

    def sample(
        self,
        logits: torch.Tensor,
        options: Sequence[SamplingOptions],
        histories: Sequence[Sequence[int]],
    ) -> list[Drawn]:
        return sample(logits, options, histories)

    def decoder(self, embedding: Any, layers: Sequence[Any], head: Any, kv: Any, max_context: int) -> None:
        return None

    def replayer(
        self, embedding: Any | None, layers: Sequence[Any], kv: Any, max_context: int
    ) -> Replayer | None:
        return None
