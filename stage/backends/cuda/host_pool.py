"""Host memory for the weights that are not on the GPU: pinned, of a stated size, holding the file's bytes.

A layer is one blob, so that it crosses in one copy. Knows where bytes lie in the files and in memory, nothing
of slots, streams or when a layer is needed.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import OutOfCapacityError, UnsupportedModelError
from common.gguf.reader import GGUFFile
from common.log import get_logger
from stage.model.spec import TensorRef
from stage.weights.quants import RawTensor

PAGE = 4096
_HUGE_PAGE = 2 << 20


@dataclass(frozen=True)
class BlobTensor:
    """A tensor in a blob, at the same place within a page as in its file (direct I/O asks for that)."""

    raw: RawTensor  # in the mapped file
    path: Path
    file_offset: int
    offset: int

    @property
    def nbytes(self) -> int:
        return self.raw.nbytes


@dataclass(frozen=True)
class BlobLayout:
    tensors: Mapping[TensorRef, BlobTensor]
    nbytes: int

    @classmethod
    def of(cls, file: GGUFFile, raw: Mapping[TensorRef, RawTensor], refs: Iterable[TensorRef]) -> BlobLayout:
        """Raises UnsupportedModelError for a tensor of which only some rows of every expert are used."""
        tensors: dict[TensorRef, BlobTensor] = {}
        end = 0
        for ref in refs:
            data = raw[ref].data
            if not data.flags.c_contiguous:
                raise UnsupportedModelError(
                    f"{ref.name}: rows of each expert cannot be streamed by themselves"
                )
            whole = file.tensors[ref.name]
            inside = data.ctypes.data - file.tensor_bytes(ref.name).ctypes.data
            position = whole.offset + inside
            offset = end + position % PAGE
            tensors[ref] = BlobTensor(raw[ref], file.paths[whole.part], position, offset)
            end = -(-(offset + data.nbytes) // PAGE) * PAGE
        return cls(tensors, end)


class HostPool:
    """Pinned memory, handed out from its beginning to its end and freed as a whole."""

    def __init__(self, nbytes: int, driver: Any) -> None:
        """`driver`: cuda.bindings.driver, with a context that is current. Where pinning fails, the memory is
        an ordinary one, with a warning. Raises OutOfCapacityError where there is no memory at all."""
        self.nbytes = nbytes
        self.pinned = False
        self._driver = driver
        self._taken = 0
        try:
            self._memory: mmap.mmap | None = mmap.mmap(-1, max(nbytes, PAGE) + _HUGE_PAGE)
        except (OSError, ValueError, OverflowError) as error:
            raise OutOfCapacityError(
                f"{nbytes} bytes of host memory for streamed weights were refused ({error}): "
                "lower pinned_memory"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to pin and to look up
        whole = np.frombuffer(self._memory, np.uint8)
        start = -whole.ctypes.data % _HUGE_PAGE
        self._bytes = whole[start : start + max(nbytes, PAGE)]
        if nbytes:
            self._pin()

    def take(self, nbytes: int) -> np.ndarray:
        """uint8 [nbytes], beginning on a page. Raises OutOfCapacityError beyond the pool's size."""
        start, self._taken = self._taken, self._taken + -(-nbytes // PAGE) * PAGE
        if self._taken > self.nbytes:
            raise OutOfCapacityError(
                f"the pinned pool of {self.nbytes} bytes is too small by {self._taken - self.nbytes}"
            )
        return self._bytes[start : start + nbytes]

    def close(self) -> None:
        """The GPU must be through with it. Idempotent."""
        if self.pinned:
            self._driver.cuMemHostUnregister(self._bytes.ctypes.data)
            self.pinned = False
        self._bytes = np.empty(0, np.uint8)
        self._memory = None  # unmapped with the last view of it

    def _pin(self) -> None:
        (code,) = self._driver.cuMemHostRegister(self._bytes.ctypes.data, self._bytes.nbytes, 0)
        self.pinned = int(code) == 0
        if not self.pinned:
            get_logger().warning(
                "pinning_failed", nbytes=self.nbytes, cuda_error=int(code),
                cost="copies to the GPU run at an eighth of the rate and hold up the host",
                remedy="lower pinned_memory, or raise the limit of locked memory",
            )  # fmt: skip


def fill(layout: BlobLayout, into: np.ndarray) -> None:
    """Copies a layer from the mapped file into its blob. into: uint8 [layout.nbytes]."""
    for tensor in layout.tensors.values():
        np.copyto(into[tensor.offset : tensor.offset + tensor.nbytes], tensor.raw.data.reshape(-1))


def raw_tensors_in(layout: BlobLayout, blob: np.ndarray) -> dict[TensorRef, RawTensor]:
    """The layer's tensors as they lie in its blob, for a backend that computes on them."""
    found = {}
    for ref, tensor in layout.tensors.items():
        data = blob[tensor.offset : tensor.offset + tensor.nbytes].reshape(tensor.raw.data.shape)
        found[ref] = RawTensor(data, tensor.raw.ggml_type, tensor.raw.shape)
    return found
