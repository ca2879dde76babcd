"""Layers whose tiles are made anew for each use: what is known of them beforehand, and the recipes.

`StreamedLoader` makes of a layer what `WeightLoader` makes, but that its matrices' tiles take no memory:
their bytes are looked at once, a piece at a time, for the powers of two that products are scaled by. How a
slot comes to hold the tiles is repacker.py's matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from stage.backends.base import RawTensors
from stage.backends.cuda.host_pool import BlobLayout
from stage.backends.cuda.linear import Linear
from stage.backends.cuda.repack import CONVERTED_TYPES, PIECE_ELEMENTS, PackedMatrix, describe, packed_bytes
from stage.backends.cuda.repacker import MatrixRecipe, Source
from stage.backends.cuda.weights import Layer, WeightLoader
from stage.model.spec import LayerSpec, TensorRef
from stage.weights.quants import RawTensor

_ALIGNMENT = 256


@dataclass(frozen=True)
class StreamedLayer:
    layer: Layer  # the matrices that are streamed without tiles
    recipes: tuple[MatrixRecipe, ...]
    offsets: Mapping[int, int]  # in a slot, by the id of each matrix that is streamed

    def view(self, slot: torch.Tensor) -> Layer:
        """The layer with its tiles in a slot (uint8)."""

        def matrix(packed: PackedMatrix) -> PackedMatrix:
            start = self.offsets.get(id(packed))
            if start is None:
                return packed
            return replace(packed, tiles=slot[start : start + packed.nbytes].view(packed.tiles.shape))

        def linear(one: Linear) -> Linear:
            return replace(
                one,
                segments=tuple(replace(segment, matrix=matrix(segment.matrix)) for segment in one.segments),
            )

        layer = self.layer
        ffn = replace(layer.ffn, gate_up=linear(layer.ffn.gate_up), down=linear(layer.ffn.down))
        return replace(layer, qkv=linear(layer.qkv), output=linear(layer.output), ffn=ffn)


class StreamedLoader(WeightLoader):
    """Takes the GPU memory of a piece of a matrix while it works."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._noted: list[tuple[PackedMatrix, Sequence[RawTensor], bool]] = []
        self._streamed: set[int] = set()  # ids of raw tensors

    def streamed(self, spec: LayerSpec, raw: RawTensors, layout: BlobLayout) -> StreamedLayer:
        """`layout`: of the blob that tiles will be made of; matrices that it lacks are loaded."""
        self._noted.clear()
        self._streamed = {id(raw[ref]) for ref in layout.tensors}
        layer = self.layer(spec, raw)
        refs = {id(tensor): ref for ref, tensor in raw.items()}
        offsets: dict[int, int] = {}
        recipes, end = [], 0
        for packed, parts, interleaved in self._noted:
            converted = parts[0].ggml_type in CONVERTED_TYPES
            recipes.append(
                MatrixRecipe(
                    parts[0].ggml_type,
                    tuple(_source(part, layout.tensors[refs[id(part)]].offset) for part in parts),
                    interleaved,
                    parts[0].data.shape[-1],
                    packed.columns,
                    packed.tiles.shape[0] if packed.tiles.ndim == 4 else 1,
                    end,
                    1 / packed.inverse if converted else 1.0,
                )
            )
            offsets[id(packed)] = end
            end += -(-packed.nbytes // _ALIGNMENT) * _ALIGNMENT
        return StreamedLayer(layer, tuple(recipes), offsets)

    def _matrix(self, parts: Sequence[RawTensor], columns: int, interleaved: bool) -> PackedMatrix:
        if id(parts[0]) not in self._streamed:
            return super()._matrix(parts, columns, interleaved)
        shape = (*parts[0].shape[:-2], sum(part.shape[-2] for part in parts), columns)
        packed = describe(self._pieces(parts), parts[0].ggml_type, shape)
        self._noted.append((packed, parts, interleaved))
        return packed

    def _pieces(self, parts: Sequence[RawTensor]) -> Iterator[torch.Tensor]:
        """uint8 [n, row_bytes] on the device."""
        for part in parts:
            columns = part.shape[-1]
            rows = part.data.reshape(-1, part.data.shape[-1])
            step = max(1, PIECE_ELEMENTS // columns)
            for start in range(0, len(rows), step):
                piece = rows[start : start + step]
                yield self._uploader.bytes(RawTensor(piece, part.ggml_type, (len(piece), columns)))


def matrix_refs(spec: LayerSpec, experts_only: bool = False) -> tuple[TensorRef, ...]:
    """The matrices that are streamed; all else of a layer stays on the GPU."""
    attention, ffn = spec.attention, spec.ffn
    before = () if experts_only else (attention.q, attention.k, attention.v, attention.output)
    return tuple(linear.weight for linear in (*before, ffn.gate, ffn.up, ffn.down))


def slot_bytes(streamed: Iterable[RawTensor]) -> int:
    """At least what the tiles take: parts that share a matrix share its padding."""
    total = 0
    for tensor in streamed:
        stacked = int(np.prod(tensor.shape[:-2], dtype=np.int64))
        total += stacked * packed_bytes(tensor.ggml_type, tensor.shape[-2], tensor.shape[-1]) + _ALIGNMENT
    return total


def _source(part: RawTensor, offset: int) -> Source:
    rows, row_bytes = part.data.shape[-2:]
    return Source(offset, rows, rows * row_bytes)
