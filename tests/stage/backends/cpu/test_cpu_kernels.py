"""Each kernel variant this CPU runs, on each type, against float64 arithmetic on the dequantised weights."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGMLType
from hypothesis import given, settings
from hypothesis import strategies as st

from stage.backends.cpu import CpuBackend, abi, variants
from stage.weights.quants import BLOCK_LAYOUTS, RawTensor, dequantize
from tests.stage.backends.cpu.random_weights import FLOAT_TYPES, random_raw

if not variants():
    pytest.skip("the native CPU backend was not built here (no C++ compiler)", allow_module_level=True)

# Largest `relative_error` of 16-bit activations, and of one 8-bit term: twice what thousands of cases show.
TOLERANCE = {"exact": 5e-4, "fast": 0.06}


def multiply(backend: CpuBackend, raw: RawTensor, x: np.ndarray) -> np.ndarray:
    rows, cols = raw.shape
    matrix = abi.Matrix(abi.address(raw.data), raw.data.strides[0], 0, None, int(raw.ggml_type), rows, cols)
    y = np.full((len(x), rows), np.nan, np.float32)
    backend._library.pipellm_matmul(
        backend._engine, ctypes.addressof(matrix), abi.address(x), len(x), abi.address(y)
    )
    return y


def relative_error(y: np.ndarray, raw: RawTensor, x: np.ndarray) -> float:
    """Largest error of a product, in units of the root of its squared terms' sum: errors of its activations'
    rounding grow with it, while the product itself may be near zero."""
    x, weights = x.astype(np.float64), dequantize(raw).numpy().astype(np.float64).T
    size = np.maximum(np.sqrt(x**2 @ weights**2), 1e-30)  # rows of weights may be all zeros
    return float((np.abs(y - x @ weights) / size).max())


@pytest.fixture(scope="module", params=[(v, a) for v in variants() for a in TOLERANCE], ids="-".join)
def backend(request: pytest.FixtureRequest) -> CpuBackend:
    variant, accuracy = request.param
    made = CpuBackend(threads=2, variant=variant, accuracy=accuracy)
    request.addfinalizer(made.close)
    return made


@pytest.mark.parametrize("ggml_type", list(BLOCK_LAYOUTS), ids=lambda t: t.name)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_products_of_any_shape(backend: CpuBackend, ggml_type: GGMLType, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rows = data.draw(st.integers(16, 150))
    cols = 256 * data.draw(st.integers(1, 5))
    if ggml_type in FLOAT_TYPES:
        cols += data.draw(st.integers(0, 40))
    elif np.dtype(BLOCK_LAYOUTS[ggml_type]).itemsize < 40:  # blocks of 32
        cols += 32 * data.draw(st.integers(0, 7))
    raw = random_raw(rng, ggml_type, (rows, cols))
    x = rng.standard_normal((data.draw(st.integers(1, 20)), cols)).astype(np.float32)
    x[:, : cols // 2] *= 10 ** rng.uniform(-3, 1)  # blocks of unequal size
    y = multiply(backend, raw, x)
    assert relative_error(y, raw, x) < TOLERANCE[backend.accuracy]


@pytest.mark.parametrize("ggml_type", [GGMLType.Q4_0, GGMLType.Q4_K], ids=lambda t: t.name)
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_zeros_are_exact_and_what_is_no_number_does_not_vanish(
    backend: CpuBackend, ggml_type: GGMLType, rows: int
) -> None:
    raw = random_raw(np.random.default_rng(3), ggml_type, (32, 512))
    x = np.zeros((rows, 512), np.float32)
    assert not multiply(backend, raw, x).any()
    for value in (np.inf, np.nan):
        for column in (0, 9, 100, 255, 511):
            x[-1] = np.random.default_rng(column).standard_normal(512)
            x[-1, column] = value
            y = multiply(backend, raw, x)
            assert np.isnan(y[-1]).all() and not y[:-1].any()


@pytest.mark.parametrize("ggml_type", list(BLOCK_LAYOUTS), ids=lambda t: t.name)
def test_embedding_rows(backend: CpuBackend, ggml_type: GGMLType) -> None:
    from stage.model.spec import EmbeddingSpec, TensorRef

    raw = random_raw(np.random.default_rng(1), ggml_type, (50, 512))
    spec = EmbeddingSpec(TensorRef("token_embd.weight"), 3.5)
    ids = np.array([49, 0, 7, 7], np.int32)
    rows = backend.embed(backend.prepare_embedding(spec, {spec.weight: raw}), ids).numpy()
    expected = dequantize(raw).numpy()[ids] * np.float32(3.5)
    np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-6)
