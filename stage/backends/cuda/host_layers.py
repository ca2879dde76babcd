"""Layers of a GPU stage, or their experts, that the host's cores compute while the link is busy, on the blobs
in host memory.

Hidden states cross as float32 through pinned memory. K and V live in host memory (host_kv.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from common.errors import PipeLLMError
from stage.backends.base import Batch, RawTensors
from stage.backends.cpu.backend import CpuBackend
from stage.backends.cpu.cores import usable_cores
from stage.backends.cuda.host_kv import HostKv
from stage.backends.cuda.kv_cache import CudaKvCache
from stage.model.spec import LayerSpec


class HostLayers:
    """`threads`: of the CPU engine; 0: one a core but one, which issues the GPU's work."""

    def __init__(self, threads: int) -> None:
        self._cpu = CpuBackend(threads or max(1, len(usable_cores()) - 1))
        self._layers: dict[int, Any] = {}
        self._without_attention: set[int] = set()
        self._arrived = torch.cuda.Event()
        self._crossing: torch.Tensor | None = None  # f32 [rows, hidden_size], pinned
        self._kv: HostKv | None = None
        self.gpu_wait_s = 0.0  # that the host waited for hidden states
        self.compute_s = 0.0
        # Told of each run, by the host's clock: when it was called, had its hidden states, and was through.
        self.ran: Callable[[Sequence[int], float, float, float], None] = lambda layers, *times: None

    def prepare(self, spec: LayerSpec, raw: RawTensors, experts_only: bool) -> None:
        self._layers[spec.index] = self._cpu.prepare_layer(spec, raw)
        if experts_only:
            self._without_attention.add(spec.index)

    def allocate_kv(
        self,
        specs: Sequence[LayerSpec],
        num_blocks: int,
        block_size: int,
        gpu: CudaKvCache,
        shared: Collection[int],
    ) -> None:
        """`gpu`: with room for these layers too; those in `shared` have one room for all of them."""
        host = self._cpu.allocate_kv(specs, num_blocks, block_size)
        self._kv = HostKv(specs, host, gpu, shared)

    @property
    def kv(self) -> HostKv:
        if self._kv is None:
            raise PipeLLMError("host layers run before their KV cache was made: a fault")
        return self._kv

    def run(self, layers: Sequence[int], batch: Batch, hidden_states: torch.Tensor) -> None:
        """hidden_states: f32 [>= rows, hidden_size] on the GPU, changed in place. Waits for the GPU's work so
        far; the copy back is only issued."""
        started = time.perf_counter()
        kv = self.kv
        rows, size = batch.num_rows, hidden_states.shape[1]
        if self._crossing is None or self._crossing.shape[0] < rows or self._crossing.shape[1] != size:
            self._crossing = torch.empty((max(rows, 64), size), dtype=torch.float32, pin_memory=True)
        here = self._crossing[:rows]
        here.copy_(hidden_states[:rows], non_blocking=True)
        self._arrived.record()
        self._arrived.synchronize()
        arrived = time.perf_counter()
        for layer in layers:
            if layer in self._without_attention:
                self._cpu.run_feed_forward(self._layers[layer], here)
                continue
            kv.before_host(layer, batch)
            self._cpu.run_layer(self._layers[layer], kv.host, batch, here)
            kv.after_host(layer, batch)
        computed = time.perf_counter()
        self.gpu_wait_s += arrived - started
        self.compute_s += computed - arrived
        self.ran(layers, started, arrived, computed)
        hidden_states[:rows].copy_(here, non_blocking=True)

    def close(self) -> None:
        self._layers.clear()
        self._kv = None
        self._cpu.close()
