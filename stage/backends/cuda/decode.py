"""Decode steps replayed as CUDA graphs, the drawn token feeding the next step on the device.

A graph is captured per number of rows (1, 2, 4, ... 64) and bucket of context, on first need; the least
recently used ones are dropped beyond a bound. Its inputs lie still: tokens, positions, block tables. Rows
that pad a bucket work on the cache's spare block. For a stage that holds the whole model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch

from common.errors import InvalidRequestError
from stage.backends.cuda.arguments import GreedyArgs
from stage.backends.cuda.backend import CudaBackend
from stage.backends.cuda.forward import Rows, context_bucket
from stage.backends.cuda.kv_cache import CudaKvCache
from stage.backends.cuda.weights import Embedding, Head, Layer

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
HISTORY_STEPS = 256  # drawn tokens kept on the device until they are read
_CHUNKS = 16  # blocks that share a row's search for the largest logit


def row_bucket(num_rows: int) -> int:
    for bucket in ROW_BUCKETS:
        if num_rows <= bucket:
            return bucket
    raise InvalidRequestError(f"a decode step takes up to {ROW_BUCKETS[-1]} rows, not {num_rows}")


class Decoder:
    """Greedy decode of up to 64 sequences. One at a time on a device: it uses the backend's operands."""

    def __init__(
        self,
        backend: CudaBackend,
        embedding: Embedding,
        layers: Sequence[Layer],
        head: Head,
        kv: CudaKvCache,
        max_context: int,
        graphs: bool = True,
        max_graphs: int = 24,
    ) -> None:
        self._backend, self._forward = backend, backend.forward
        self._embedding, self._layers, self._head, self._kv = embedding, tuple(layers), head, kv
        self._use_graphs, self._max_graphs = graphs, max_graphs
        self._graphs: OrderedDict[tuple[int, int], torch.cuda.CUDAGraph] = OrderedDict()
        self._pool = torch.cuda.graph_pool_handle()
        device, rows = backend.device, ROW_BUCKETS[-1]
        width = -(-context_bucket(max_context) // kv.block_size)
        self._tokens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int32, device=device)
        self._tables = torch.full((rows, width), kv.num_blocks, dtype=torch.int32, device=device)
        self._history = torch.zeros((HISTORY_STEPS, rows), dtype=torch.int32, device=device)
        self._step = torch.zeros(rows, dtype=torch.int32, device=device)
        self._partial = torch.zeros((rows, _CHUNKS, 2), dtype=torch.float32, device=device)
        self._arrived = torch.zeros(rows, dtype=torch.int32, device=device)
        self._num_rows = 0
        self._longest = 0  # positions of the next step, on the host
        self._steps = 0

    def place(self, tokens: Sequence[int], positions: Sequence[int], tables: Sequence[np.ndarray]) -> None:
        """The sequences of the steps to come: each one's next input token, its position, and its blocks,
        which must cover every position it will reach."""
        bucket = row_bucket(len(tokens))
        table = np.full((bucket, self._tables.shape[1]), self._kv.num_blocks, np.int32)
        for row, blocks in enumerate(tables):
            known = blocks[: table.shape[1]]
            table[row, : len(known)] = known
        padding = bucket - len(tokens)
        self._tables[:bucket].copy_(torch.from_numpy(table))
        self._tokens[:bucket].copy_(torch.tensor([*tokens, *[0] * padding], dtype=torch.int32))
        self._positions[:bucket].copy_(torch.tensor([*positions, *[0] * padding], dtype=torch.int32))
        self._step.zero_()
        self._steps = 0
        self._num_rows = len(tokens)
        self._longest = max(positions)

    def step(self) -> None:
        """Issues one step; nothing waits for the device."""
        bucket, context = row_bucket(self._num_rows), context_bucket(self._longest + 1)
        if self._use_graphs:
            self._graph(bucket, context).replay()
        else:
            self._run(bucket, context)
        self._longest += 1
        self._steps += 1

    def drawn(self, first: int, last: int) -> np.ndarray:
        """Tokens drawn in steps [first, last) since `place`, at most the last 256: int32 [steps, rows].
        Waits."""
        if last > self._steps or first < self._steps - HISTORY_STEPS:
            raise InvalidRequestError(f"steps [{first}, {last}) are not among the last {HISTORY_STEPS}")
        bucket = row_bucket(self._num_rows)
        index = torch.arange(first, last, device=self._backend.device) % HISTORY_STEPS
        flat = self._history.view(-1)[: HISTORY_STEPS * bucket].view(HISTORY_STEPS, bucket)
        rows: np.ndarray = flat[index, : self._num_rows].cpu().numpy()
        return rows

    def _graph(self, bucket: int, context: int) -> torch.cuda.CUDAGraph:
        key = (bucket, context)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._capture(bucket, context)
            self._graphs[key] = graph
            while len(self._graphs) > self._max_graphs:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return graph

    def _capture(self, bucket: int, context: int) -> torch.cuda.CUDAGraph:
        # Once outside a graph, so that kernels are compiled and loaded, on rows that the step to come sets
        # again.
        tokens, positions, step = self._tokens.clone(), self._positions.clone(), self._step.clone()
        self._run(bucket, context)
        self._tokens.copy_(tokens)
        self._positions.copy_(positions)
        self._step.copy_(step)
        torch.cuda.synchronize(self._backend.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._run(bucket, context)
        return graph

    def _run(self, bucket: int, context: int) -> None:
        rows = Rows(
            num_rows=bucket,
            positions=self._positions,
            block_tables=self._tables,
            slots=None,
            context=context,
            decode_tiles=None,
            num_decode=bucket,
        )
        hidden_states = self._forward.embed(self._embedding, self._tokens[:bucket])
        norms = [*(layer.norm for layer in self._layers[1:]), self._head.norm]
        operand = None
        for layer, next_norm in zip(self._layers, norms, strict=True):
            operand = self._forward.layer(layer, self._kv, rows, hidden_states, operand, next_norm)
        logits = self._forward.logits(self._head, hidden_states, operand)
        args = GreedyArgs(
            logits=logits.data_ptr(),
            tokens=self._tokens.data_ptr(),
            positions=self._positions.data_ptr(),
            history=self._history.data_ptr(),
            step=self._step.data_ptr(),
            partial=self._partial.data_ptr(),
            arrived=self._arrived.data_ptr(),
            vocabulary=logits.shape[1],
            history_steps=HISTORY_STEPS,
        )
        self._backend.kernels.launch("sample.cu", "greedy", (_CHUNKS, bucket, 1), 256, args)
