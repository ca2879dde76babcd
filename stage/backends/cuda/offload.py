"""The layers of a GPU stage whose weights do not stay on the GPU: streamed to it, or computed by the host; or
of which only the experts are so, and the rest stays.

Their matrices live once in host memory, as the file's bytes: in the pinned pool as far as it goes, else in
the file. What is small (norms, biases, rotary tables) is on the GPU for every layer. Which layers the host
computes depends on the rows of a step: with more of them arithmetic takes the cores longer, the link not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import psutil
import torch

from common.errors import PipeLLMError
from common.gguf.reader import GGUFFile
from stage.backends.base import Batch, RawTensors, StreamingCounters
from stage.backends.cuda.forward import Forward, Rows
from stage.backends.cuda.host_layers import HostLayers
from stage.backends.cuda.host_pool import BlobLayout, HostPool, fill, raw_tensors_in
from stage.backends.cuda.kv_cache import CudaKvCache
from stage.backends.cuda.pace import Pace
from stage.backends.cuda.read_ahead import ReadAhead
from stage.backends.cuda.repacker import MatrixRecipe
from stage.backends.cuda.streamed_weights import StreamedLoader, matrix_refs, slot_bytes
from stage.backends.cuda.streaming import WeightStream
from stage.backends.cuda.weights import Layer, MoeFfn
from stage.model.spec import LayerSpec, tensor_refs
from stage.placement import RING_SLOTS, Place, Prediction, pinned_layers
from stage.weights.loader import raw_tensors

if TYPE_CHECKING:
    from stage.backends.cuda.pieces import RunPiece

FEW_ROWS = 2  # most rows of a step that runs as `places` say
HOST_ROWS = 16  # most rows of a prefill whose host layers the host computes; of decode it is any number


@dataclass(frozen=True)
class OffloadedLayer:
    spec: LayerSpec
    views: tuple[Layer, ...]  # with its tiles in each of the tile slots


class OffloadedLayers:
    """Used by one thread, but for the reading of files."""

    def __init__(
        self,
        forward: Forward,
        file: GGUFFile,
        specs: Sequence[LayerSpec],
        places: Mapping[int, Place],
        batch_places: Mapping[int, Place],
        pinned_bytes: int,
        host_threads: int = 0,
        prefetch: bool = True,
    ) -> None:
        """`specs`: all layers of the stage; `places`: of each, in steps of up to FEW_ROWS rows;
        `batch_places`: in larger ones (the same, but that host layers may be streamed). Takes the pinned
        pool, and on the GPU the slots.

        Raises UnsupportedModelError for a layer that cannot be streamed (rows of each expert's matrix),
        OutOfCapacityError where the pinned pool is too small for the ring that reads the rest.
        """
        from cuda.bindings import driver

        self._forward = forward
        self.device = forward.device
        self.places = {spec.index: places[spec.index] for spec in specs}
        self._batch_places = {spec.index: batch_places[spec.index] for spec in specs}
        offloaded = [spec for spec in specs if places[spec.index] != Place.RESIDENT]
        raws = {spec.index: raw_tensors(file, tensor_refs(spec)) for spec in offloaded}
        refs = {spec.index: matrix_refs(spec, places[spec.index].is_split) for spec in offloaded}
        self._layouts = {i: BlobLayout.of(file, raws[i], refs[i]) for i in refs}
        indices = list(self._layouts)
        chosen, _ = pinned_layers(
            [self.places[i] for i in indices], [self._layouts[i].nbytes for i in indices], pinned_bytes
        )
        pinned = {indices[i] for i in chosen}
        largest = max(layout.nbytes for layout in self._layouts.values())
        in_ring = {i: layout for i, layout in self._layouts.items() if i not in pinned}
        pool_bytes = sum(self._layouts[i].nbytes for i in pinned) + (RING_SLOTS * largest if in_ring else 0)
        hosts = any(place.on_host for place in self.places.values())
        tile_bytes = max(slot_bytes(raws[i][ref] for ref in refs[i]) for i in refs)
        self._recipes: dict[int, tuple[MatrixRecipe, ...]] = {}
        self._loader: StreamedLoader | None = StreamedLoader(self.device)
        with ExitStack() as owned:  # memory that stays registered where it was unmapped spoils its address
            self._pool = pool = HostPool(pool_bytes, driver)
            owned.callback(pool.close)
            owned.callback(torch.cuda.synchronize, self.device)
            blobs = {i: pool.take(self._layouts[i].nbytes) for i in sorted(pinned)}
            ring = None
            if in_ring:
                slots = [pool.take(largest) for _ in range(RING_SLOTS)]
                direct = file.file_bytes > psutil.virtual_memory().available
                ring = ReadAhead(in_ring, slots, direct)
            self._blobs = _Blobs(blobs, ring)
            owned.callback(self._blobs.close)
            self.host = HostLayers(host_threads) if hosts else None
            if self.host is not None:
                owned.callback(self.host.close)
            self.stream = WeightStream(
                forward.kernels, self._recipes, self._blobs, largest, tile_bytes, prefetch
            )
            owned.callback(self.stream.close)
            self._owned = owned.pop_all()
        self._few_order = tuple(i for i, place in self.places.items() if place.streamed)
        self._batch_order = tuple(i for i, place in self._batch_places.items() if place.streamed)
        self._prefill_order = tuple(refs)
        self._last_layer = specs[-1].index
        self._pace: Pace | None = None  # of what users wait for: not yet while everything is warmed up
        self.around: Callable[[RunPiece], RunPiece] | None = None  # what runs a step's pieces, to time them
        self._on_host: frozenset[int] = frozenset()  # in the step that has begun

    # --- load ---------------------------------------------------------------------------------------------

    def prepare(self, spec: LayerSpec, raw: RawTensors) -> OffloadedLayer:
        if self._loader is None:
            raise PipeLLMError("layers were prepared after the first step: a fault")
        layout = self._layouts[spec.index]
        streamed = self._loader.streamed(spec, raw, layout)
        self._recipes[spec.index] = streamed.recipes
        views = tuple(streamed.view(slot) for slot in self.stream.tile_slots)
        blob = self._blobs.pinned.get(spec.index)
        if blob is not None:
            fill(layout, blob)
        place = self.places[spec.index]
        if self.host is not None and place.on_host:
            ours = raw if blob is None else {**raw, **raw_tensors_in(layout, blob)}
            self.host.prepare(spec, ours, place.is_split)
        return OffloadedLayer(spec, views)

    def allocate_kv(self, specs: Sequence[LayerSpec], num_blocks: int, block_size: int) -> CudaKvCache:
        """Host layers' K and V lie in host memory. On the GPU, those that batches stream have a copy; the
        others share one layer's room."""
        host = [spec for spec in specs if self.places[spec.index] == Place.HOST]
        alone = [spec for spec in host if self._batch_places[spec.index] == Place.HOST]
        on_gpu = [spec for spec in specs if spec not in alone]
        kv = CudaKvCache(on_gpu, num_blocks, block_size, self.device)
        if alone:
            kv.share_room(alone, num_blocks, self.device)
        if self.host is not None:
            self.host.allocate_kv(host, num_blocks, block_size, kv, {spec.index for spec in alone})
        return kv

    # --- steps ----------------------------------------------------------------------------------------------

    def begin(self, batch: Batch) -> None:
        """A step begins, layer by layer."""
        if batch.num_rows <= HOST_ROWS:
            self.begin_decode(batch.num_rows)
            return
        self._end_of_load()
        if self._pace is not None:
            self._pace.chunk(batch.num_rows)
        self._on_host = frozenset()
        pairs = zip(self._prefill_order, self._few_order, strict=False)
        common = next((i for i, (a, b) in enumerate(pairs) if a != b), len(self._few_order))
        self.stream.follow(self._prefill_order, common)

    def begin_decode(self, num_rows: int) -> None:
        self._end_of_load()
        if self._pace is not None:
            self._pace.step(num_rows)
        few = num_rows <= FEW_ROWS
        places = self.places if few else self._batch_places
        self._on_host = frozenset(index for index, place in places.items() if place.on_host)
        self.stream.follow(self._few_order if few else self._batch_order)

    def ran(self, index: int) -> None:
        """Any layer of the stage, wherever it lies, was issued by itself: not in a decode step's pieces."""
        if self._pace is not None and index == self._last_layer:
            self._pace.chunk_ends()

    def keep_pace(self, expected: Prediction | None) -> None:
        """From now on steps are timed, and held against what was expected."""
        self._pace = Pace(expected)

    def _end_of_load(self) -> None:
        """What preparing layers took is given back: others may want it, and the budget counts it."""
        if self._loader is not None:
            self._loader = None
            torch.cuda.empty_cache()

    def run(
        self, layer: OffloadedLayer, kv: CudaKvCache, batch: Batch, rows: Rows, hidden_states: torch.Tensor
    ) -> None:
        """hidden_states: f32 [rows, hidden_size] on the GPU, changed in place."""
        index = layer.spec.index
        is_split = self.places[index].is_split
        if is_split:
            self._forward.attend(layer.views[0], kv, rows, hidden_states)
        if index in self._on_host:
            self.run_host((index,), batch, hidden_states)
            return
        view = layer.views[self.acquire(index, batch)]
        if is_split:
            self._forward.experts(experts_of(view), hidden_states)
        else:
            self._forward.layer(view, kv, rows, hidden_states)
        self.release(index, batch, soon=batch.num_rows > HOST_ROWS)

    def acquire(self, index: int, batch: Batch | None) -> int:
        """The tile slot with the weights of a layer that the GPU now computes; its K and V are there too."""
        slot = self.stream.acquire(index)
        if self.needs_batch(index) and self.host is not None and batch is not None:
            self.host.kv.before_gpu(index, batch)
        return slot

    def release(self, index: int, batch: Batch | None, soon: bool = False) -> None:
        """All work of the layer has been issued. `soon`: the host may compute it in the next step."""
        self.stream.release(index)
        if self.needs_batch(index) and self.host is not None and batch is not None:
            self.host.kv.after_gpu(index, batch, soon)

    def needs_batch(self, index: int) -> bool:
        """Whether the host computes this layer's attention in some steps: its K and V are on both sides."""
        return self.places[index] == Place.HOST

    # --- decode in pieces -----------------------------------------------------------------------------------

    def decode_places(self, few: bool) -> Mapping[int, Place]:
        return self.places if few else self._batch_places

    def decode_view(self, layer: OffloadedLayer, few: bool) -> Layer:
        """A streamed layer with its tiles in the slot that decode always uses for it."""
        order = self._few_order if few else self._batch_order
        return layer.views[self.stream.slot_of(order, layer.spec.index)]

    def run_host(self, layers: Sequence[int], batch: Batch, hidden_states: torch.Tensor) -> None:
        if self.host is None:
            raise PipeLLMError("a layer is to run on the host, and none was placed there: a fault")
        self.host.run(layers, batch, hidden_states)

    def layer_bytes(self, index: int) -> int:
        """That cross the link."""
        return self._layouts[index].nbytes

    @property
    def counters(self) -> StreamingCounters:
        host = self.host
        return StreamingCounters(
            bytes_copied=self.stream.bytes_copied,
            file_wait_s=self.stream.file_wait_s,
            gpu_wait_s=host.gpu_wait_s if host else 0.0,
            host_s=host.compute_s if host else 0.0,
        )

    @property
    def host_kv_bytes(self) -> int:
        return self.host.kv.host.nbytes if self.host is not None else 0

    @property
    def pinned_bytes(self) -> int:
        return self._pool.nbytes

    def close(self) -> None:
        self._owned.close()


def experts_of(layer: Layer) -> MoeFfn:
    if not isinstance(layer.ffn, MoeFfn):
        raise PipeLLMError(f"layer {layer.spec.index} has no experts, and was placed as if it had: a fault")
    return layer.ffn


class _Blobs:
    """Blobs in the pinned pool, and those that the ring reads."""

    def __init__(self, pinned: dict[int, np.ndarray], ring: ReadAhead | None) -> None:
        self.pinned, self._ring = pinned, ring

    def request(self, layer: int) -> None:
        if layer not in self.pinned and self._ring is not None:
            self._ring.request(layer)

    def take(self, layer: int, wait: bool) -> np.ndarray | None:
        blob = self.pinned.get(layer)
        if blob is None and self._ring is not None:
            blob = self._ring.take(layer, wait)
        return blob

    def copied(self, layer: int, stream: torch.cuda.Stream) -> None:
        if layer not in self.pinned and self._ring is not None:
            event = torch.cuda.Event()
            event.record(stream)
            self._ring.give_back(event)

    def forget(self) -> None:
        if self._ring is not None:
            self._ring.forget()

    def close(self) -> None:
        if self._ring is not None:
            self._ring.close()
        self.pinned.clear()
