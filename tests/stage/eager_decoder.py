"""A backend that decodes ahead without a GPU: the reference, computing at issue and telling later."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from stage.backends.base import DecodeRow, make_batch
from stage.backends.reference import ReferenceBackend
from stage.sampler import Drawn, sample

TIMEOUT_S = 20


class EagerDecoder:
    max_rows = 4
    max_repeat = 8

    def __init__(self, backend: ReferenceBackend, embedding: Any, layers: Sequence[Any], head: Any, kv: Any):
        self._backend, self._embedding, self._layers, self._head, self._kv = (
            backend, embedding, layers, head, kv
        )  # fmt: skip
        # By sequence and generation: next position, its tokens.
        self._placed: dict[tuple[int, int], tuple[int, list[int]]] = {}
        self.issued: list[tuple[list[int], int, bool]] = []  # sequences, repeat, whether they continued
        self.may_tell = threading.Event()
        self.may_tell.set()

    def continues(self, rows: Sequence[DecodeRow]) -> bool:
        placed = [(*key, position) for key, (position, _) in self._placed.items()]
        return placed == [(row.sequence_id, row.generation, row.position) for row in rows]

    def issue(self, rows: Sequence[DecodeRow], repeat: int) -> Told:
        continued = self.continues(rows)
        self.issued.append(([row.sequence_id for row in rows], repeat, continued))
        if not continued:
            assert all(len(row.tokens) > row.position for row in rows)
            self._placed = {
                (row.sequence_id, row.generation): (row.position, list(row.tokens[: row.position + 1]))
                for row in rows
            }
        drawn = []
        for _ in range(repeat):
            batch = make_batch(
                [
                    (position, 1, row.block_table)
                    for row, (position, _) in zip(rows, self._placed.values(), strict=True)
                ],
                self._kv.block_size,
            )
            histories = [tokens for _, tokens in self._placed.values()]
            ids = np.array([tokens[-1] for tokens in histories], np.int32)
            hidden_states = self._backend.embed(self._embedding, ids)
            for layer in self._layers:
                hidden_states = self._backend.run_layer(layer, self._kv, batch, hidden_states)
            logits = self._backend.logits(self._head, hidden_states)
            step = sample(logits, [row.options for row in rows], histories)
            drawn.append(step)
            for one, (key, (position, tokens)) in zip(step, list(self._placed.items()), strict=True):
                tokens.append(one.token_id)
                self._placed[key] = (position + 1, tokens)
        return Told(drawn, self.may_tell)


class Told:
    def __init__(self, drawn: list[list[Drawn]], may_tell: threading.Event) -> None:
        self._drawn, self._may_tell = drawn, may_tell

    def wait(self) -> list[list[Drawn]]:
        if not self._may_tell.wait(TIMEOUT_S):
            raise TimeoutError("the test never let the draws be told")
        return self._drawn


class DecodingBackend(ReferenceBackend):
    made: EagerDecoder

    def decoder(  # type: ignore[override]
        self, embedding: Any, layers: Sequence[Any], head: Any, kv: Any, max_context: int
    ) -> EagerDecoder:
        self.made = EagerDecoder(self, embedding, layers, head, kv)
        return self.made
