"""Raw tensors are views of exactly the bytes a part of the model names."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from common.errors import CorruptDataError
from common.gguf.reader import GGUFFile
from stage.model.registry import build_spec
from stage.model.spec import TensorRef, tensor_refs
from stage.weights.loader import raw_tensors
from stage.weights.quants import dequantize
from tests.gguf_files import write_gguf, write_tiny_llama


def test_a_layer_names_its_own_tensors_only(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "model.gguf", layers=3, quantization=GGMLQuantizationType.Q8_0)
    with GGUFFile.open(path) as file:
        raw = raw_tensors(file, tensor_refs(build_spec(file).layers[1]))
        assert {ref.name for ref in raw} == {name for name in file.tensors if name.startswith("blk.1.")}
        for ref, tensor in raw.items():
            info = file.tensors[ref.name]
            assert tensor.shape == info.shape[::-1] and tensor.nbytes == info.nbytes
            assert np.shares_memory(tensor.data, file.tensor_bytes(ref.name))
            assert not tensor.data.flags.writeable
            expected = gguf.quants.dequantize(file.tensor_bytes(ref.name), info.ggml_type)
            assert np.array_equal(dequantize(tensor).numpy().reshape(-1), expected.reshape(-1))


def test_rows_of_matrices_stacks_and_vectors(tmp_path: Path) -> None:
    matrix, stack, vector = (
        np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for shape in ((6, 4), (3, 6, 4), (6,))
    )
    path = write_gguf(tmp_path / "model.gguf", {}, {"matrix": matrix, "stack": stack, "vector": vector})
    refs = [TensorRef(name, 2, 5) for name in ("matrix", "stack", "vector")]
    with GGUFFile.open(path) as file:
        raw = raw_tensors(file, [*refs, TensorRef("matrix", 4)])
        values = [dequantize(raw[ref]).numpy() for ref in raw]
        for got, expected in zip(values, (matrix[2:5], stack[:, 2:5], vector[2:5], matrix[4:]), strict=True):
            assert np.array_equal(got, expected)
        with pytest.raises(CorruptDataError, match=r"'matrix' has 6 rows, asked for are 2 to 7"):
            raw_tensors(file, [TensorRef("matrix", 2, 7)])
        with pytest.raises(CorruptDataError, match="'other'"):
            raw_tensors(file, [TensorRef("other")])
