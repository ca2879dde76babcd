"""Causal attention over the paged cache: grouped heads, sliding windows and score caps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from stage.backends.base import Batch, BatchSequence
from stage.backends.reference.kv_cache import ReferenceKvCache
from stage.backends.reference.ops import Linear, RmsNorm, Rope, softcap
from stage.model.spec import AttentionSpec

# Scores computed at once: bounds the memory of long prompts over long contexts.
_MAX_SCORES = 1 << 24


@dataclass(frozen=True)
class Attention:
    """One layer's attention, from its input norm to its output; the residual is added by the layer."""

    spec: AttentionSpec
    layer: int  # global number
    norm: RmsNorm
    q: Linear
    k: Linear
    v: Linear
    output: Linear
    rope: Rope
    q_norm: RmsNorm | None
    k_norm: RmsNorm | None
    post_norm: RmsNorm | None

    def __call__(self, hidden_states: torch.Tensor, kv: ReferenceKvCache, batch: Batch) -> torch.Tensor:
        """hidden_states: [rows, hidden_size] -> the same shape. Appends the rows' K and V to the cache."""
        x = self.norm(hidden_states)
        head_dim = self.spec.head_dim
        q = self.q(x).unflatten(-1, (-1, head_dim))
        k = self.k(x).unflatten(-1, (-1, head_dim))
        v = self.v(x).unflatten(-1, (-1, head_dim))
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        turns = self.rope.turns(torch.from_numpy(batch.positions))
        q, k = self.rope(q, turns), self.rope(k, turns)
        kv.append(self.layer, torch.from_numpy(batch.slots), k, v)
        attended = torch.empty_like(q)
        for sequence in batch.sequences:
            rows = slice(sequence.row_start, sequence.row_start + sequence.num_rows)
            attended[rows] = self._attend(q[rows], sequence, kv)
        out = self.output(attended.flatten(-2))
        return out if self.post_norm is None else self.post_norm(out)

    def _attend(self, q: torch.Tensor, sequence: BatchSequence, kv: ReferenceKvCache) -> torch.Tensor:
        """One sequence's rows over its cached context, some rows at a time. q: [rows, heads, head_dim]."""
        step = max(1, _MAX_SCORES // (self.spec.num_heads * sequence.context_length))
        parts = []
        for start in range(0, sequence.num_rows, step):
            rows = q[start : start + step]
            first_position = sequence.start_position + start
            parts.append(self._attend_rows(rows, first_position, sequence.block_table, kv))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_rows(
        self, q: torch.Tensor, position: int, block_table: np.ndarray, kv: ReferenceKvCache
    ) -> torch.Tensor:
        """Rows at consecutive positions from `position` on. q: [rows, heads, head_dim] -> the same shape."""
        spec = self.spec
        num_rows = len(q)
        end = position + num_rows
        window = spec.sliding_window
        start = 0 if window is None else max(0, position - window + 1)
        k = _gather(kv.keys[self.layer], block_table, start, end)
        v = _gather(kv.values[self.layer], block_table, start, end)
        # Query heads that share a KV head stand together: [kv_heads, group * rows, head_dim].
        grouped = q.unflatten(1, (spec.num_kv_heads, -1)).permute(1, 2, 0, 3)
        scores = grouped.flatten(1, 2) @ k.permute(1, 2, 0)
        scores = softcap(scores.mul_(spec.scale), spec.logit_softcap)
        if num_rows > 1:  # a single row sees all that was gathered
            hidden = _hidden_positions(position, end, start, window)
            scores.unflatten(1, (-1, num_rows)).masked_fill_(hidden, -torch.inf)
        out = torch.softmax(scores, -1) @ v.permute(1, 0, 2)
        return out.unflatten(1, (-1, num_rows)).permute(2, 0, 1, 3).flatten(1, 2)


def _gather(cache: torch.Tensor, block_table: np.ndarray, start: int, end: int) -> torch.Tensor:
    """Positions [start, end) of a sequence: [end - start, kv_heads, head_dim], a copy."""
    block_size = cache.shape[1]
    first = start // block_size
    blocks = torch.from_numpy(block_table[first : -(-end // block_size)])
    return cache[blocks].flatten(0, 1)[start - first * block_size : end - first * block_size]


def _hidden_positions(position: int, end: int, start: int, window: int | None) -> torch.Tensor:
    """Which context positions [start, end) each row from `position` on must not see: bool [rows, context]."""
    rows = torch.arange(position, end)[:, None]
    context = torch.arange(start, end)
    hidden = context > rows
    return hidden if window is None else hidden | (context <= rows - window)
