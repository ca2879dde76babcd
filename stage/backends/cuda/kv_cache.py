"""The paged KV cache on the GPU: f16, laid out for the matrix units (kernels/rope.cu says how)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.errors import InvalidRequestError, OutOfCapacityError
from stage.model.spec import LayerSpec

HEAD_STRIDES = (32, 64, 96, 128, 160, 192, 256)  # what attention is compiled for


def head_stride(head_dim: int) -> int:
    """Elements a head takes in the cache: head_dim, rounded up to what the kernels know."""
    return next(stride for stride in HEAD_STRIDES if stride >= head_dim)


def kv_bytes_per_token(layer: LayerSpec) -> int:
    return 2 * 2 * layer.attention.num_kv_heads * head_stride(layer.attention.head_dim)


class CudaKvCache:
    """Keys [blocks][kv_heads][tokens][head_stride], values [blocks][kv_heads][head_stride][tokens], per
    layer.

    One block more than `num_blocks` exists, for the rows that pad a batch; its number is `num_blocks`.
    """

    def __init__(
        self, layers: Sequence[LayerSpec], num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        if block_size < 8 or block_size & (block_size - 1):
            raise InvalidRequestError(
                f"the CUDA backend needs KV blocks of 8, 16, 32, ... tokens, not {block_size}"
            )
        self.block_size = block_size
        self.block_shift = block_size.bit_length() - 1
        self.num_blocks = num_blocks
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.nbytes = 0
        try:
            for layer in layers:
                shape = (
                    num_blocks + 1,
                    layer.attention.num_kv_heads,
                    block_size * head_stride(layer.attention.head_dim),
                )
                self.keys[layer.index] = torch.zeros(shape, dtype=torch.float16, device=device)
                self.values[layer.index] = torch.zeros(shape, dtype=torch.float16, device=device)
                self.nbytes += 2 * self.keys[layer.index].nbytes
        except torch.cuda.OutOfMemoryError as error:
            needed = sum(kv_bytes_per_token(layer) for layer in layers) * block_size * (num_blocks + 1)
            free, total = torch.cuda.mem_get_info(device)
            raise OutOfCapacityError(
                f"the KV cache needs {needed / 2**20:.0f} MiB, {free / 2**20:.0f} of {total / 2**20:.0f} MiB "
                f"are free on {device}; fewer blocks or a shorter context would fit"
            ) from error

    def share_room(self, layers: Sequence[LayerSpec], num_blocks: int, device: torch.device) -> None:
        """Adds layers that keep nothing here between their runs: all in the room of the largest."""
        largest = max(layers, key=kv_bytes_per_token)
        room = CudaKvCache([largest], num_blocks, self.block_size, device)
        keys, values = (one[largest.index].view(-1) for one in (room.keys, room.values))
        for layer in layers:
            size = (num_blocks + 1) * kv_bytes_per_token(layer) // 4 * self.block_size
            shape = (num_blocks + 1, layer.attention.num_kv_heads, -1)
            self.keys[layer.index] = keys[:size].view(shape)
            self.values[layer.index] = values[:size].view(shape)
        self.nbytes += room.nbytes
