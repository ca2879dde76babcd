"""A decode step in pieces that graphs can hold, where some of its layers do not stay on the GPU.

Between two pieces lies what a graph cannot hold: a wait for a slot, the release of one, a run of layers on
the host. A stage whose layers are all resident has one piece, the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from common.errors import PipeLLMError
from stage.backends.base import Batch, DecodeRow, make_batch
from stage.backends.cuda.offload import OffloadedLayer, OffloadedLayers
from stage.backends.cuda.weights import Layer
from stage.placement import Place

AnyLayer = Layer | OffloadedLayer


@dataclass(frozen=True)
class Piece:
    number: int
    is_first: bool
    is_last: bool
    host: tuple[int, ...]  # layers that the host computes before
    streamed: int | None  # the first of `layers`, if it is one that is streamed
    layers: tuple[Layer, ...]  # on the GPU; their addresses do not change from step to step


class StepPieces:
    def __init__(self, offloaded: OffloadedLayers | None, layers: Sequence[AnyLayer]) -> None:
        self._offloaded = offloaded
        runs = _runs(layers, offloaded)
        self._pieces = tuple(
            Piece(i, i == 0, i == len(runs) - 1, tuple(run.host), run.streamed, tuple(run.layers))
            for i, run in enumerate(runs)
        )

    @property
    def count(self) -> int:
        return len(self._pieces)

    def host_batch(self, rows: Sequence[DecodeRow], ahead: int, block_size: int) -> Batch | None:
        """The rows as the host computes them, `ahead` iterations on; None where it computes nothing."""
        if not any(piece.host for piece in self._pieces):
            return None
        return make_batch([(row.position + ahead, 1, row.block_table) for row in rows], block_size)

    def run(
        self, batch: Batch | None, hidden_states: torch.Tensor, run_piece: Callable[[Piece], None]
    ) -> None:
        """`run_piece` puts a piece's work for the GPU on the current stream. `hidden_states`: f32 [>= rows,
        hidden_size], where it leaves them. `batch`: needed where the host computes."""
        offloaded = self._offloaded
        if offloaded is None:
            run_piece(self._pieces[0])
            return
        offloaded.begin_decode()
        for piece in self._pieces:
            if piece.host and batch is not None:
                offloaded.run_host(piece.host, batch, hidden_states)
            if piece.streamed is None:
                run_piece(piece)
                continue
            offloaded.stream.acquire(piece.streamed)
            run_piece(piece)
            offloaded.stream.release(piece.streamed)


@dataclass
class _Run:
    host: list[int]
    streamed: int | None
    layers: list[Layer]


def _runs(layers: Sequence[AnyLayer], offloaded: OffloadedLayers | None) -> list[_Run]:
    """The first run has no host layers: the embedding goes with it."""
    runs = [_Run([], None, [])]
    for layer in layers:
        last = runs[-1]
        if isinstance(layer, Layer):
            last.layers.append(layer)
        elif offloaded is None:
            raise PipeLLMError(f"layer {layer.spec.index} is not on the GPU, and nothing streams it: a fault")
        elif offloaded.places[layer.spec.index] == Place.HOST:
            if last.layers or len(runs) == 1:
                runs.append(last := _Run([], None, []))
            last.host.append(layer.spec.index)
        else:
            if last.layers:
                runs.append(last := _Run([], None, []))
            last.streamed = layer.spec.index
            last.layers.append(offloaded.decode_view(layer))
    return runs
