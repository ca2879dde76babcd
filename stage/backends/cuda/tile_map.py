"""Where each bit of a tile comes from in the file's blocks, for the kernel that repacks weights on the GPU.

For every quantised type (and F16) `repack.pack` moves bits and flips some of them, nothing else. So its map
need not be written down a second time: it is read off `pack` itself, with probes whose bits count positions.
F32 and BF16 are converted, not moved, and have no map.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as GGMLType

from common.errors import PipeLLMError, UnsupportedModelError
from stage.backends.cuda.repack import CONVERTED_TYPES, TILE_BYTES, TILE_COLUMNS, TILE_ROWS, pack

MOVED_TYPES = frozenset(TILE_BYTES) - CONVERTED_TYPES


@dataclass(frozen=True)
class TileMap:
    """Field i (of `field_bits`) of a tile is the field of its 16 raw rows that begins at bit `sources[i]`,
    with the bits of `flips` inverted."""

    field_bits: int  # 1, 2, 4 or 8
    raw_row_bytes: int  # of 256 columns
    tile_bytes: int
    sources: np.ndarray  # int64 [tile_bytes * 8 / field_bits]: row * raw_row_bytes * 8 + bit in the row
    flips: np.ndarray  # uint32 [tile_bytes / 4]


@cache
def tile_map(ggml_type: GGMLType) -> TileMap:
    """Raises UnsupportedModelError for a type that is converted."""
    if ggml_type not in MOVED_TYPES:
        raise UnsupportedModelError(f"{ggml_type.name} weights are converted when packed, not moved")
    block_elements, block_bytes = GGML_QUANT_SIZES[ggml_type]
    row_bytes = TILE_COLUMNS // block_elements * block_bytes
    num_bits = TILE_ROWS * row_bytes * 8
    zeros = _packed_bits(np.zeros(num_bits, np.uint8), ggml_type)
    if not (_packed_bits(np.ones(num_bits, np.uint8), ggml_type) ^ zeros).all():
        raise PipeLLMError(f"tiles of {ggml_type.name} hold bits that do not come from the file")
    positions = np.arange(num_bits)
    sources = np.zeros(len(zeros), np.int64)
    for bit in range((num_bits - 1).bit_length()):
        probe = (positions >> bit & 1).astype(np.uint8)
        sources |= (_packed_bits(probe, ggml_type) ^ zeros).astype(np.int64) << bit
    field_bits = next(bits for bits in (8, 4, 2, 1) if _moves_whole(sources, bits))
    return TileMap(
        field_bits,
        row_bytes,
        TILE_BYTES[ggml_type],
        sources[::field_bits].copy(),
        np.packbits(zeros, bitorder="little").view(np.uint32).copy(),
    )


def _packed_bits(raw_bits: np.ndarray, ggml_type: GGMLType) -> np.ndarray:
    """The bits of one tile, from those of its rows; uint8 each."""
    raw = np.packbits(raw_bits, bitorder="little").reshape(TILE_ROWS, -1)
    tiles = pack(torch.from_numpy(raw), ggml_type, TILE_COLUMNS).tiles
    return np.unpackbits(tiles.numpy().reshape(-1), bitorder="little")


def _moves_whole(sources: np.ndarray, bits: int) -> bool:
    fields = sources.reshape(-1, bits)
    return bool((fields[:, 0] % bits == 0).all() and (fields == fields[:, :1] + np.arange(bits)).all())
