"""The prepared parts of a stage's range of layers, and the order in which they run.

It knows what a stage holds (embedding, layers [layer_start, layer_end), head, KV cache) and nothing of
sequences, steps or links. Splitting a model over several runners changes no bit of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from common.errors import CancelledError, InvalidRequestError, NotReadyError, OutOfCapacityError
from common.gguf.reader import GGUFFile
from common.sizes import gib
from stage.backends.base import Backend, Batch, Decoder, KvCache, RawTensors, Replayer, StreamingCounters
from stage.model.spec import EmbeddingSpec, HeadSpec, LayerSpec, ModelSpec, SpecPart, tensor_refs
from stage.sampler import Drawn, SamplingOptions
from stage.weights.loader import raw_tensors


@dataclass(frozen=True)
class _Part:
    spec: SpecPart
    raw: RawTensors
    stored_bytes: int


class Runner:
    """Runs layers [layer_start, layer_end) of one model on one backend. Made by `Runner.load`."""

    def __init__(
        self,
        backend: Backend,
        spec: ModelSpec,
        embedding: Any,
        layers: Sequence[Any],
        head: Any,
        kv: KvCache,
        weight_bytes: int,
    ) -> None:
        self.weight_bytes = weight_bytes
        self.has_embedding = embedding is not None
        self.has_head = head is not None
        self._backend = backend
        self._spec = spec
        self._embedding = embedding
        self._layers = layers
        self._head = head
        self._kv: KvCache | None = kv
        max_context = min(spec.context_length, kv.num_blocks * kv.block_size)
        self._decoder: Decoder | None = None
        self._replayer: Replayer | None = None
        if self.has_embedding and self.has_head:
            self._decoder = backend.decoder(embedding, layers, head, kv, max_context)
        if self._decoder is None:
            self._replayer = backend.replayer(embedding, layers, kv, max_context)

    @property
    def decoder(self) -> Decoder | None:
        """Decodes ahead of the host, where this runner holds the whole model and its backend can."""
        return self._decoder

    def streaming(self) -> StreamingCounters | None:
        """None: no weights are streamed."""
        return self._backend.streaming()

    @property
    def kv(self) -> KvCache:
        if self._kv is None:
            raise NotReadyError("the layers are unloaded")
        return self._kv

    @classmethod
    def load(
        cls,
        backend: Backend,
        file: GGUFFile,
        spec: ModelSpec,
        layer_start: int,
        layer_end: int,
        *,
        embedding: bool,
        head: bool,
        num_kv_blocks: int,
        kv_block_size: int,
        on_progress: Callable[[int, int], None] = lambda bytes_done, bytes_total: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Runner:
        """Prepares the parts of a range, one after the other; no other part's bytes are read.

        `on_progress` is told (bytes_done, bytes_total) after each part, as the backend stores them.
        Raises `InvalidRequestError` for a range the model has not, `OutOfCapacityError` where weights and
        KV cache exceed the backend's budget, `CancelledError` soon after `cancelled` turns true.
        The runner owns the backend from here on, and closes it in `close`.
        """
        _check_range(spec, layer_start, layer_end, embedding, head)
        layers = spec.layers[layer_start:layer_end]
        specs: list[SpecPart] = [*layers]
        if embedding:
            specs.insert(0, spec.embedding)
        if head:
            specs.append(spec.head)
        if num_kv_blocks < 1 or kv_block_size < 1:
            raise InvalidRequestError(f"a KV cache of {num_kv_blocks} blocks of {kv_block_size} tokens")
        parts = [_part(backend, file, part) for part in specs]
        weight_bytes = sum(part.stored_bytes for part in parts)
        other_bytes = sum(part.stored_bytes for part in parts if not isinstance(part.spec, LayerSpec))
        if not backend.place(file, layers, other_bytes, num_kv_blocks * kv_block_size):
            _check_fit(backend, weight_bytes, layers, num_kv_blocks, kv_block_size)
        kv = backend.allocate_kv(layers, num_kv_blocks, kv_block_size)
        prepared = []
        bytes_done = 0
        for part in parts:
            if cancelled():
                raise CancelledError("the load was cancelled")
            prepared.append(_prepare(backend, part))
            bytes_done += part.stored_bytes
            on_progress(bytes_done, weight_bytes)
        return cls(
            backend,
            spec,
            embedding=prepared.pop(0) if embedding else None,
            head=prepared.pop() if head else None,
            layers=prepared,
            kv=kv,
            weight_bytes=weight_bytes,
        )

    def forward(self, batch: Batch, inputs: np.ndarray | torch.Tensor) -> torch.Tensor:
        """Runs the range over a batch and appends its K and V to the cache.

        `inputs`: token ids int32 [rows] where this runner has the embedding, else the previous runner's
        hidden states, float32 [rows, hidden_size] (which may be overwritten). Returns hidden states,
        float32 [rows, hidden_size]. Raises `InvalidRequestError` for inputs of another shape.
        """
        kv = self.kv
        shape = (batch.num_rows,) if self.has_embedding else (batch.num_rows, self._spec.hidden_size)
        if tuple(inputs.shape) != shape:
            raise InvalidRequestError(f"forward: inputs of shape {tuple(inputs.shape)}, expected is {shape}")
        if self._replayer is not None and self._replayer.takes(batch):
            return self._replayer.run(batch, inputs)
        if isinstance(inputs, np.ndarray):
            hidden_states = self._backend.embed(self._embedding, inputs)
        else:
            hidden_states = inputs
        for layer in self._layers:
            hidden_states = self._backend.run_layer(layer, kv, batch, hidden_states)
        return hidden_states

    def logits(self, hidden_states: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        """Logits of the named rows, ascending: [rows, hidden_size] and int [n] -> float32 [n, vocab_size]."""
        if len(rows) < len(hidden_states):
            hidden_states = hidden_states[torch.from_numpy(rows)]
        return self._backend.logits(self._head, hidden_states)

    def sample(
        self,
        hidden_states: torch.Tensor,
        rows: np.ndarray,
        options: Sequence[SamplingOptions],
        histories: Sequence[Sequence[int]],
    ) -> list[Drawn]:
        """A token after each of the named rows, ascending; `histories[i]`: all tokens up to row i's own."""
        return self._backend.sample(self.logits(hidden_states, rows), options, histories)

    def close(self) -> None:
        """Lets go of all memory; the runner is not used again (`NotReadyError`). Idempotent."""
        self._decoder = self._replayer = None
        self._embedding = self._head = self._kv = None
        self._layers = ()
        self._backend.close()


def _part(backend: Backend, file: GGUFFile, spec: SpecPart) -> _Part:
    raw = raw_tensors(file, tensor_refs(spec))
    return _Part(spec, raw, backend.stored_bytes(spec, raw))


def _prepare(backend: Backend, part: _Part) -> Any:
    if isinstance(part.spec, EmbeddingSpec):
        return backend.prepare_embedding(part.spec, part.raw)
    if isinstance(part.spec, HeadSpec):
        return backend.prepare_head(part.spec, part.raw)
    return backend.prepare_layer(part.spec, part.raw)


def _check_range(spec: ModelSpec, layer_start: int, layer_end: int, embedding: bool, head: bool) -> None:
    num_layers = len(spec.layers)
    if not 0 <= layer_start < layer_end <= num_layers:
        raise InvalidRequestError(
            f"layers {layer_start} to {layer_end} were asked for, the model has layers 0 to {num_layers}"
        )
    if (embedding and layer_start > 0) or (head and layer_end < num_layers):
        raise InvalidRequestError(
            f"layers {layer_start} to {layer_end} of {num_layers}: the embedding goes with the first "
            "layer and the head with the last"
        )


def _check_fit(
    backend: Backend, weight_bytes: int, layers: Sequence[LayerSpec], num_kv_blocks: int, kv_block_size: int
) -> None:
    per_token = sum(backend.kv_bytes_per_token(layer) for layer in layers)
    kv_bytes = num_kv_blocks * kv_block_size * per_token
    budget = backend.memory_budget_bytes()
    if weight_bytes + kv_bytes > budget:
        room = (budget - weight_bytes) // max(1, kv_block_size * per_token)
        fewer = f"; a KV cache of {room * kv_block_size} tokens would fit" if room > 0 else ""
        raise OutOfCapacityError(
            f"layers {layers[0].index} to {layers[-1].index + 1} do not fit on {backend.device}: "
            f"{gib(weight_bytes)} of weights and {gib(kv_bytes)} of KV cache ({num_kv_blocks} blocks of "
            f"{kv_block_size} tokens), {gib(budget)} are free for them: "
            f"{gib(weight_bytes + kv_bytes - budget)} are missing{fewer}. Lower the context length, give "
            "this stage fewer layers (add another stage), free memory, or take a smaller quantisation"
        )
