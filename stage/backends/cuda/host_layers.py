"""Layers of a GPU stage that the host's cores compute, on the blobs in pinned memory, while the link is busy.

Hidden states cross as float32 through pinned memory. The K and V of these layers live in host memory. Where
such a layer is computed on the GPU after all (prefill, its weights streamed), the blocks that its rows attend
over are lent to the GPU for that layer: one layer's room there serves all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stage.backends.base import Batch, RawTensors
from stage.backends.cpu.backend import CpuBackend
from stage.backends.cpu.cores import usable_cores
from stage.backends.cuda.kv_cache import CudaKvCache, head_stride
from stage.model.spec import LayerSpec

_RETURNS_UNDER_WAY = 2  # K and V on their way back, before the host waits for the oldest


@dataclass
class _Returning:
    layer: int
    blocks: torch.Tensor  # int64 [n], on the host
    keys: torch.Tensor  # f16 [n, kv_heads, block_size, head_dim], pinned
    values: torch.Tensor
    arrived: torch.cuda.Event


class HostLayers:
    """`threads`: of the CPU engine; 0: one a core but one, which issues the GPU's work."""

    def __init__(self, device: torch.device, threads: int) -> None:
        self._device = device
        self.cpu = CpuBackend(threads or max(1, len(usable_cores()) - 1))
        self._specs: dict[int, LayerSpec] = {}
        self._layers: dict[int, Any] = {}
        self._arrived = torch.cuda.Event()
        self._crossing: torch.Tensor | None = None  # f32 [rows, hidden_size], pinned
        self._kv: Any = None
        self._returning: deque[_Returning] = deque()

    def prepare(self, spec: LayerSpec, raw: RawTensors) -> None:
        self._specs[spec.index] = spec
        self._layers[spec.index] = self.cpu.prepare_layer(spec, raw)

    def kv_bytes_per_token(self, layer: LayerSpec) -> int:
        return self.cpu.kv_bytes_per_token(layer)

    def allocate_kv(self, specs: Sequence[LayerSpec], num_blocks: int, block_size: int) -> None:
        self._kv = self.cpu.allocate_kv(specs, num_blocks, block_size)

    @property
    def kv_nbytes(self) -> int:
        return int(self._kv.nbytes) if self._kv is not None else 0

    # --- decode: the host computes ------------------------------------------------------------------------

    def run(self, layers: Sequence[int], batch: Batch, hidden_states: torch.Tensor) -> None:
        """hidden_states: f32 [>= rows, hidden_size] on the GPU, changed in place. Waits for the GPU's work
        so far; the copy back is only issued."""
        self._bring_home()
        rows, size = batch.num_rows, hidden_states.shape[1]
        if self._crossing is None or self._crossing.shape[0] < rows or self._crossing.shape[1] != size:
            self._crossing = torch.empty((max(rows, 64), size), dtype=torch.float32, pin_memory=True)
        here = self._crossing[:rows]
        here.copy_(hidden_states[:rows], non_blocking=True)
        self._arrived.record()
        self._arrived.synchronize()
        for layer in layers:
            self.cpu.run_layer(self._layers[layer], self._kv, batch, here)
        hidden_states[:rows].copy_(here, non_blocking=True)

    # --- prefill: the GPU computes ------------------------------------------------------------------------

    def lend(self, layer: int, batch: Batch, kv: CudaKvCache) -> None:
        """Puts the earlier K and V of the batch's sequences where the GPU's layer expects them."""
        self._bring_home()
        size = kv.block_size
        used = [s.block_table[: -(-s.start_position // size)] for s in batch.sequences]
        blocks = torch.from_numpy(np.unique(np.concatenate(used)).astype(np.int64))
        if not len(blocks):
            return
        keys, values = self._host_kv(layer, size)
        on_gpu = blocks.to(self._device)
        k, v = (one[blocks].pin_memory().to(self._device, non_blocking=True) for one in (keys, values))
        gpu_keys, gpu_values = self._gpu_kv(layer, kv)
        head_dim = keys.shape[-1]
        gpu_keys[on_gpu, ..., :head_dim] = k
        gpu_values[on_gpu, :, :head_dim, :] = v.transpose(-1, -2)

    def take_back(self, layer: int, batch: Batch, kv: CudaKvCache) -> None:
        """Brings the blocks that the batch's rows were written to home; without waiting for it."""
        while len(self._returning) >= _RETURNS_UNDER_WAY:
            self._arrive(self._returning.popleft())
        blocks = torch.from_numpy(np.unique(batch.slots // kv.block_size).astype(np.int64))
        on_gpu = blocks.to(self._device)
        gpu_keys, gpu_values = self._gpu_kv(layer, kv)
        head_dim = self._specs[layer].attention.head_dim
        keys = _to_pinned(gpu_keys[on_gpu][..., :head_dim].contiguous())
        values = _to_pinned(gpu_values[on_gpu][:, :, :head_dim, :].transpose(-1, -2).contiguous())
        arrived = torch.cuda.Event()
        arrived.record()
        self._returning.append(_Returning(layer, blocks, keys, values, arrived))

    def close(self) -> None:
        self._returning.clear()
        self._layers.clear()
        self.cpu.close()

    def _bring_home(self) -> None:
        while self._returning:
            self._arrive(self._returning.popleft())

    def _arrive(self, returning: _Returning) -> None:
        returning.arrived.synchronize()
        size = returning.keys.shape[2]
        keys, values = self._host_kv(returning.layer, size)
        keys[returning.blocks] = returning.keys
        values[returning.blocks] = returning.values

    def _host_kv(self, layer: int, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """f16 [blocks, kv_heads, block_size, head_dim] each."""
        spec = self._specs[layer].attention
        shape = (-1, spec.num_kv_heads, block_size, spec.head_dim)
        k, v = self._kv.arrays[layer]
        used = self._kv.num_blocks * spec.num_kv_heads * block_size * spec.head_dim * 2
        return tuple(torch.from_numpy(one[:used].view(np.float16)).view(shape) for one in (k, v))  # type: ignore[return-value]

    def _gpu_kv(self, layer: int, kv: CudaKvCache) -> tuple[torch.Tensor, torch.Tensor]:
        spec = self._specs[layer].attention
        heads, stride = spec.num_kv_heads, head_stride(spec.head_dim)
        keys = kv.keys[layer].view(-1, heads, kv.block_size, stride)
        return keys, kv.values[layer].view(-1, heads, stride, kv.block_size)


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
