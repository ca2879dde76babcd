"""The repacking kernel, compiled for the host, makes the tiles that `pack` makes, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GGMLType

from common.errors import UnsupportedModelError
from stage.backends.cuda.repack import CONVERTED_TYPES, TILE_BYTES, pack
from stage.backends.cuda.repacker import MatrixRecipe, Source
from stage.backends.cuda.tile_map import MOVED_TYPES, tile_map
from tests.stage.backends.cuda.host_repack import HostRepack, aligned_bytes
from tests.stage.backends.cuda.random_weights import random_raw

TYPES = sorted(TILE_BYTES)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> HostRepack:
    return HostRepack(tmp_path_factory.mktemp("host"))


def run(host: HostRepack, recipe: MatrixRecipe, blob: np.ndarray, packed_bytes: int) -> np.ndarray:
    slot = aligned_bytes(packed_bytes + recipe.packed_offset)
    host.run(recipe, blob.ctypes.data, slot.ctypes.data)
    return slot[recipe.packed_offset :]


def aligned(parts: list[np.ndarray], alignment: int) -> tuple[np.ndarray, list[int]]:
    """The parts one after the other, each at a multiple of `alignment` and no rounder; and their offsets."""
    offsets, end = [], alignment
    for part in parts:
        offsets.append(end)
        end += -(-part.size // (2 * alignment)) * 2 * alignment
    blob = aligned_bytes(end)
    for part, offset in zip(parts, offsets, strict=True):
        blob[offset : offset + part.size] = part.reshape(-1)
    return blob, offsets


@pytest.mark.parametrize("ggml_type", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize(("columns", "alignment"), [(2560, 32), (768, 1)])
def test_matrices_side_by_side(host: HostRepack, ggml_type: GGMLType, columns: int, alignment: int) -> None:
    raws = [random_raw(ggml_type, rows, columns, seed) for seed, rows in enumerate((24, 7, 10))]
    blob, offsets = aligned([raw.data for raw in raws], alignment)
    sources = tuple(Source(offset, raw.shape[0], 0) for offset, raw in zip(offsets, raws, strict=True))
    row_bytes = raws[0].data.shape[1]
    packed = pack(torch.from_numpy(np.concatenate([raw.data for raw in raws])), ggml_type, columns)
    recipe = MatrixRecipe(
        ggml_type, sources, False, row_bytes, columns, 1, packed_offset=64, factor=1 / packed.inverse
    )
    got = run(host, recipe, blob, packed.nbytes)
    assert np.array_equal(got, packed.tiles.numpy().reshape(-1))


@pytest.mark.parametrize(
    "ggml_type",
    [GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.Q8_0, GGMLType.F16, GGMLType.BF16, GGMLType.F32],
    ids=lambda t: t.name,
)
def test_gate_and_up_of_experts_take_turns_by_eight_rows(host: HostRepack, ggml_type: GGMLType) -> None:
    experts, rows, columns = 3, 40, 512
    raws = [random_raw(ggml_type, experts * rows, columns, seed) for seed in (0, 1)]
    gate, up = (torch.from_numpy(raw.data.copy()).view(experts, rows, -1) for raw in raws)
    both = torch.stack([one.unflatten(1, (-1, 8)) for one in (gate, up)], dim=2).flatten(1, 3)
    packed = pack(both.flatten(0, 1), ggml_type, columns)  # an expert's rows are whole tiles here
    want = packed.tiles
    blob, offsets = aligned([raw.data for raw in raws], 16)
    row_bytes = raws[0].data.shape[1]
    sources = tuple(Source(offset, rows, rows * row_bytes) for offset in offsets)
    recipe = MatrixRecipe(ggml_type, sources, True, row_bytes, columns, experts, 0, 1 / packed.inverse)
    assert np.array_equal(run(host, recipe, blob, want.numel()), want.numpy().reshape(-1))


@pytest.mark.parametrize("columns", [32, 96, 288])
def test_what_is_missing_to_whole_tiles_is_zero(host: HostRepack, columns: int) -> None:
    raw = random_raw(GGMLType.Q4_0, 5, columns, 0)
    blob, offsets = aligned([raw.data], 32)
    recipe = MatrixRecipe(
        GGMLType.Q4_0, (Source(offsets[0], 5, 0),), False, raw.data.shape[1], columns, 1, packed_offset=0
    )
    want = pack(torch.from_numpy(raw.data.copy()), GGMLType.Q4_0, columns).tiles
    assert np.array_equal(run(host, recipe, blob, want.numel()), want.numpy().reshape(-1))


@pytest.mark.parametrize("ggml_type", sorted(CONVERTED_TYPES), ids=lambda t: t.name)
@pytest.mark.parametrize("columns", [4, 36, 300])
@pytest.mark.parametrize("size", [1e-9, 1.0, 3e7])
def test_values_of_any_size_are_brought_into_the_range_of_f16(
    host: HostRepack, ggml_type: GGMLType, columns: int, size: float
) -> None:
    """Rows that end within a thread's values, matrices beyond f16's range and below it."""
    values = (np.random.default_rng(columns).standard_normal((21, columns)) * size).astype(np.float32)
    values[3, 1], values[4, :2] = 0, (size * 1e-6, -size * 3e-8)
    bits = values.view(np.uint32)
    data = values if ggml_type == GGMLType.F32 else (bits >> 16).astype(np.uint16)
    data = data.view(np.uint8)
    blob, offsets = aligned([data], 8)
    packed = pack(torch.from_numpy(data.copy()), ggml_type, columns)
    source = Source(offsets[0], 21, 0)
    recipe = MatrixRecipe(ggml_type, (source,), False, data.shape[1], columns, 1, 16, 1 / packed.inverse)
    got = run(host, recipe, blob, packed.nbytes)
    assert np.array_equal(got, packed.tiles.numpy().reshape(-1))
    assert 0.1 < np.abs(got.view(np.float16)).max() <= 1


def test_types_that_are_converted_have_no_map() -> None:
    for ggml_type in set(TILE_BYTES) - MOVED_TYPES:
        with pytest.raises(UnsupportedModelError, match=ggml_type.name):
            tile_map(ggml_type)
