"""A whole GGUF model on one backend, run without a mesh: for tests of backends against each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from common.gguf.reader import GGUFFile
from stage.backends.base import Backend, make_batch
from stage.model.registry import build_spec
from stage.model.spec import tensor_refs
from stage.weights.loader import raw_tensors


class WholeModel:
    """All layers, and a cache whose blocks are dealt out in a scrambled order."""

    def __init__(
        self,
        path: Path,
        backend: Backend,
        context_length: int = 256,
        block_size: int = 16,
        sequences: int = 1,
    ) -> None:
        self.file = GGUFFile.open(path)
        self.spec = build_spec(self.file, context_length)
        self.backend = backend
        backend.check(self.spec)
        raw = raw_tensors(self.file, set(tensor_refs(self.spec)))

        def own(part: object) -> dict:
            return {ref: raw[ref] for ref in tensor_refs(part)}

        self.embedding = backend.prepare_embedding(self.spec.embedding, own(self.spec.embedding))
        self.layers = [backend.prepare_layer(layer, own(layer)) for layer in self.spec.layers]
        self.head = backend.prepare_head(self.spec.head, own(self.spec.head))
        blocks = -(-context_length // block_size)
        self.kv = backend.allocate_kv(self.spec.layers, blocks * sequences, block_size)
        order = np.random.default_rng(7).permutation(blocks * sequences).astype(np.int32)
        self.block_tables = order.reshape(sequences, blocks)

    def forward(self, pieces: Sequence[tuple[int, int, Sequence[int]]]) -> torch.Tensor:
        """Logits of all rows of one batch of (sequence, start position, token ids)."""
        ids = np.array([token for _, _, tokens in pieces for token in tokens], np.int32)
        batch = make_batch(
            [(start, len(tokens), self.block_tables[seq]) for seq, start, tokens in pieces],
            self.kv.block_size,
        )
        hidden_states = self.backend.embed(self.embedding, ids)
        for layer in self.layers:
            hidden_states = self.backend.run_layer(layer, self.kv, batch, hidden_states)
        return self.backend.logits(self.head, hidden_states)

    def logits(self, ids: Sequence[int], chunks: Iterable[int] = ()) -> torch.Tensor:
        """Logits of every token of one sequence, fed in chunks of these sizes and the rest at once."""
        parts, start = [], 0
        for size in (*chunks, len(ids)):
            tokens = ids[start : start + size]
            if len(tokens):
                parts.append(self.forward([(0, start, tokens)]))
            start += len(tokens)
        return torch.cat(parts)
