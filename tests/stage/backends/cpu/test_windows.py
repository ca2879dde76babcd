"""Layers computed from the file, a window at a time: the same bits, within the memory they were given."""

from __future__ import annotations

import ctypes
import gc
import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.synth_model import Shape, write
from common.errors import OutOfCapacityError
from common.gguf.reader import GGUFFile
from stage.backends.base import make_batch
from stage.backends.cpu import abi
from stage.backends.cpu.backend import CpuBackend
from stage.backends.cpu.windows import layer_bytes
from stage.model.registry import build_spec
from stage.model.spec import LayerSpec, ModelSpec, tensor_refs
from stage.runner import Runner
from stage.weights.loader import raw_tensors

pytestmark = pytest.mark.skipif(abi.library() is None, reason="the native library was not built")

SHAPE = Shape("llama", 8, 512, 8, 2, 64, 1536, 500)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    write(path, SHAPE, "q8_0")
    return path


def load(path: Path, memory_bytes: int) -> tuple[Runner, CpuBackend, ModelSpec, GGUFFile]:
    file = GGUFFile.open(path)
    spec = build_spec(file, 256)
    backend = CpuBackend(2, memory_bytes=memory_bytes)
    runner = Runner.load(
        backend, file, spec, 0, 8, embedding=True, head=True, num_kv_blocks=16, kv_block_size=16
    )
    return runner, backend, spec, file


def forward(runner: Runner, start: int, ids: list[int]) -> torch.Tensor:
    batch = make_batch([(start, len(ids), np.arange(16, dtype=np.int32))], 16)
    x = runner.forward(batch, np.asarray(ids, np.int32))
    return runner.logits(x, np.arange(len(ids)))


def cached_share(file: GGUFFile, layer: LayerSpec) -> float:
    """Of a layer's pages, those in memory."""
    libc = ctypes.CDLL(None)
    pages = present = 0
    for raw in raw_tensors(file, tensor_refs(layer)).values():
        if len(raw.shape) < 2:
            continue
        start = -(-raw.data.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
        count = (raw.data.ctypes.data + raw.data.nbytes - start) // mmap.PAGESIZE
        vector = (ctypes.c_ubyte * count)()
        assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(count * mmap.PAGESIZE), vector) == 0
        pages += count
        present += sum(byte & 1 for byte in vector)
    return present / pages


def test_layers_from_the_file_give_the_same_bits_and_do_not_stay(path: Path) -> None:
    steps = ((0, list(range(20))), (20, [7]), (21, [8]), (22, list(range(30))))
    whole, _, spec, file = load(path, 0)
    want = [forward(whole, start, ids) for start, ids in steps]
    size = layer_bytes(file, spec.layers[0])
    others = sum(
        raw.nbytes
        for part in (spec.embedding, spec.head)
        for raw in raw_tensors(file, tensor_refs(part)).values()
    )
    whole.close()
    file.close()
    del whole, file
    gc.collect()  # a page that is mapped elsewhere stays in memory

    windowed, backend, _, file = load(path, others + (1 << 20) + 5 * size)
    assert backend._windows is not None
    from_file = backend._windows.windowed
    assert 4 <= len(from_file) < 8
    for (start, ids), logits in zip(steps, want, strict=True):
        assert torch.equal(logits, forward(windowed, start, ids))
    for _ in range(2):
        forward(windowed, 60, [1])
    shares = {layer.index: cached_share(file, layer) for layer in spec.layers}
    # The first of them is read ahead for the next step already, and the disk's own read-ahead goes some
    # megabytes beyond; those used since are gone.
    assert all(shares[index] < 0.1 for index in from_file[3:]), shares
    assert all(shares[index] > 0.9 for index in shares if index not in from_file), shares
    windowed.close()


def test_memory_too_small_for_the_windows_is_refused(path: Path) -> None:
    with pytest.raises(OutOfCapacityError, match="on their way"):
        load(path, 3 << 20)
