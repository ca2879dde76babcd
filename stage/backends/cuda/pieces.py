"""A decode step in pieces that graphs can hold, where some of its layers do not stay on the GPU.

Between two pieces lies what a graph cannot hold: a wait for a slot, the release of one, a run of layers on
the host. Where a layer's experts lie apart, its attention goes with what is before. A stage whose layers are
all resident has one piece, the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from common.errors import PipeLLMError
from stage.backends.base import Batch, DecodeRow, make_batch
from stage.backends.cuda.offload import FEW_ROWS, OffloadedLayer, OffloadedLayers, experts_of
from stage.backends.cuda.weights import Attention, Experts, Layer, Part

AnyLayer = Layer | OffloadedLayer


@dataclass(frozen=True)
class Piece:
    number: int
    is_first: bool
    is_last: bool
    host: tuple[int, ...]  # layers that the host computes before, or their experts
    streamed: int | None  # the first of `layers`, if it is one that is streamed
    layers: tuple[Part, ...]  # on the GPU; their addresses do not change from step to step


RunPiece = Callable[[Piece], None]


class StepPieces:
    """The pieces of steps of few rows, and those of larger ones, whose places may be others."""

    def __init__(self, offloaded: OffloadedLayers | None, layers: Sequence[AnyLayer]) -> None:
        self._offloaded = offloaded
        self._pieces = {few: _pieces(layers, offloaded, few) for few in (True, False)}

    @property
    def count(self) -> int:
        return max(map(len, self._pieces.values()))

    def host_batch(self, rows: Sequence[DecodeRow], ahead: int, block_size: int) -> Batch | None:
        """The rows as the host computes them, `ahead` iterations on; None where it computes nothing."""
        offloaded = self._offloaded
        if offloaded is None or offloaded.host is None:
            return None
        return make_batch([(row.position + ahead, 1, row.block_table) for row in rows], block_size)

    def run(
        self,
        num_rows: int,
        batch: Batch | None,
        hidden_states: torch.Tensor,
        run_piece: RunPiece,
    ) -> None:
        """`run_piece` puts a piece's work for the GPU on the current stream. `hidden_states`: f32 [>= rows,
        hidden_size], where it leaves them. `num_rows`: with padding. `batch`: needed where the host computes.
        """
        offloaded = self._offloaded
        few = num_rows <= FEW_ROWS
        if offloaded is not None:
            offloaded.begin_decode(num_rows)
            if offloaded.around is not None:
                run_piece = offloaded.around(run_piece)
        for piece in self._pieces[few]:
            if offloaded is None:
                run_piece(piece)
                continue
            if piece.host and batch is not None:
                offloaded.run_host(piece.host, batch, hidden_states)
            if piece.streamed is None:
                run_piece(piece)
                continue
            offloaded.acquire(piece.streamed, batch)
            run_piece(piece)
            offloaded.release(piece.streamed, batch)


@dataclass
class _Run:
    host: list[int] = field(default_factory=list)
    streamed: int | None = None
    layers: list[Part] = field(default_factory=list)


def _pieces(layers: Sequence[AnyLayer], offloaded: OffloadedLayers | None, few: bool) -> tuple[Piece, ...]:
    """The first piece has no host layers: the embedding goes with it."""
    runs = [_Run()]
    for layer in layers:
        last = runs[-1]
        if isinstance(layer, Layer):
            last.layers.append(layer)
            continue
        if offloaded is None:
            raise PipeLLMError(f"layer {layer.spec.index} is not on the GPU, and nothing streams it: a fault")
        place = offloaded.decode_places(few)[layer.spec.index]
        if place.is_split:
            last.layers.append(Attention(layer.views[0]))  # which all views share
            runs.append(last := _Run())
        if place.on_host:
            if last.layers or len(runs) == 1:
                runs.append(last := _Run())
            last.host.append(layer.spec.index)
        else:
            if last.layers:
                runs.append(last := _Run())
            view = offloaded.decode_view(layer, few)
            last.streamed = layer.spec.index
            last.layers.append(Experts(experts_of(view)) if place.is_split else view)
    return tuple(
        Piece(number, number == 0, number == len(runs) - 1, tuple(run.host), run.streamed, tuple(run.layers))
        for number, run in enumerate(runs)
    )
