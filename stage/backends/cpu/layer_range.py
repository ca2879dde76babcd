"""Layers that run one after the other in a single call of the native library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from common.errors import OutOfCapacityError
from stage.backends.base import Batch
from stage.backends.cpu import abi
from stage.backends.cpu.kv_cache import CpuKvCache
from stage.backends.cpu.plan import Layer, Rope


class LayerRange:
    """What the library needs of the layers and their cache, laid out once."""

    def __init__(self, layers: Sequence[Layer], kv: CpuKvCache) -> None:
        self._pointers = ctypes.c_void_p * len(layers)
        self._plans = self._pointers(*(layer.plan.address for layer in layers))
        self._kv = self._pointers(*(kv.addresses[layer.index] for layer in layers))
        ropes = {layer.rope.key: layer.rope for layer in layers}  # equal ones share a table
        self._ropes = list(ropes.values())
        numbers = {key: number for number, key in enumerate(ropes)}
        self._rope_numbers = [numbers[layer.rope.key] for layer in layers]

    def run(self, library: ctypes.CDLL, engine: int | None, batch: NativeBatch, hidden_states: int) -> None:
        """`hidden_states`: address of f32 [rows, hidden_size], overwritten."""
        tables = [batch.address(rope) for rope in self._ropes]
        batches = self._pointers(*[tables[number] for number in self._rope_numbers])
        status = library.pipellm_run_layers(
            engine, len(batches), self._plans, self._kv, batches, hidden_states
        )
        if status:
            raise OutOfCapacityError(
                f"no memory for the activations of {batch.batch.num_rows} rows: smaller chunks"
            )


class NativeBatch:
    """A batch as the native library reads it, made once and used for every layer."""

    def __init__(self, library: ctypes.CDLL, batch: Batch) -> None:
        self.batch = batch
        self._library = library
        self._positions = np.ascontiguousarray(batch.positions, np.int32)
        self._slots = np.ascontiguousarray(batch.slots, np.int64)
        self._tables = [np.ascontiguousarray(seq.block_table, np.int32) for seq in batch.sequences]
        self._sequences = (abi.SequenceRows * len(batch.sequences))(
            *(
                abi.SequenceRows(abi.address(table), seq.row_start, seq.num_rows, seq.start_position)
                for seq, table in zip(batch.sequences, self._tables, strict=True)
            )
        )
        self._by_rope: dict[tuple[bytes, float], tuple[int, object]] = {}

    def address(self, rope: Rope) -> int:
        """The struct with this rope's table; equal ropes share it."""
        if (found := self._by_rope.get(rope.key)) is None:
            found = self._by_rope[rope.key] = self._make(rope)
        return found[0]

    def _make(self, rope: Rope) -> tuple[int, object]:
        rows, half = len(self._positions), len(rope.inverse_frequencies)
        table = np.empty((rows, 2 * half), np.float32)
        self._library.pipellm_rope(
            abi.address(self._positions), rows, abi.address(rope.inverse_frequencies), half, rope.magnitude,
            abi.address(table),
        )  # fmt: skip
        struct = abi.BatchRows(
            self._sequences, abi.address(self._slots), abi.address(table), len(self._sequences), rows
        )
        return ctypes.addressof(struct), (struct, table)
