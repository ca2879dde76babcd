"""Paged keys and values, float32, in host memory that becomes resident as blocks are first written."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

from common.errors import OutOfCapacityError
from stage.model.spec import LayerSpec

_FLOAT_BYTES = 4


class ReferenceKvCache:
    """`keys` and `values`, by a layer's global number: [num_blocks, block_size, num_kv_heads, head_dim]."""

    def __init__(self, layers: Sequence[LayerSpec], num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.nbytes = num_blocks * block_size * sum(bytes_per_token(layer) for layer in layers)
        shapes = {
            layer.index: (num_blocks, block_size, layer.attention.num_kv_heads, layer.attention.head_dim)
            for layer in layers
        }
        self.keys = {index: _zeros(shape) for index, shape in shapes.items()}
        self.values = {index: _zeros(shape) for index, shape in shapes.items()}

    def append(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes rows [rows, num_kv_heads, head_dim] to slots int64 [rows]: block * block_size + offset."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, keys)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, values)


def bytes_per_token(layer: LayerSpec) -> int:
    return 2 * layer.kv_width * _FLOAT_BYTES


def _zeros(shape: tuple[int, int, int, int]) -> torch.Tensor:
    # Straight from the kernel: an allocator may hand out memory that is resident already, or huge pages,
    # of which a first write would make much more resident than its block.
    nbytes = shape[0] * shape[1] * shape[2] * shape[3] * _FLOAT_BYTES
    try:
        memory = mmap.mmap(-1, nbytes)
    except (OSError, OverflowError, ValueError) as error:
        raise OutOfCapacityError(f"KV cache: {nbytes} bytes for a layer cannot be had: {error}") from error
    return torch.frombuffer(memory, dtype=torch.float32).view(shape)
