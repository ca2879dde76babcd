"""Whole models with layers, or their experts, off the GPU: the program that streams them and lends them to
the host, run for real around kernels on the host's CPU.

What is streamed gives the resident layers' bits, eagerly and in a decode step's pieces; what the host
computes agrees nearly. Only streams and events are simulated (simulated_cuda.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.synth_model import Shape, write
from common.gguf.reader import GGUFFile
from stage.backends.base import Batch, make_batch
from stage.backends.cpu import variants
from stage.backends.cuda.decode import run_layers
from stage.backends.cuda.forward import Forward, Rows
from stage.backends.cuda.kv_cache import CudaKvCache
from stage.backends.cuda.offload import OffloadedLayers
from stage.backends.cuda.pieces import AnyLayer, Piece, StepPieces
from stage.backends.cuda.weights import Attention, Experts, Layer, WeightLoader
from stage.model.registry import build_spec
from stage.model.spec import tensor_refs
from stage.placement import Place, keep_hosts
from stage.weights.loader import raw_tensors
from tests.stage.backends.cuda.host_kernels import HostKernels, model_kernels
from tests.stage.backends.cuda.simulated_cuda import simulate

CPU = torch.device("cpu")
SHAPE = Shape("llama", 4, 64, 2, 1, 32, 64, 50, (4, 2))
R, S, H = Place.RESIDENT, Place.STREAMED, Place.HOST
SE, HE = Place.STREAMED_EXPERTS, Place.HOST_EXPERTS
TABLES = [np.arange(6 * i, 6 * i + 6, dtype=np.int32)[::-1].copy() for i in range(8)]
BLOCK_SIZE = 8


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return model_kernels(tmp_path_factory.mktemp("host"))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "model.gguf"
    write(path, SHAPE, "bf16")
    return path


@pytest.fixture(scope="module")
def wanted(path: Path, kernels: HostKernels) -> list[torch.Tensor]:
    """Of layers that are all resident."""
    return run(path, kernels, (R,) * 4)


@pytest.fixture(scope="module")
def _simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        simulate(patch, tmp_path_factory.mktemp("repack"))
        yield


class Model:
    def __init__(
        self,
        path: Path,
        kernels: HostKernels,
        places: tuple[Place, ...],
        batch_places: tuple[Place, ...] | None = None,
        pinned_bytes: int = 1 << 24,
    ) -> None:
        self.file = file = GGUFFile.open(path)
        self.specs = specs = build_spec(file, 256).layers
        self.forward = forward = Forward(kernels)  # type: ignore[arg-type]
        self.offloaded: OffloadedLayers | None = None
        if any(place != R for place in places):
            few, many = dict(enumerate(places)), dict(enumerate(batch_places or places))
            self.offloaded = OffloadedLayers(forward, file, specs, few, many, pinned_bytes, 1)
            self.kv = self.offloaded.allocate_kv(specs, 48, BLOCK_SIZE)
        else:
            self.kv = CudaKvCache(specs, 48, BLOCK_SIZE, CPU)
        loader = WeightLoader(CPU)
        self.layers: list[AnyLayer] = []
        for spec, place in zip(specs, places, strict=True):
            raw = raw_tensors(file, tensor_refs(spec))
            prepared = loader.layer(spec, raw) if place == R or self.offloaded is None else None
            self.layers.append(prepared or self.offloaded.prepare(spec, raw))  # type: ignore[union-attr]

    def eager(self, batch: Batch, hidden_states: torch.Tensor) -> torch.Tensor:
        """As CudaBackend.run_layer."""
        rows = Rows.of(batch, CPU)
        if self.offloaded is not None:
            self.offloaded.begin(batch)
        for layer in self.layers:
            if isinstance(layer, Layer):
                self.forward.layer(layer, self.kv, rows, hidden_states)
            else:
                assert self.offloaded is not None
                self.offloaded.run(layer, self.kv, batch, rows, hidden_states)
            if self.offloaded is not None:
                self.offloaded.ran(layer.spec.index)
        return hidden_states

    def pieces(self, batch: Batch, hidden_states: torch.Tensor) -> torch.Tensor:
        """As a decode step does."""
        rows = Rows.of(batch, CPU)

        def run(piece: Piece) -> None:
            run_layers(self.forward, piece.layers, self.kv, rows, hidden_states, None)

        StepPieces(self.offloaded, self.layers).run(batch.num_rows, batch, hidden_states, run)
        return hidden_states

    def results(self) -> list[torch.Tensor]:
        """Long chunks, single rows and eight at once, both ways of running."""
        rng = torch.Generator().manual_seed(0)
        found, lengths = [], [0] * 8

        def step(run: str, *rows: tuple[int, int]) -> None:
            sequences = [(lengths[i], count, TABLES[i]) for i, count in rows]
            batch = make_batch(sequences, BLOCK_SIZE)
            hidden_states = torch.randn((batch.num_rows, SHAPE.hidden_size), generator=rng)
            found.append(getattr(self, run)(batch, hidden_states))
            for i, count in rows:
                lengths[i] += count

        every = [(i, 1) for i in range(8)]
        step("eager", (0, 17))
        step("pieces", (0, 1))
        step("eager", *every)
        step("pieces", *every)
        step("pieces", (3, 1))
        step("eager", (0, 1))
        step("eager", (3, 17))
        step("pieces", (3, 1))
        return found

    def close(self) -> None:
        if self.offloaded is not None:
            self.offloaded.close()


def run(path: Path, kernels: HostKernels, *places: tuple[Place, ...]) -> list[torch.Tensor]:
    with torch.inference_mode():
        model = Model(path, kernels, *places)
        try:
            return model.results()
        finally:
            model.close()


@pytest.mark.usefixtures("_simulated")
@pytest.mark.parametrize(
    "places",
    [(S,) * 4, (SE,) * 4, (SE, R, S, SE)],
    ids=lambda places: " ".join(place.value for place in places),
)
def test_streamed_experts_give_the_resident_ones_bits(
    path: Path, kernels: HostKernels, wanted: list[torch.Tensor], places: tuple[Place, ...]
) -> None:
    for want, got in zip(wanted, run(path, kernels, places), strict=True):
        assert torch.equal(want, got)


@pytest.mark.usefixtures("_simulated")
def test_experts_read_from_the_file_give_the_same_bits(
    path: Path, kernels: HostKernels, wanted: list[torch.Tensor]
) -> None:
    with torch.inference_mode():
        # Room for the ring's three slots alone.
        model = Model(path, kernels, (SE,) * 4, pinned_bytes=7 * (3 * 4 * 64 * 64 * 2 + 3 * 4096) // 2)
        assert model.offloaded is not None
        try:
            assert not model.offloaded._blobs.pinned
            got = model.results()
        finally:
            model.close()
    for want, found in zip(wanted, got, strict=True):
        assert torch.equal(want, found)


@pytest.mark.skipif(not variants(), reason="the native CPU backend was not built here")
@pytest.mark.usefixtures("_simulated")
@pytest.mark.parametrize(
    ("places", "kept"),
    [((HE,) * 4, None), ((HE, H, S, HE), 1), ((R, HE, SE, H), 1)],
    ids=lambda value: " ".join(place.value for place in value) if isinstance(value, tuple) else str(value),
)
def test_experts_on_the_host_agree_nearly(
    path: Path, kernels: HostKernels, wanted: list[torch.Tensor], places: tuple[Place, ...], kept: int | None
) -> None:
    """`kept`: layers that the host computes in larger steps; None: the same ones."""
    batch_places = places if kept is None else keep_hosts(places, kept)
    found = run(path, kernels, places, batch_places)
    assert torch.equal(wanted[0], found[0])  # a long chunk is the GPU's
    for want, got in zip(wanted[1:], found[1:], strict=True):
        assert float((got - want).norm() / want.norm()) < 2e-3
    assert not all(map(torch.equal, wanted, found))


@pytest.mark.skipif(not variants(), reason="the native CPU backend was not built here")
@pytest.mark.usefixtures("_simulated")
def test_what_crosses_and_what_stays(path: Path, kernels: HostKernels) -> None:
    """Of a split layer only the experts cross the link or are the host's; K and V stay on the GPU."""
    with torch.inference_mode():
        model = Model(path, kernels, (HE, SE, R, HE), keep_hosts((HE, SE, R, HE), 0))
        offloaded = model.offloaded
        assert offloaded is not None and offloaded.host is not None
        try:
            experts = 3 * 4 * 64 * 64 * 2
            assert experts <= offloaded.layer_bytes(1) <= experts + 3 * 4096
            assert set(model.kv.keys) == set(range(4)) and offloaded.host_kv_bytes == 0
            pieces = StepPieces(offloaded, model.layers)
            few = [
                (one.host, one.streamed, [type(part) for part in one.layers]) for one in pieces._pieces[True]
            ]
            assert few == [
                ((), None, [Attention]),
                ((0,), None, [Attention]),
                ((), 1, [Experts, Layer, Attention]),
                ((3,), None, []),
            ]
            many = [(one.host, one.streamed) for one in pieces._pieces[False]]
            assert many == [((), None), ((), 0), ((), 1), ((), 3)]
            offloaded.keep_pace(None)
            model.results()
            assert offloaded.counters.host_s > 0
            pace = offloaded._pace
            assert pace is not None and pace.prefill() == (1700.0, 17)  # two chunks of 17 rows, 10 ms each
            assert set(pace.rates()) == {1, 8}
        finally:
            model.close()
