"""Loads and unloads, and loads that run out of memory wherever they ask for some, leave nothing behind: no
file, no thread, no mapping, no memory; and the next load works.

PIPELLM_LOAD_CYCLES sets how often (a thousand takes minutes).
"""

from __future__ import annotations

import gc
import mmap
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from benchmarks.synth_model import Shape, write
from common.errors import OutOfCapacityError, PipeLLMError
from common.gguf.reader import GGUFFile
from protos import stage_pb2
from stage.backends.base import make_batch
from stage.backends.cpu import abi
from stage.backends.cpu.backend import CpuBackend
from stage.backends.cpu.windows import LayerWindows, layer_bytes
from stage.backends.cuda.host_pool import BlobLayout, HostPool
from stage.backends.cuda.read_ahead import ReadAhead
from stage.config import StageConfig
from stage.model.registry import build_spec
from stage.model.spec import tensor_refs
from stage.service import StageService
from stage.weights.loader import raw_tensors

pytestmark = pytest.mark.skipif(abi.library() is None, reason="the native library was not built")

CYCLES = int(os.environ.get("PIPELLM_LOAD_CYCLES", "60"))
LAYERS, NUM_BLOCKS, BLOCK_SIZE = 6, 16, 16
SHAPE = Shape("llama", LAYERS, 256, 4, 2, 64, 768, 300)
CONTEXT: Any = SimpleNamespace(is_active=lambda: True)
PLACES = ["in memory", "by windows"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    write(path, SHAPE, "q8_0")
    return path


@dataclass(frozen=True)
class Held:
    """What this process holds, of what a load takes."""

    files: int
    threads: int
    mappings: int  # of the model
    anonymous: int  # mappings with no file
    resident_bytes: int

    @classmethod
    def now(cls, path: Path) -> Held:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().splitlines()
        return cls(
            files=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")),
            mappings=sum(str(path) in line for line in maps),
            anonymous=sum(len(line.split()) == 5 for line in maps),
            resident_bytes=psutil.Process().memory_info().rss,
        )


def check_back(before: Held, path: Path, cycles: int) -> None:
    """Allocators keep a little; a leak would be one of something a cycle."""
    after = Held.now(path)
    assert after.mappings == 0
    assert after.files <= before.files and after.threads <= before.threads
    assert after.anonymous - before.anonymous < max(8, cycles // 10)
    kept = after.resident_bytes - before.resident_bytes
    assert kept < (4 << 20) + cycles * 8192, f"{kept} bytes more after {cycles} cycles"


class Stage:
    """A stage's service, called as gRPC calls it, on one of the two ways to hold layers."""

    def __init__(self, path: Path, places: str) -> None:
        self.path = path
        self.memory_bytes = _memory_for(path, 3) if places == "by windows" else 0
        self.windowed = self.memory_bytes > 0
        self.service = StageService(
            StageConfig(stage_id="s", carrier="grpc"), uuid.uuid4().hex, self._backend
        )
        self.backends: list[CpuBackend] = []
        self.epoch = 0

    def _backend(self) -> CpuBackend:
        made = CpuBackend(1, memory_bytes=self.memory_bytes)
        if hasattr(self, "backends"):
            self.backends[:] = [made]
        return made

    def load(self) -> None:
        self.epoch += 1
        request = stage_pb2.LoadRequest(
            epoch=self.epoch, model_path=str(self.path), layer_end=LAYERS, embedding=True, head=True,
            num_kv_blocks=NUM_BLOCKS, kv_block_size=BLOCK_SIZE, max_step_tokens=64, context_length=128,
        )  # fmt: skip
        self.held = self.service.Load(request, CONTEXT)  # for as long as it is held
        assert any(response.loaded for response in self.held)
        assert (self.backends[0]._windows is not None) == self.windowed

    def forward(self) -> torch.Tensor:
        assert self.service._loaded is not None
        runner = self.service._loaded.runner
        ids = np.arange(5, dtype=np.int32)
        batch = make_batch([(0, 5, np.arange(2, dtype=np.int32))], BLOCK_SIZE)
        return runner.logits(runner.forward(batch, ids), np.arange(5))

    def unload(self) -> None:
        self.service.Unload(None, CONTEXT)
        self.backends.clear()

    def cycle(self) -> torch.Tensor:
        self.load()
        logits = self.forward()
        self.unload()
        return logits


def _memory_for(path: Path, layers: int) -> int:
    """So much that this many layers fit beside everything else."""
    with GGUFFile.open(path) as file:
        spec, backend = build_spec(file, 128), CpuBackend(1)
        others = sum(
            backend.stored_bytes(part, raw_tensors(file, tensor_refs(part)))
            for part in (spec.embedding, spec.head)
        )
        kv = NUM_BLOCKS * BLOCK_SIZE * sum(map(backend.kv_bytes_per_token, spec.layers))
        backend.close()
        return others + kv + layers * layer_bytes(file, spec.layers[0])


@pytest.fixture
def stage(path: Path, request: pytest.FixtureRequest) -> Iterator[Stage]:
    made = Stage(path, request.param)
    yield made
    made.service.close()


@pytest.mark.parametrize("stage", PLACES, indirect=True)
def test_loads_and_unloads_leave_nothing(stage: Stage) -> None:
    want = stage.cycle()
    for _ in range(5):  # what is made once, allocators' own
        stage.cycle()
    before = Held.now(stage.path)
    for _ in range(CYCLES):
        assert torch.equal(want, stage.cycle())
    check_back(before, stage.path, CYCLES)


# --- out of memory ------------------------------------------------------------------------------------------


class OutOfMemory:
    """The nth of the calls that take memory, files or threads fails; the later ones too, or not."""

    def __init__(self, nth: int, lasting: bool) -> None:
        self.nth, self.lasting, self.calls = nth, lasting, 0

    def around(self, function: Callable[..., Any], error: Exception) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.calls += 1
            if self.calls == self.nth or (self.lasting and self.calls > self.nth):
                raise error
            return function(*arguments, **named)

        return call

    @contextmanager
    def during(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mmap, "mmap", self.around(mmap.mmap, OSError(12, "Cannot allocate memory")))
            patch.setattr(os, "open", self.around(os.open, OSError(24, "Too many open files")))
            for name in ("empty", "zeros", "ascontiguousarray", "concatenate"):
                patch.setattr(np, name, self.around(getattr(np, name), MemoryError("injected")))
            for name in ("prepare_embedding", "prepare_layer", "prepare_head", "allocate_kv"):
                method = getattr(CpuBackend, name)
                patch.setattr(CpuBackend, name, self.around(method, MemoryError("injected")))
            yield


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
@pytest.mark.parametrize("stage", PLACES, indirect=True)
def test_out_of_memory_at_any_point_of_a_load_leaves_nothing(stage: Stage, lasting: bool) -> None:
    want = stage.cycle()
    counted = OutOfMemory(0, False)
    with counted.during():
        stage.load()
    stage.unload()
    assert counted.calls > 3 * LAYERS
    for nth in range(1, 4):  # messages, tracebacks' code: made once
        fail(stage, OutOfMemory(nth, lasting))
    before = Held.now(stage.path)
    failed = sum(fail(stage, OutOfMemory(nth, lasting)) for nth in range(1, counted.calls + 1))
    check_back(before, stage.path, counted.calls)
    assert failed if lasting else failed < counted.calls  # memory that is there a moment later is used
    assert torch.equal(want, stage.cycle())


def fail(stage: Stage, memory: OutOfMemory) -> bool:
    try:
        with memory.during():
            stage.load()
        stage.unload()
    except (PipeLLMError, OSError):
        stage.backends.clear()
        assert stage.service._loaded is None
        return True
    return False


def test_files_are_opened_all_or_none(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A split model has several: the second one fails."""
    split = path.parent / "split.gguf"
    split.write_bytes(path.read_bytes())
    layouts, specs, file = _layouts(path)
    tensors = next(iter(layouts.values())).tensors
    first = next(iter(tensors))
    tensors[first] = _elsewhere(tensors[first], split)
    slots = [np.zeros(max(one.nbytes for one in layouts.values()), np.uint8)]
    before = len(os.listdir("/proc/self/fd"))
    with OutOfMemory(2, True).during(), pytest.raises(OSError, match="open files"):
        ReadAhead(layouts, slots, False)
    assert len(os.listdir("/proc/self/fd")) == before
    with OutOfMemory(1, True).during(), pytest.raises(OSError, match="open files"):
        LayerWindows(file, specs, 1 << 30)
    assert len(os.listdir("/proc/self/fd")) == before
    monkeypatch.setattr(threading.Thread, "start", _no_thread)
    with pytest.raises(RuntimeError, match="new thread"):
        ReadAhead(layouts, slots, False)
    assert len(os.listdir("/proc/self/fd")) == before


def test_pools_and_rings_leave_nothing(path: Path) -> None:
    """What streams weights to a GPU, but for the GPU."""
    layouts, _, file = _layouts(path)
    largest = max(layout.nbytes for layout in layouts.values())
    registered: set[int] = set()

    def register(address: int, nbytes: int, flags: int) -> tuple[int]:
        registered.add(address)
        return (0,)

    driver: Any = SimpleNamespace(cuMemHostRegister=register, cuMemHostUnregister=registered.remove)

    def cycle(read: bool) -> None:
        pool = HostPool(3 * (largest + mmap.PAGESIZE), driver)
        ring = ReadAhead(layouts, [pool.take(largest) for _ in range(3)], False)
        for layer in layouts:
            ring.request(layer)
        if read:  # else it is closed in the middle of reading
            for layer in layouts:
                assert ring.take(layer, True) is not None
                ring.give_back(None)
        ring.close()
        pool.close()

    for _ in range(3):
        cycle(True)
    before = Held.now(path)
    for number in range(CYCLES):
        cycle(number % 2 == 0)
    assert not registered
    with OutOfMemory(1, True).during(), pytest.raises(OutOfCapacityError, match="lower pinned_memory"):
        HostPool(largest, driver)
    after = Held.now(path)
    assert (after.files, after.threads) == (before.files, before.threads)
    assert after.anonymous <= before.anonymous + 4 and after.resident_bytes < before.resident_bytes + (
        8 << 20
    )
    file.close()


def _layouts(path: Path) -> tuple[dict[int, BlobLayout], Any, GGUFFile]:
    file = GGUFFile.open(path)
    layouts = {}
    specs = build_spec(file, 128).layers
    for layer in specs:
        raw = raw_tensors(file, tensor_refs(layer))
        layout = BlobLayout.of(file, raw, [ref for ref in raw if len(raw[ref].shape) > 1])
        layouts[layer.index] = BlobLayout(dict(layout.tensors), layout.nbytes)
    return layouts, specs, file


def _elsewhere(tensor: Any, path: Path) -> Any:
    return type(tensor)(tensor.raw, path, tensor.file_offset, tensor.offset)


def _no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
