"""Runs a GGUF file through one or more runners, the way a ring of stages does, without the daemons."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from common.gguf.reader import GGUFFile
from stage.backends.base import make_batch
from stage.backends.reference import ReferenceBackend
from stage.model.registry import build_spec
from stage.runner import Runner

BLOCK_SIZE = 16


class Ring:
    """A model over runners cut at `cuts` (global layer numbers), with room for `num_sequences` sequences.

    Blocks lie scattered, so that positions and block numbers have nothing to do with one another.
    """

    def __init__(
        self, path: Path, context_length: int, cuts: Sequence[int] = (), num_sequences: int = 1
    ) -> None:
        blocks_each = -(-context_length // BLOCK_SIZE)
        num_blocks = num_sequences * blocks_each
        blocks = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
        self.tables = blocks.reshape(num_sequences, blocks_each)
        with GGUFFile.open(path) as file:
            spec = build_spec(file, context_length)
            borders = (0, *cuts, len(spec.layers))
            self.runners = [
                Runner.load(
                    ReferenceBackend(),
                    file,
                    spec,
                    start,
                    end,
                    embedding=start == 0,
                    head=end == len(spec.layers),
                    num_kv_blocks=num_blocks,
                    kv_block_size=BLOCK_SIZE,
                )
                for start, end in pairwise(borders)
            ]

    def forward(
        self, rows: Sequence[tuple[int, int, Sequence[int]]], last: int | None = None
    ) -> torch.Tensor:
        """Logits float32 [n, vocab_size] of (sequence, start position, token ids) triples in one batch.

        Of all rows, or of each triple's `last` ones.
        """
        batch = make_batch([(start, len(ids), self.tables[s]) for s, start, ids in rows], BLOCK_SIZE)
        carried: np.ndarray | torch.Tensor = np.concatenate([np.asarray(ids, np.int32) for _, _, ids in rows])
        with torch.inference_mode():
            for runner in self.runners:
                carried = runner.forward(batch, carried)
            assert isinstance(carried, torch.Tensor)
            ends = np.cumsum([len(ids) for _, _, ids in rows])
            wanted = [
                np.arange(end - (last or len(ids)), end) for end, (_, _, ids) in zip(ends, rows, strict=True)
            ]
            return self.runners[-1].logits(carried, np.concatenate(wanted))

    def in_chunks(self, ids: Sequence[int], chunk: int) -> torch.Tensor:
        """Logits of all rows of one sequence, computed `chunk` rows at a time."""
        return torch.cat([self.forward([(0, i, ids[i : i + chunk])]) for i in range(0, len(ids), chunk)])
