"""Tiles decode to the weights' float32 meaning: types.cuh, compiled for the host, against
`quants.dequantize`."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GGMLType

from stage.backends.cuda.repack import TILE_BYTES, pack
from stage.weights.quants import RawTensor, dequantize
from tests.stage.backends.cuda.host_kernels import host_library
from tests.stage.backends.cuda.random_weights import random_raw

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler to run the device code on the host with")
    source = (HERE / "host_tiles.cpp").read_text()
    return ctypes.CDLL(str(host_library(compiler, tmp_path_factory.mktemp("host"), source)))


def unpack(
    host: ctypes.CDLL, packed_type: str, tiles: np.ndarray, exponent: int, inverse: float
) -> np.ndarray:
    row_tiles, column_tiles, _ = tiles.shape
    out = np.empty((row_tiles, column_tiles, 16, 256), np.float32)
    for i in range(row_tiles):
        for j in range(column_tiles):
            used = host.decode_tile(
                packed_type.encode(),
                tiles[i, j].ctypes.data_as(ctypes.c_void_p),
                exponent,
                ctypes.c_float(inverse),
                out[i, j].ctypes.data_as(ctypes.c_void_p),
            )
            assert used == tiles.shape[2]
    return out.transpose(0, 2, 1, 3).reshape(row_tiles * 16, column_tiles * 256)


@pytest.mark.parametrize("ggml_type", list(TILE_BYTES), ids=lambda t: t.name)
@pytest.mark.parametrize("shape", [(32, 512), (21, 768)])
def test_tiles_decode_to_the_files_meaning(
    host: ctypes.CDLL, ggml_type: GGMLType, shape: tuple[int, int]
) -> None:
    raw = random_raw(ggml_type, *shape, seed=1)
    packed = pack(torch.from_numpy(raw.data.copy()), ggml_type, shape[1])
    got = unpack(host, packed.kernel_type, packed.tiles.numpy(), packed.exponent, packed.inverse)
    want = dequantize(raw).numpy()
    assert not got[shape[0] :].any()
    assert not got[:, shape[1] :].any()
    got = got[: shape[0], : shape[1]]
    error = np.abs(got - want)
    # One rounding of the scale, one of the offset, one of the weight, each of 2^-11 at most; and the smallest
    # blocks lose a little to f16's smallest step.
    assert error.max() <= 2.5 * 2.0**-11 * np.abs(want).max()
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 6e-4
    if ggml_type == GGMLType.F16:
        assert np.array_equal(got, want)


def test_padding_rows_and_columns_are_zero(host: ctypes.CDLL) -> None:
    raw = random_raw(GGMLType.Q8_0, 5, 96, seed=3)
    packed = pack(torch.from_numpy(raw.data.copy()), GGMLType.Q8_0, 96)
    got = unpack(host, packed.kernel_type, packed.tiles.numpy(), packed.exponent, packed.inverse)
    assert got.shape == (16, 256)
    assert not got[5:].any()
    assert not got[:, 96:].any()


def test_a_tensor_of_tiny_weights_keeps_its_precision(host: ctypes.CDLL) -> None:
    """Scales near the smallest f16 are brought up by the tensor's exponent."""
    values = (np.random.default_rng(0).standard_normal((16, 256)) * 1e-6).astype(np.float32)
    raw = RawTensor(values.view(np.uint8), GGMLType.F32, (16, 256))
    packed = pack(torch.from_numpy(raw.data.copy()), GGMLType.F32, 256)
    got = unpack(host, packed.kernel_type, packed.tiles.numpy(), packed.exponent, packed.inverse)
    assert np.linalg.norm(got - values) / np.linalg.norm(values) < 3e-4
