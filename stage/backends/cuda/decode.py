"""Decode steps replayed as CUDA graphs, the drawn token feeding the next step on the device.

A graph is captured per number of rows (1, 2, 4, ... 64), bucket of context and way of sampling, on first
need; the least recently used ones are dropped beyond a bound. Its inputs lie still: tokens, positions, block
tables, sampling options. Rows that pad a bucket work on the cache's spare block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from common.errors import InvalidRequestError
from stage.backends.base import Batch, DecodeRow
from stage.backends.cuda import sampling
from stage.backends.cuda.forward import TABLE_MARGIN, Forward, Rows, context_bucket
from stage.backends.cuda.kv_cache import CudaKvCache
from stage.backends.cuda.linear import Operand
from stage.backends.cuda.pieces import AnyLayer, Piece, StepPieces
from stage.backends.cuda.sampling import RowSampler, upload
from stage.backends.cuda.weights import Attention, Embedding, Experts, Head, Part
from stage.sampler import Drawn, SamplingOptions

if TYPE_CHECKING:
    from stage.backends.cuda.backend import CudaBackend

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
MAX_ROWS = ROW_BUCKETS[-1]
_MAX_GRAPHS = 24

_GREEDY = SamplingOptions(
    temperature=0.0, top_k=1, top_p=1.0, min_p=0.0, typical_p=1.0, repeat_penalty=1.0, repeat_last_n=0,
    presence_penalty=0.0, frequency_penalty=0.0, seed=0,
)  # fmt: skip
_DEFAULTS = replace(_GREEDY, temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)


def row_bucket(num_rows: int) -> int:
    for bucket in ROW_BUCKETS:
        if num_rows <= bucket:
            return bucket
    raise InvalidRequestError(f"a decode step takes up to {MAX_ROWS} rows, not {num_rows}")


class StepGraphs:
    """Steps by what shapes them, captured at first use and replayed after; or run eagerly each time."""

    def __init__(self, device: torch.device, enabled: bool, max_graphs: int = _MAX_GRAPHS) -> None:
        self._device, self._enabled, self._max_graphs = device, enabled, max_graphs
        self._graphs: OrderedDict[tuple[object, ...], torch.cuda.CUDAGraph] = OrderedDict()
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, key: tuple[object, ...], step: Callable[[], None], trial: Callable[[], None]) -> None:
        """`step` works on tensors that lie still; `trial` runs it once and leaves no trace."""
        if not self._enabled:
            step()
            return
        if key not in self._graphs:
            self._graphs[key] = self._capture(step, trial)
            while len(self._graphs) > self._max_graphs:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        self._graphs[key].replay()

    def _capture(self, step: Callable[[], None], trial: Callable[[], None]) -> torch.cuda.CUDAGraph:
        trial()  # so that kernels are compiled and loaded, and buffers made
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads wait for events meanwhile: only this one's calls matter to the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            step()
        return graph


class StepRows:
    """Positions' block tables of up to 64 sequences, at fixed addresses."""

    def __init__(self, kv: CudaKvCache, max_context: int, device: torch.device) -> None:
        width = -(-context_bucket(max_context) // kv.block_size) + TABLE_MARGIN
        self.tables = torch.full((MAX_ROWS, width), kv.num_blocks, dtype=torch.int32, device=device)
        self._spare = kv.num_blocks
        self._lengths: list[int] = []

    def place(self, tables: Sequence[np.ndarray], bucket: int) -> None:
        self._lengths = [len(table) for table in tables]
        self._upload(tables)
        # A padding row's position grows with the others': every block of its table is the spare one.
        self.tables[len(tables) : bucket].fill_(self._spare)

    def grow(self, tables: Sequence[np.ndarray]) -> None:
        """The same sequences, some perhaps with more blocks."""
        lengths = [len(table) for table in tables]
        if lengths != self._lengths:
            self._lengths = lengths
            self._upload(tables)

    def _upload(self, tables: Sequence[np.ndarray]) -> None:
        width = min(max(map(len, tables)), self.tables.shape[1])
        array = np.full((len(tables), width), self._spare, np.int32)
        for row, table in zip(array, tables, strict=True):
            row[: len(table)] = table[:width]
        upload(self.tables[: len(tables), :width], array)

    def rows(self, positions: torch.Tensor, bucket: int, context: int) -> Rows:
        return Rows(
            num_rows=bucket,
            positions=positions,
            block_tables=self.tables,
            slots=None,
            context=context,
            decode_tiles=None,
            num_decode=bucket,
        )


class DeviceDraws:
    """What one `issue` draws: read behind the device, on any thread."""

    def __init__(self, records: torch.Tensor, options: Sequence[SamplingOptions], vocabulary: int) -> None:
        self._records = records
        self._options = options
        self._vocabulary = vocabulary
        self._done = torch.cuda.Event(blocking=True)
        self._done.record()

    def wait(self) -> list[list[Drawn]]:
        self._done.synchronize()
        return [
            [
                sampling.drawn(record, options, self._vocabulary)
                for record, options in zip(step, self._options, strict=False)  # the rest is padding
            ]
            for step in self._records.numpy()
        ]


class CudaDecoder:
    """Decode of up to 64 sequences by a whole model. One at a time on a device: it uses the backend's
    operands."""

    max_rows = MAX_ROWS
    max_repeat = sampling.MAX_STEPS

    def __init__(
        self,
        backend: CudaBackend,
        embedding: Embedding,
        layers: Sequence[AnyLayer],
        head: Head,
        kv: CudaKvCache,
        max_context: int,
        graphs: bool = True,
    ) -> None:
        self._forward, self._device = backend.forward, backend.device
        self._embedding, self._head, self._kv = embedding, head, kv
        self._pieces = StepPieces(backend.offloaded, layers)
        shape = (MAX_ROWS, head.output.in_features)
        self._hidden_states = torch.zeros(shape, dtype=torch.float32, device=backend.device)
        self._graphs = StepGraphs(backend.device, graphs, _MAX_GRAPHS * self._pieces.count)
        self._rows = StepRows(kv, max_context, backend.device)
        self._vocabulary = head.output.out_features
        self._sampler = RowSampler(backend.kernels, self._vocabulary, context_bucket(max_context))
        self._placed: list[tuple[int, int, int]] = []  # (sequence, generation, next position), row by row

    @torch.inference_mode()
    def warm(self) -> None:
        """Captures what the first request will most likely need."""
        for options in (_GREEDY, _DEFAULTS):
            row = DecodeRow(-1, 0, [0], np.zeros(1, np.int32), options)
            self.issue([row], 1).wait()
        self._placed = []

    def continues(self, rows: Sequence[DecodeRow]) -> bool:
        return self._placed == [(row.sequence_id, row.generation, row.position) for row in rows]

    def issue(self, rows: Sequence[DecodeRow], repeat: int) -> DeviceDraws:
        torch.cuda.set_device(self._device)  # kernels are launched in the calling thread's context
        bucket = row_bucket(len(rows))
        tables = [row.block_table for row in rows]
        if self.continues(rows):
            self._rows.grow(tables)
        else:
            self._rows.place(tables, bucket)
            self._sampler.place(
                [row.options for row in rows],
                [row.tokens for row in rows],
                [row.position for row in rows],
                bucket,
            )
        self._placed = [(row.sequence_id, row.generation, row.position + repeat) for row in rows]
        self._sampler.begin()
        longest = max(row.position for row in rows) + 1
        method = self._sampler.method
        for ahead in range(repeat):
            batch = self._pieces.host_batch(rows, ahead, self._kv.block_size)
            self._step(bucket, context_bucket(longest + ahead), method, batch)
        records = self._sampler.records(repeat, bucket)
        return DeviceDraws(records, [row.options for row in rows], self._vocabulary)

    def _step(self, bucket: int, context: int, method: str, batch: Batch | None) -> None:
        def run(piece: Piece) -> None:
            def step() -> None:
                self._compute(piece, bucket, context, method)

            def trial() -> None:
                saved, kept = self._sampler.save(), self._hidden_states.clone()
                step()
                self._sampler.restore(saved)
                self._hidden_states.copy_(kept)

            self._graphs.run((bucket, context, method, piece.number), step, trial)

        self._pieces.run(bucket, batch, self._hidden_states, run)

    def _compute(self, piece: Piece, bucket: int, context: int, method: str) -> None:
        rows = self._rows.rows(self._sampler.positions, bucket, context)
        hidden_states = self._hidden_states[:bucket]
        if piece.is_first:
            embedded = self._forward.embed(self._embedding, self._sampler.tokens[:bucket])
            hidden_states = embedded if piece.is_last else hidden_states.copy_(embedded)
        head = self._head if piece.is_last else None
        operand = run_layers(self._forward, piece.layers, self._kv, rows, hidden_states, head)
        if piece.is_last:
            self._sampler.launch(self._forward.logits(self._head, hidden_states, operand), method)


class RangeGraphs:
    """Decode forwards of a part of the model: inputs come from the host, hidden states go back to it."""

    def __init__(
        self,
        backend: CudaBackend,
        embedding: Embedding | None,
        layers: Sequence[AnyLayer],
        kv: CudaKvCache,
        max_context: int,
    ) -> None:
        self._forward, self._device, self._kv = backend.forward, backend.device, kv
        self._embedding = embedding
        self._pieces = StepPieces(backend.offloaded, layers)
        self._graphs = StepGraphs(backend.device, True, _MAX_GRAPHS * self._pieces.count)
        self._rows = StepRows(kv, max_context, backend.device)
        self._positions = torch.zeros(MAX_ROWS, dtype=torch.int32, device=backend.device)
        self._tokens = torch.zeros(MAX_ROWS, dtype=torch.int32, device=backend.device)
        shape = (MAX_ROWS, layers[0].spec.attention.output.out_features)
        self._hidden_states = torch.zeros(shape, dtype=torch.float32, device=backend.device)

    def takes(self, batch: Batch) -> bool:
        return batch.num_rows == len(batch.sequences) <= MAX_ROWS

    def run(self, batch: Batch, inputs: np.ndarray | torch.Tensor) -> torch.Tensor:
        torch.cuda.set_device(self._device)
        num_rows, bucket = batch.num_rows, row_bucket(batch.num_rows)
        self._rows.place([sequence.block_table for sequence in batch.sequences], bucket)
        upload(self._positions[:num_rows], batch.positions)
        self._positions[num_rows:bucket].zero_()
        if isinstance(inputs, np.ndarray):
            upload(self._tokens[:num_rows], inputs)
        else:
            self._hidden_states[:num_rows].copy_(inputs)
        context = context_bucket(max(sequence.context_length for sequence in batch.sequences))

        def run(piece: Piece) -> None:
            if not (piece.layers or (piece.is_first and self._embedding is not None)):
                return

            def step() -> None:
                rows = self._rows.rows(self._positions, bucket, context)
                hidden_states = self._hidden_states[:bucket]
                if piece.is_first and self._embedding is not None:
                    hidden_states.copy_(self._forward.embed(self._embedding, self._tokens[:bucket]))
                run_layers(self._forward, piece.layers, self._kv, rows, hidden_states, None)

            def trial() -> None:
                saved = self._hidden_states.clone()
                step()
                self._hidden_states.copy_(saved)

            self._graphs.run((bucket, context, piece.number), step, trial)

        self._pieces.run(bucket, batch, self._hidden_states, run)
        return self._hidden_states[:num_rows].clone()


def run_layers(
    forward: Forward,
    layers: Sequence[Part],
    kv: CudaKvCache,
    rows: Rows,
    hidden_states: torch.Tensor,
    head: Head | None,
) -> Operand | None:
    """Layers, or parts of them, one after the other, each leaving the next one's operand; returns the head's,
    if that comes next. Experts need none and leave none."""
    operand = None
    for index, layer in enumerate(layers):
        if isinstance(layer, Experts):
            forward.experts(layer.ffn, hidden_states)
            operand = None
            continue
        if isinstance(layer, Attention):
            operand = forward.attend(layer.layer, kv, rows, hidden_states, operand)
            continue
        following = layers[index + 1] if index + 1 < len(layers) else head
        next_norm = following.norm if following is not None and not isinstance(following, Experts) else None
        operand = forward.layer(layer, kv, rows, hidden_states, operand, next_norm)
    return operand
