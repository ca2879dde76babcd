"""Rates of a GPU that plans and profiles go by: how fast it reads memory, how long a layer takes."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import torch

from stage.backends.base import Batch
from stage.backends.cuda.backend import CudaBackend
from stage.backends.cuda.forward import Rows
from stage.backends.cuda.kv_cache import CudaKvCache
from stage.backends.cuda.launch import Kernels
from stage.backends.cuda.weights import Head, Layer

_READ_BYTES = 4 << 30
_EVICT_BYTES = 128 << 20  # more than the caches hold
_REPEATS, _SECONDS = 8, 0.3


class _ReadArgs(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("out", ctypes.c_void_p), ("count", ctypes.c_uint64)]


def read_bytes_per_s(kernels: Kernels) -> float:
    """The memory's read rate: the best of many passes over far more than the caches hold."""
    free, _ = torch.cuda.mem_get_info(kernels.device)
    size = min(_READ_BYTES, free // 2 // 4096 * 4096)
    data = torch.empty(size, dtype=torch.uint8, device=kernels.device).random_()
    out = torch.zeros(1, dtype=torch.int32, device=kernels.device)
    args = _ReadArgs(data.data_ptr(), out.data_ptr(), size // 16)
    best = min(
        events_s(
            lambda b=blocks: kernels.launch(  # type: ignore[misc]
                "read.cu", "read_memory", (b * kernels.num_multiprocessors, 1, 1), 512, args
            )
        )
        for blocks in (2, 4, 8)
        for _ in range(5)
    )
    return size / best


@torch.inference_mode()
def layer_s(backend: CudaBackend, layer: Layer, kv: CudaKvCache, batch: Batch) -> float:
    """Seconds of a decode step through one layer, as a graph runs it."""
    rows = Rows.of(batch, backend.device)
    hidden_states = torch.randn((batch.num_rows, layer.norm.weight.numel()), device=backend.device)
    return _from_memory_s(backend.kernels, lambda: backend.forward.layer(layer, kv, rows, hidden_states))


@torch.inference_mode()
def head_s(backend: CudaBackend, head: Head) -> float:
    """Seconds of the head for one row, likewise."""
    hidden_states = torch.randn((1, head.norm.weight.numel()), device=backend.device)
    return _from_memory_s(backend.kernels, lambda: backend.forward.logits(head, hidden_states))


def _from_memory_s(kernels: Kernels, run: Callable[[], object]) -> float:
    """Seconds of `run` in a graph, its weights out of the caches. An average over many runs: where another
    process computes on the same GPU in turns, that counts."""
    evicted = torch.zeros(_EVICT_BYTES, dtype=torch.uint8, device=kernels.device)
    out = torch.zeros(1, dtype=torch.int32, device=kernels.device)
    args = _ReadArgs(evicted.data_ptr(), out.data_ptr(), _EVICT_BYTES // 16)

    def steps(times: int) -> None:
        for _ in range(_REPEATS):
            kernels.launch("read.cu", "read_memory", (4 * kernels.num_multiprocessors, 1, 1), 512, args)
            for _ in range(times):
                run()

    steps(1)
    torch.cuda.synchronize(kernels.device)
    graphs = [capture(lambda n=n: steps(n)) for n in (0, 1)]  # type: ignore[misc]
    sums = [0.0, 0.0]
    count, started = 0, time.perf_counter()
    while count < 5 or time.perf_counter() - started < _SECONDS:
        for index, graph in enumerate(graphs):
            sums[index] += events_s(graph.replay)
        count += 1
    return max(sums[1] - sums[0], 0.0) / (count * _REPEATS)


def capture(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph


def events_s(run: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3
