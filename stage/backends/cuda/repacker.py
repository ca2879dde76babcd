"""The file's bytes of a layer to the tiles that `WeightLoader` makes of them, on the GPU, bit for bit.

A `MatrixRecipe` says where a packed matrix's raw rows lie in a layer's blob and where its tiles go in a slot;
what is done to them is `kernels/repack.cu`: bits are moved, or F32 and BF16 values become f16.
"""

from __future__ import annotations

import ctypes
import math
from ctypes import c_float, c_int, c_uint64, c_void_p
from dataclasses import dataclass

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as GGMLType

from stage.backends.cuda.launch import Kernels
from stage.backends.cuda.repack import CONVERTED_TYPES, TILE_COLUMNS, TILE_ROWS
from stage.backends.cuda.tile_map import TileMap, tile_map

_CHUNK_BYTES = 36 << 10  # of raw rows in shared memory, about; what a plain launch may ask for is 48 KiB
_MAX_CHUNK_TILES = 8


class RepackArgs(ctypes.Structure):
    _fields_ = [
        ("sources", c_void_p * 3),
        ("expert_bytes", c_uint64 * 3),
        ("row_ends", c_int * 3),
        ("interleaved", c_int),
        ("rows", c_int),
        ("row_bytes", c_int),
        ("unit", c_int),
        ("tile_row_bytes", c_int),
        ("chunk_tiles", c_int),
        ("column_tiles", c_int),
        ("tile_words", c_int),
        ("factor", c_float),
        ("fields", c_void_p),
        ("flips", c_void_p),
        ("tiles", c_void_p),
    ]


@dataclass(frozen=True)
class Source:
    """Raw rows in a blob: from `offset` on, `rows` of them, the next expert's `expert_bytes` further."""

    offset: int
    rows: int
    expert_bytes: int


@dataclass(frozen=True)
class MatrixRecipe:
    ggml_type: GGMLType
    sources: tuple[Source, ...]  # at most three
    interleaved: bool
    row_bytes: int
    columns: int
    experts: int
    packed_offset: int
    factor: float = 1.0  # what F32 and BF16 values are multiplied by

    @property
    def rows(self) -> int:
        return sum(source.rows for source in self.sources)


@dataclass(frozen=True)
class _DeviceMap:
    map: TileMap
    chunk_tiles: int
    fields: torch.Tensor  # int32: bit in a chunk's rows
    flips: torch.Tensor


class Repacker:
    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._maps: dict[GGMLType, _DeviceMap] = {}

    def run(self, recipe: MatrixRecipe, blob: int, slot: int) -> None:
        """On torch's current stream; `blob` and `slot` are device addresses."""
        if recipe.ggml_type in CONVERTED_TYPES:
            args, grid = conversion(recipe, blob, slot)
            self._kernels.launch("repack.cu", f"convert<{element_bytes(recipe.ggml_type)}>", grid, 256, args)
            return
        on_device = self._map(recipe.ggml_type)
        args, grid = arguments(recipe, on_device.map, on_device.chunk_tiles, blob, slot)
        args.fields, args.flips = on_device.fields.data_ptr(), on_device.flips.data_ptr()
        shared = TILE_ROWS * args.chunk_tiles * args.tile_row_bytes
        self._kernels.launch("repack.cu", f"repack<{on_device.map.field_bits}>", grid, 256, args, shared)

    def _map(self, ggml_type: GGMLType) -> _DeviceMap:
        if ggml_type not in self._maps:
            found = tile_map(ggml_type)
            tiles = chunk_tiles(found)
            fields = torch.from_numpy(chunk_fields(found, tiles).view(np.int32)).to(self._kernels.device)
            flips = torch.from_numpy(found.flips.view(np.int32)).to(self._kernels.device)
            self._maps[ggml_type] = _DeviceMap(found, tiles, fields, flips)
        return self._maps[ggml_type]


def chunk_tiles(found: TileMap) -> int:
    return min(_MAX_CHUNK_TILES, _CHUNK_BYTES // (TILE_ROWS * found.raw_row_bytes))


def chunk_fields(found: TileMap, tiles: int) -> np.ndarray:
    """uint32: a field's bit in 16 rows of `tiles` tiles each, for the first of them."""
    row, bit = np.divmod(found.sources, found.raw_row_bytes * 8)
    return (row * found.raw_row_bytes * tiles * 8 + bit).astype(np.uint32)


def arguments(
    recipe: MatrixRecipe, found: TileMap, tiles: int, blob: int, slot: int
) -> tuple[RepackArgs, tuple[int, int, int]]:
    """The kernel's arguments but for the maps' addresses, and its grid."""
    args, (column_tiles, row_tiles, experts) = _rows(recipe, blob, slot, tiles * found.raw_row_bytes)
    args.tile_row_bytes = found.raw_row_bytes
    args.chunk_tiles = tiles
    args.tile_words = found.tile_bytes // 4
    return args, (-(-column_tiles // tiles), row_tiles, experts)


def conversion(recipe: MatrixRecipe, blob: int, slot: int) -> tuple[RepackArgs, tuple[int, int, int]]:
    """Arguments and grid of the kernel for types that are converted."""
    args, grid = _rows(recipe, blob, slot, 8 * element_bytes(recipe.ggml_type))
    args.factor = recipe.factor
    return args, grid


def element_bytes(ggml_type: GGMLType) -> int:
    return GGML_QUANT_SIZES[ggml_type][1]


def _rows(
    recipe: MatrixRecipe, blob: int, slot: int, at_once: int
) -> tuple[RepackArgs, tuple[int, int, int]]:
    """What both kernels are told of rows and tiles, and the numbers of column tiles, row tiles and experts.
    `at_once`: bytes of a row at whose multiples they begin to read."""
    args = RepackArgs()
    addresses, end = [], 0
    for i, source in enumerate(recipe.sources):
        args.sources[i] = blob + source.offset
        args.expert_bytes[i] = source.expert_bytes
        end += source.rows
        args.row_ends[i] = end
        addresses += [blob + source.offset, source.expert_bytes]
    common = math.gcd(*addresses, recipe.row_bytes, at_once)
    args.interleaved = recipe.interleaved
    args.rows = end
    args.row_bytes = recipe.row_bytes
    args.unit = next(unit for unit in (16, 4, 1) if common % unit == 0)
    args.column_tiles = -(-recipe.columns // TILE_COLUMNS)
    args.tiles = slot + recipe.packed_offset
    return args, (args.column_tiles, -(-end // TILE_ROWS), recipe.experts)
