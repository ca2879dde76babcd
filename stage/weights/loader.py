"""From a mapped GGUF file to raw tensors: views of exactly the bytes that were asked for, nothing read yet.

A stage hands in the references of its own parts and never touches the bytes of another's.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import Protocol, TypeVar

from common.errors import CorruptDataError
from common.gguf.reader import GGUFFile
from stage.weights.quants import RawTensor


class TensorRows(Hashable, Protocol):
    """Rows [row_start, row_end) of a named tensor; None: to the last."""

    @property
    def name(self) -> str: ...
    @property
    def row_start(self) -> int: ...
    @property
    def row_end(self) -> int | None: ...


Ref = TypeVar("Ref", bound=TensorRows)


def raw_tensors(file: GGUFFile, refs: Iterable[Ref]) -> dict[Ref, RawTensor]:
    """Each reference's tensor (once, though named twice), as views of the mapped file.

    Raises `CorruptDataError` for a tensor that is not in the file, or rows it has not.
    """
    return {ref: _raw_tensor(file, ref) for ref in refs}


def _raw_tensor(file: GGUFFile, ref: TensorRows) -> RawTensor:
    data = file.tensor_bytes(ref.name)
    tensor = file.tensors[ref.name]
    shape = tensor.shape[::-1]
    row_bytes = len(data) // max(1, math.prod(shape[:-1]))
    raw = RawTensor(data.reshape(*shape[:-1], row_bytes), tensor.ggml_type, shape)
    rows = shape[-2] if len(shape) > 1 else shape[-1]
    end = rows if ref.row_end is None else ref.row_end
    if not 0 <= ref.row_start <= end <= rows:
        raise CorruptDataError(
            f"{file.paths[0]}: tensor {ref.name!r} has {rows} rows, asked for are {ref.row_start} to {end}"
        )
    return raw if end - ref.row_start == rows else raw.rows(ref.row_start, end)
