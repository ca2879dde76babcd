"""Every tensor type against gguf-py's own dequantisation, bit for bit, on random and on odd blocks."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UnsupportedModelError
from stage.weights.quants import BLOCK_LAYOUTS, RawTensor, dequantize

TYPES = pytest.mark.parametrize("ggml_type", BLOCK_LAYOUTS, ids=lambda ggml_type: ggml_type.name)

# Zero, subnormal, smallest normal, one, largest, infinity, negative ones; no NaN.
ODD_HALVES = np.array([0, 1, 0x3FF, 0x400, 0x3C00, 0x7BFF, 0x7C00, 0x8000, 0x8001, 0xBC00, 0xFC00], "<u2")


def raw_tensor(blocks: np.ndarray, ggml_type: GGMLQuantizationType) -> RawTensor:
    block_elements, block_bytes = GGML_QUANT_SIZES[ggml_type]
    blocks.flags.writeable = False
    cols = blocks.shape[-1] // block_bytes * block_elements
    return RawTensor(blocks, ggml_type, (*blocks.shape[:-1], cols))


def assert_same_as_gguf(raw: RawTensor) -> None:
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw.data, raw.ggml_type)
    values = dequantize(raw).numpy()
    assert values.dtype == np.float32 and values.shape == expected.shape == raw.shape
    same_bits = values.view(np.uint32) == expected.view(np.uint32)
    # Two NaNs meet where a scale and an offset are both NaN: which of them survives is not defined.
    assert np.all(same_bits | (np.isnan(values) & np.isnan(expected)))


@TYPES
def test_layout_has_the_block_size_of_the_format(ggml_type: GGMLQuantizationType) -> None:
    assert BLOCK_LAYOUTS[ggml_type].itemsize == GGML_QUANT_SIZES[ggml_type][1]


@TYPES
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 5), st.integers(1, 3))
def test_random_bytes(ggml_type: GGMLQuantizationType, seed: int, stack: int, rows: int, blocks: int) -> None:
    row_bytes = blocks * GGML_QUANT_SIZES[ggml_type][1]
    data = np.random.default_rng(seed).integers(0, 256, (stack, rows, row_bytes), np.uint8)
    assert_same_as_gguf(raw_tensor(data, ggml_type))


@TYPES
def test_odd_scales(ggml_type: GGMLQuantizationType) -> None:
    layout = BLOCK_LAYOUTS[ggml_type]
    rng = np.random.default_rng(1)
    data = rng.integers(0, 256, (len(ODD_HALVES) ** 2, layout.itemsize), np.uint8)
    blocks = data.view(layout)[:, 0]
    halves = [name for name in layout.names or () if layout[name] == np.dtype("<f2")]
    for name, values in zip(halves, np.meshgrid(ODD_HALVES, ODD_HALVES), strict=False):
        blocks[name] = values.reshape(-1).view("<f2")
    if "e" in (layout.names or ()):
        blocks["e"] = np.concatenate([np.arange(60), np.arange(195, 256), np.zeros(0)])[: len(blocks)]
    assert_same_as_gguf(raw_tensor(data, ggml_type))


@TYPES
def test_longer_than_a_chunk(ggml_type: GGMLQuantizationType) -> None:
    block_elements, block_bytes = GGML_QUANT_SIZES[ggml_type]
    data = np.random.default_rng(2).integers(0, 256, (3, 2**18 // block_elements * block_bytes), np.uint8)
    assert_same_as_gguf(raw_tensor(data, ggml_type))


def test_half_keeps_every_bit_pattern() -> None:
    raw = raw_tensor(np.arange(65536, dtype="<u2").view(np.uint8), GGMLQuantizationType.F16)
    expected = np.arange(65536, dtype="<u2").view("<f2").astype(np.float32)
    assert np.array_equal(dequantize(raw).numpy().view(np.uint32), expected.view(np.uint32))


@TYPES
def test_rows_are_views(ggml_type: GGMLQuantizationType) -> None:
    block_bytes = GGML_QUANT_SIZES[ggml_type][1]
    raw = raw_tensor(np.random.default_rng(3).integers(0, 128, (2, 6, block_bytes), np.uint8), ggml_type)
    part = raw.rows(2, 5)
    assert part.shape == (2, 3, raw.shape[-1]) and part.nbytes == raw.nbytes // 2
    assert np.shares_memory(part.data, raw.data)
    assert np.array_equal(dequantize(part), dequantize(raw)[:, 2:5], equal_nan=True)
    picked = raw[1][np.array([5, 0, 5])]
    assert np.array_equal(dequantize(picked), dequantize(raw)[1, [5, 0, 5]], equal_nan=True)


def test_elements_of_a_vector() -> None:
    values = np.arange(10, dtype=np.float32)
    raw = RawTensor(values.view(np.uint8), GGMLQuantizationType.F32, (10,))
    assert dequantize(raw.rows(3, 7)).tolist() == [3, 4, 5, 6]
    quantised = raw_tensor(np.zeros(2 * 34, np.uint8), GGMLQuantizationType.Q8_0)
    assert quantised.rows(32, 64).shape == (32,)
    with pytest.raises(UnsupportedModelError, match="8 to 40"):
        quantised.rows(8, 40)


@pytest.mark.parametrize(
    "ggml_type", sorted(set(GGMLQuantizationType) - set(BLOCK_LAYOUTS)), ids=lambda ggml_type: ggml_type.name
)
def test_other_types_are_refused_by_name(ggml_type: GGMLQuantizationType) -> None:
    raw = raw_tensor(np.zeros((1, GGML_QUANT_SIZES[ggml_type][1]), np.uint8), ggml_type)
    with pytest.raises(UnsupportedModelError, match=ggml_type.name):
        dequantize(raw)
