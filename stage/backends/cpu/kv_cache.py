"""Paged keys and values of the CPU backend, in f16, q8_0 or f32, a head's tokens of a block side by side.

A layer's K (and V) is [num_blocks, num_kv_heads, block_size, head bytes]; a head is padded to whole vectors
(8 elements in f16 and f32) or blocks (32 elements in 34 bytes in q8_0).
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import numpy as np

from common.errors import ConfigError, OutOfCapacityError
from stage.backends.cpu import abi
from stage.model.spec import LayerSpec

KV_DTYPES = {"f16": 0, "q8_0": 1, "f32": 2}  # KV_F16 and so on in native/plan.h


def head_bytes(head_dim: int, kv_dtype: str) -> int:
    """Bytes of one token's K, or V, in one head."""
    if kv_dtype == "q8_0":
        return (head_dim + 31) // 32 * 34
    return (head_dim + 7) // 8 * 8 * (2 if kv_dtype == "f16" else 4)


def bytes_per_token(layer: LayerSpec, kv_dtype: str) -> int:
    return 2 * layer.attention.num_kv_heads * head_bytes(layer.attention.head_dim, kv_dtype)


def check_kv_dtype(kv_dtype: str) -> None:
    if kv_dtype not in KV_DTYPES:
        raise ConfigError(f"kv_dtype is {kv_dtype!r}, expected one of {', '.join(KV_DTYPES)}")


class CpuKvCache:
    """The cache of a stage's layers; memory becomes resident as blocks are first written."""

    def __init__(self, layers: Sequence[LayerSpec], num_blocks: int, block_size: int, kv_dtype: str) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        tokens = num_blocks * block_size
        self.nbytes = tokens * sum(bytes_per_token(layer, kv_dtype) for layer in layers)
        self.arrays: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # K and V as bytes, by the same number
        self._structs: dict[int, abi.KvLayer] = {}
        self.addresses: dict[int, int] = {}  # of the native struct, by the layer's global number
        for layer in layers:
            half = tokens * bytes_per_token(layer, kv_dtype) // 2
            keys, values = _zeros(half, self.nbytes), _zeros(half, self.nbytes)
            self.arrays[layer.index] = keys, values
            struct = abi.KvLayer(abi.address(keys), abi.address(values), KV_DTYPES[kv_dtype], block_size)
            self._structs[layer.index] = struct
            self.addresses[layer.index] = ctypes.addressof(struct)


def _zeros(nbytes: int, of_all: int) -> np.ndarray:
    """Untouched anonymous pages."""
    try:
        return np.frombuffer(mmap.mmap(-1, max(1, nbytes)), np.uint8)
    except (OSError, ValueError, OverflowError) as error:
        raise OutOfCapacityError(
            f"the KV cache needs {of_all} bytes, which the system refused ({error}): fewer blocks, or q8_0"
        ) from error
