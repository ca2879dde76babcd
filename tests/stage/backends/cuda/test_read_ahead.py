"""Blobs in host memory: of the mapped file, of a ring that reads ahead; and where nothing can be pinned."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.synth_model import Shape, write
from common.errors import CorruptDataError, OutOfCapacityError, PipeLLMError
from common.gguf.reader import GGUFFile
from stage.backends.cuda.host_pool import PAGE, BlobLayout, HostPool, fill, raw_tensors_in
from stage.backends.cuda.read_ahead import ReadAhead
from stage.model.registry import build_spec
from stage.model.spec import TensorRef, tensor_refs
from stage.weights.loader import raw_tensors
from stage.weights.quants import RawTensor

SHAPE = Shape("llama", 4, 256, 4, 2, 64, 512, 300)


class Layers:
    """The layers of a small file: layouts and what their blobs must hold."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = GGUFFile.open(path)
        self.layouts: dict[int, BlobLayout] = {}
        self.raws: dict[int, dict[TensorRef, RawTensor]] = {}
        for layer in build_spec(self.file, 128).layers:
            self.raws[layer.index] = raw = raw_tensors(self.file, tensor_refs(layer))
            self.layouts[layer.index] = BlobLayout.of(
                self.file, raw, [r for r in raw if len(raw[r].shape) > 1]
            )
        self.largest = max(layout.nbytes for layout in self.layouts.values())

    def slots(self, count: int) -> list[np.ndarray]:
        memory = np.frombuffer(mmap.mmap(-1, count * self.largest), np.uint8)  # on pages, as direct I/O asks
        return list(memory.reshape(count, -1))

    def check(self, layer: int, blob: np.ndarray) -> None:
        found = raw_tensors_in(self.layouts[layer], blob)
        assert found
        for ref, tensor in found.items():
            assert np.array_equal(tensor.data, self.raws[layer][ref].data)


@pytest.fixture
def layers(tmp_path: Path) -> Layers:
    write(tmp_path / "model.gguf", SHAPE, "q8_0")
    return Layers(tmp_path / "model.gguf")


@pytest.fixture(params=[False, True], ids=["cached", "direct"])
def ring(layers: Layers, request: pytest.FixtureRequest) -> Iterator[ReadAhead]:
    try:
        ring = ReadAhead(layers.layouts, layers.slots(2), direct=request.param)
    except OSError:
        pytest.skip("this file system knows no direct I/O")
    yield ring
    ring.close()


def test_a_blob_is_filled_from_the_mapped_file_and_lies_as_in_the_file(layers: Layers) -> None:
    for layer, layout in layers.layouts.items():
        blob = np.zeros(layout.nbytes, np.uint8)
        fill(layout, blob)
        layers.check(layer, blob)
        for tensor in layout.tensors.values():
            assert tensor.offset % PAGE == tensor.file_offset % PAGE


def test_layers_are_read_ahead_in_order_while_slots_are_free(layers: Layers, ring: ReadAhead) -> None:
    order = [0, 2, 3, 1, 0, 2]
    for layer in order:
        ring.request(layer)
    copied = SimpleNamespace(synchronize=lambda: None)
    for number, layer in enumerate(order):
        blob = ring.take(layer, wait=True)
        assert blob is not None
        layers.check(layer, blob)
        if number == 1:  # both slots are taken: nothing more can be there
            assert ring.take(order[2], wait=False) is None
            ring.give_back(copied)
        if number > 0:
            ring.give_back(copied)


def test_a_slot_is_read_into_again_only_after_its_copy(layers: Layers) -> None:
    ring = ReadAhead(layers.layouts, layers.slots(1), direct=False)
    waited = []
    ring.request(0)
    ring.request(1)
    blob = ring.take(0, wait=True)
    assert blob is not None

    def synchronize() -> None:
        layers.check(0, blob)  # still what was copied
        waited.append(True)

    ring.give_back(SimpleNamespace(synchronize=synchronize))
    following = ring.take(1, wait=True)
    assert following is not None and waited
    layers.check(1, following)
    ring.close()


def test_what_was_requested_can_be_forgotten(layers: Layers, ring: ReadAhead) -> None:
    for _ in range(20):
        ring.request(0)
        ring.request(1)
        ring.forget()
        ring.request(2)
        blob = ring.take(2, wait=True)
        assert blob is not None
        layers.check(2, blob)
        ring.give_back(None)


def test_a_file_that_was_cut_is_reported_to_who_waits(layers: Layers) -> None:
    ring = ReadAhead(layers.layouts, layers.slots(1), direct=False)
    with layers.path.open("r+b") as file:
        file.truncate(layers.layouts[3].tensors[next(iter(layers.layouts[3].tensors))].file_offset + 100)
    ring.request(3)
    with pytest.raises(CorruptDataError, match="ends at byte"):
        ring.take(3, wait=True)
    ring.close()


def test_another_layer_than_requested_is_a_fault(layers: Layers, ring: ReadAhead) -> None:
    ring.request(0)
    with pytest.raises(PipeLLMError, match="layer 1 was asked for"):
        ring.take(1, wait=True)


def test_memory_that_cannot_be_pinned_serves_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    driver = SimpleNamespace(cuMemHostRegister=lambda *args: (2,))  # out of memory
    pool = HostPool(10 * PAGE, driver)
    assert not pool.pinned
    assert "pinning_failed" in capsys.readouterr().out
    first, second = pool.take(PAGE + 1), pool.take(3 * PAGE)
    first[:], second[:] = 1, 2
    assert first.ctypes.data % PAGE == second.ctypes.data % PAGE == 0
    assert set(first) == {1}
    with pytest.raises(OutOfCapacityError, match="too small"):
        pool.take(6 * PAGE)
    pool.close()
    pool.close()
