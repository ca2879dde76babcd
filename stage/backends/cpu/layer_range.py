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
        self._ropes = [layer.rope for layer in layers]

    def run(self, library: ctypes.CDLL, engine: int | None, batch: NativeBatch, hidden_states: int) -> None:
        """`hidden_states`: address of f32 [rows, hidden_size], overwritten."""
        batches = self._pointers(*map(batch.address, self._ropes))
        status = library.pipellm_run_layers(
            engine, len(self._ropes), self._plans, self._kv, batches, hidden_states
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
        self._by_rope: dict[int, tuple[int, object]] = {}
        self._by_key: dict[tuple[bytes, float], tuple[int, object]] = {}

    def address(self, rope: Rope) -> int:
        """The struct with this rope's table; layers with equal ropes share it."""
        found = self._by_rope.get(id(rope))
        if found is None:
            found = self._by_key.get(rope.key) or self._make(rope)
            self._by_rope[id(rope)] = self._by_key[rope.key] = found
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
        return ctypes.addressof(struct), (struct, table, rope)
