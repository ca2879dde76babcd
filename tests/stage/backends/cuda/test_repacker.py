"""The repacking kernel, compiled for the host, makes the tiles that `pack` makes, bit for bit."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GGMLType

from common.errors import UnsupportedModelError
from stage.backends.cuda.compile import KERNELS
from stage.backends.cuda.repack import TILE_BYTES, pack
from stage.backends.cuda.repacker import MatrixRecipe, Source, arguments, chunk_fields, chunk_tiles
from stage.backends.cuda.tile_map import MOVED_TYPES, tile_map
from tests.stage.backends.cuda.random_weights import random_raw

HERE = Path(__file__).parent
TYPES = sorted(MOVED_TYPES)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler to run the device code on the host with")
    folder = tmp_path_factory.mktemp("host")
    source = (KERNELS / "repack.cu").read_text()
    source = re.sub(r'#include "common.cuh"', "", source).replace("extern __shared__ uint4 shared[];", "")
    (folder / "repack.h").write_text(source)
    library = folder / "repack.so"
    command = [compiler, "-O1", "-std=c++17", "-fPIC", "-shared", f'-DKERNEL="{folder / "repack.h"}"', "-w"]
    subprocess.run([*command, str(HERE / "host_repack.cpp"), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def run(host: ctypes.CDLL, recipe: MatrixRecipe, blob: np.ndarray, packed_bytes: int) -> np.ndarray:
    found = tile_map(recipe.ggml_type)
    tiles = chunk_tiles(found)
    fields, flips = chunk_fields(found, tiles), found.flips
    slot = np.full(packed_bytes + recipe.packed_offset, 0xEE, np.uint8)
    args, grid = arguments(recipe, found, tiles, blob.ctypes.data, slot.ctypes.data)
    args.fields, args.flips = fields.ctypes.data, flips.ctypes.data
    host.run(found.field_bits, ctypes.byref(args), *grid)
    return slot[recipe.packed_offset :]


def aligned(parts: list[np.ndarray], alignment: int) -> tuple[np.ndarray, list[int]]:
    """The parts one after the other, each at a multiple of `alignment` and no rounder; and their offsets."""
    offsets, end = [], alignment
    for part in parts:
        offsets.append(end)
        end += -(-part.size // (2 * alignment)) * 2 * alignment
    memory = np.full(end + 64, 0xEE, np.uint8)
    blob = memory[-memory.ctypes.data % 64 :]
    for part, offset in zip(parts, offsets, strict=True):
        blob[offset : offset + part.size] = part.reshape(-1)
    return blob, offsets


@pytest.mark.parametrize("ggml_type", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize(("columns", "alignment"), [(2560, 32), (768, 1)])
def test_matrices_side_by_side(host: ctypes.CDLL, ggml_type: GGMLType, columns: int, alignment: int) -> None:
    raws = [random_raw(ggml_type, rows, columns, seed) for seed, rows in enumerate((24, 7, 10))]
    blob, offsets = aligned([raw.data for raw in raws], alignment)
    sources = tuple(Source(offset, raw.shape[0], 0) for offset, raw in zip(offsets, raws, strict=True))
    row_bytes = raws[0].data.shape[1]
    recipe = MatrixRecipe(ggml_type, sources, False, row_bytes, columns, 1, packed_offset=64)
    want = pack(torch.from_numpy(np.concatenate([raw.data for raw in raws])), ggml_type, columns).tiles
    got = run(host, recipe, blob, want.numel())
    assert np.array_equal(got, want.numpy().reshape(-1))


@pytest.mark.parametrize("ggml_type", [GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.Q8_0, GGMLType.F16])
def test_gate_and_up_of_experts_take_turns_by_eight_rows(host: ctypes.CDLL, ggml_type: GGMLType) -> None:
    experts, rows, columns = 3, 40, 512
    raws = [random_raw(ggml_type, experts * rows, columns, seed) for seed in (0, 1)]
    gate, up = (torch.from_numpy(raw.data.copy()).view(experts, rows, -1) for raw in raws)
    both = torch.stack([one.unflatten(1, (-1, 8)) for one in (gate, up)], dim=2).flatten(1, 3)
    want = torch.stack([pack(one, ggml_type, columns).tiles for one in both])
    blob, offsets = aligned([raw.data for raw in raws], 16)
    row_bytes = raws[0].data.shape[1]
    sources = tuple(Source(offset, rows, rows * row_bytes) for offset in offsets)
    recipe = MatrixRecipe(ggml_type, sources, True, row_bytes, columns, experts, packed_offset=0)
    assert np.array_equal(run(host, recipe, blob, want.numel()), want.numpy().reshape(-1))


@pytest.mark.parametrize("columns", [32, 96, 288])
def test_what_is_missing_to_whole_tiles_is_zero(host: ctypes.CDLL, columns: int) -> None:
    raw = random_raw(GGMLType.Q4_0, 5, columns, 0)
    blob, offsets = aligned([raw.data], 32)
    recipe = MatrixRecipe(
        GGMLType.Q4_0, (Source(offsets[0], 5, 0),), False, raw.data.shape[1], columns, 1, packed_offset=0
    )
    want = pack(torch.from_numpy(raw.data.copy()), GGMLType.Q4_0, columns).tiles
    assert np.array_equal(run(host, recipe, blob, want.numel()), want.numpy().reshape(-1))


def test_types_that_are_converted_have_no_map() -> None:
    for ggml_type in set(TILE_BYTES) - MOVED_TYPES:
        with pytest.raises(UnsupportedModelError, match=ggml_type.name):
            tile_map(ggml_type)
