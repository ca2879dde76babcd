"""K and V of layers that the host computes in some steps and the GPU in others.

Both sides have a paged cache with the same block numbers. A side that writes a block makes the other's copy
stale; a stale block is brought over when its side needs it, so that steps of one kind move nothing. Layers
whose room on the GPU is shared keep nothing there: what they need is lent, what they wrote comes home.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stage.backends.base import Batch
from stage.backends.cpu.kv_cache import CpuKvCache
from stage.backends.cuda.kv_cache import CudaKvCache, head_stride
from stage.model.spec import LayerSpec

_RETURNS_UNDER_WAY = 16  # on their way home, before the host waits for the oldest


@dataclass
class _Return:
    layer: int
    blocks: np.ndarray
    keys: torch.Tensor  # f16 [n, kv_heads, block_size, head_dim], pinned
    values: torch.Tensor
    arrived: torch.cuda.Event


class HostKv:
    """Of `specs`; layers in `shared` share one room in `gpu`."""

    def __init__(
        self, specs: Sequence[LayerSpec], host: CpuKvCache, gpu: CudaKvCache, shared: Collection[int]
    ) -> None:
        self.host = host
        self._gpu = gpu
        self._shared = frozenset(shared)
        self._specs = {spec.index: spec.attention for spec in specs}
        size = host.num_blocks
        self._stale_on_host = {index: np.zeros(size, bool) for index in self._specs}
        self._stale_on_gpu = {index: np.zeros(size, bool) for index in self._specs}
        self._returns: deque[_Return] = deque()
        self._written: tuple[Batch | None, np.ndarray] = (None, np.empty(0, np.int64))  # of the last batch
        self._views = {index: self._host_views(index) for index in self._specs}

    def before_host(self, layer: int, batch: Batch) -> None:
        """Everything that the batch's rows attend over is in host memory. Waits for the GPU if it must."""
        while self._returns:
            self._arrive(self._returns.popleft())
        stale = self._stale_on_host[layer]
        if stale.any():  # seldom: a step of another kind has just been
            needed = self._needed(batch, stale)
            if len(needed):
                self._arrive(self._fetch(layer, needed))

    def after_host(self, layer: int, batch: Batch) -> None:
        if self._written[0] is not batch:
            self._written = (batch, np.unique(batch.slots // self.host.block_size))
        written = self._written[1]
        self._stale_on_host[layer][written] = False
        self._stale_on_gpu[layer][written] = True

    def before_gpu(self, layer: int, batch: Batch) -> None:
        """The same on the GPU, for work that is now put on the current stream."""
        shared, all_stale = layer in self._shared, self._stale_on_gpu[layer]
        if not (shared or all_stale.any()):
            return
        stale = self._needed(batch, None if shared else all_stale)
        if not len(stale):
            return
        while any(one.layer == layer for one in self._returns):
            self._arrive(self._returns.popleft())
        self._stale_on_gpu[layer][stale] = False
        blocks = torch.from_numpy(stale)
        head_dim = self._specs[layer].head_dim
        on_gpu = blocks.to(self._gpu_keys(layer).device)
        k, v = (view[blocks].pin_memory().to(on_gpu.device, non_blocking=True) for view in self._views[layer])
        # Past a sequence's last position lies what others left: the GPU weighs it with 0, and 0 x NaN is NaN.
        k, v = k.nan_to_num_(), v.nan_to_num_()
        self._gpu_keys(layer)[on_gpu, :, :, :head_dim] = k
        self._gpu_values(layer)[on_gpu, :, :head_dim, :] = v.transpose(-1, -2)

    def after_gpu(self, layer: int, batch: Batch, soon: bool) -> None:
        """`soon`: the host is to compute the layer next, so what was written sets out at once."""
        written = np.unique(batch.slots // self.host.block_size)
        self._stale_on_gpu[layer][written] = False
        if not (soon or layer in self._shared):
            self._stale_on_host[layer][written] = True
            return
        while self._returns and (
            len(self._returns) >= _RETURNS_UNDER_WAY or self._returns[0].arrived.query()
        ):
            self._arrive(self._returns.popleft())
        self._stale_on_host[layer][written] = False
        self._returns.append(self._fetch(layer, written))

    def _needed(self, batch: Batch, stale: np.ndarray | None) -> np.ndarray:
        """int64 [n]: blocks with earlier positions of the batch's sequences; of those, the stale ones."""
        size = self.host.block_size
        tables = [s.block_table[: -(-s.start_position // size)] for s in batch.sequences]
        if stale is not None:
            tables = [table[stale[table]] for table in tables]
        return np.unique(np.concatenate(tables)).astype(np.int64)

    def _fetch(self, layer: int, blocks: np.ndarray) -> _Return:
        head_dim = self._specs[layer].head_dim
        on_gpu = torch.from_numpy(blocks).to(self._gpu_keys(layer).device)
        keys = _to_pinned(self._gpu_keys(layer)[on_gpu][..., :head_dim].contiguous())
        values = self._gpu_values(layer)[on_gpu][:, :, :head_dim, :]
        returned = _Return(
            layer, blocks, keys, _to_pinned(values.transpose(-1, -2).contiguous()), torch.cuda.Event()
        )
        returned.arrived.record()
        return returned

    def _arrive(self, returned: _Return) -> None:
        returned.arrived.synchronize()
        self._stale_on_host[returned.layer][returned.blocks] = False
        for view, arrived in zip(self._views[returned.layer], (returned.keys, returned.values), strict=True):
            target, source = view.numpy(), arrived.numpy()
            for number, block in enumerate(returned.blocks):  # blocks are large: faster than one indexed copy
                np.copyto(target[block], source[number])

    def _host_views(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V in host memory, f16 [blocks, kv_heads, block_size, head_dim]."""
        spec = self._specs[layer]
        shape = (self.host.num_blocks, spec.num_kv_heads, self.host.block_size, spec.head_dim)
        nbytes = 2 * int(np.prod(shape))
        keys, values = (
            torch.from_numpy(one[:nbytes].view(np.float16)).view(shape) for one in self.host.arrays[layer]
        )
        return keys, values

    def _gpu_keys(self, layer: int) -> torch.Tensor:
        spec = self._specs[layer]
        shape = (-1, spec.num_kv_heads, self._gpu.block_size, head_stride(spec.head_dim))
        return self._gpu.keys[layer].view(shape)

    def _gpu_values(self, layer: int) -> torch.Tensor:
        spec = self._specs[layer]
        shape = (-1, spec.num_kv_heads, head_stride(spec.head_dim), self._gpu.block_size)
        return self._gpu.values[layer].view(shape)


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
