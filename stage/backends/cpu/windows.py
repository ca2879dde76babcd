"""Layers of a CPU stage that do not all fit in memory: computed from the mapped file, a window of them in
memory at a time.

As many layers as fit stay. Each other one is read ahead while the layers before it compute, and let go once
it is used: a plain cache, which throws out what was used longest ago, would find every page of a model that
goes by in turns gone just before it is needed. Knows pages, not what a layer computes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.gguf.reader import GGUFFile
from stage.model.spec import LayerSpec, tensor_refs
from stage.placement import Place, arrange
from stage.weights.loader import raw_tensors
from stage.weights.paging import let_go, open_all, populate

_WINDOWS = 2  # the layer that is computed, and the next one that has to be read


@dataclass(frozen=True)
class _Extent:
    data: np.ndarray  # in the mapped file
    path: Path
    offset: int


class LayerWindows:
    """One thread calls `entering` and `leaving` around each layer; another one reads ahead."""

    def __init__(self, file: GGUFFile, layers: Sequence[LayerSpec], budget_bytes: int) -> None:
        """`budget_bytes`: what the pages of all layers may take."""
        self._extents = {layer.index: _extents(file, layer) for layer in layers}
        sizes = [sum(extent.data.nbytes for extent in extents) for extents in self._extents.values()]
        kept = _kept(sizes, budget_bytes)
        indices = [layer.index for layer in layers]
        self._windowed = [index for index, stays in zip(indices, kept, strict=True) if not stays]
        self._following = {
            index: self._windowed[(i + 1) % len(self._windowed)] for i, index in enumerate(self._windowed)
        }
        paths = {extent.path for extents in self._extents.values() for extent in extents}
        self._files = open_all(paths, os.O_RDONLY)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self._reading: dict[int, Future[None]] = {}

    @property
    def windowed(self) -> tuple[int, ...]:
        return tuple(self._windowed)

    def entering(self, layer: int) -> None:
        """Waits until the layer has been read, and has the next one read meanwhile."""
        if layer not in self._following:
            return
        for index in (layer, self._following[layer]):
            if index not in self._reading:
                self._reading[index] = self._reader.submit(self._read, index)
        self._reading[layer].result()

    def leaving(self, layer: int) -> None:
        if layer not in self._following or self._following[layer] == layer:
            return
        del self._reading[layer]
        for extent in self._extents[layer]:
            let_go(extent.data)
            os.posix_fadvise(
                self._files[extent.path], extent.offset, extent.data.nbytes, os.POSIX_FADV_DONTNEED
            )

    def close(self) -> None:
        self._reader.shutdown()
        for file in self._files.values():
            os.close(file)
        self._files = {}

    def _read(self, layer: int) -> None:
        for extent in self._extents[layer]:
            populate(extent.data)


def least_bytes(sizes: Sequence[int]) -> int:
    """What the windows alone take."""
    return _WINDOWS * max(sizes)


def layer_bytes(file: GGUFFile, layer: LayerSpec) -> int:
    return sum(extent.data.nbytes for extent in _extents(file, layer))


def _kept(sizes: Sequence[int], budget_bytes: int) -> list[bool]:
    """Which layers stay: as many as fit beside the windows, the others spread evenly among them, so that
    there is time to read."""
    room = budget_bytes - least_bytes(sizes)
    for windowed in range(1, len(sizes) + 1):
        stays = [place == Place.RESIDENT for place in arrange(len(sizes), windowed, 0)]
        if sum(size for size, stay in zip(sizes, stays, strict=True) if stay) <= room:
            return stays
    return [False] * len(sizes)


def _extents(file: GGUFFile, layer: LayerSpec) -> list[_Extent]:
    """The layer's matrices: vectors are copied when it is prepared."""
    extents = []
    for ref, raw in raw_tensors(file, tensor_refs(layer)).items():
        if len(raw.shape) < 2 or not raw.data.flags.c_contiguous:
            continue
        whole = file.tensors[ref.name]
        inside = raw.data.ctypes.data - file.tensor_bytes(ref.name).ctypes.data
        extents.append(_Extent(raw.data, file.paths[whole.part], whole.offset + inside))
    return extents
