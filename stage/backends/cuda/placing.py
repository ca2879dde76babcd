"""Decides, before a GPU stage's layers are prepared, where each of them will lie: budgets and rates of this
machine, made into what `stage.placement` chooses from."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from common.errors import ConfigError, OutOfCapacityError, UnsupportedModelError
from common.gguf.reader import GGUFFile
from common.log import get_logger
from common.sizes import gib
from stage.backends.base import make_batch
from stage.backends.cpu import abi
from stage.backends.cpu.backend import CpuBackend
from stage.backends.cpu.cores import usable_cores
from stage.backends.cuda.host_pool import BlobLayout, HostPool
from stage.backends.cuda.kv_cache import kv_bytes_per_token
from stage.backends.cuda.repack import packed_bytes
from stage.backends.cuda.streamed_weights import matrix_refs
from stage.backends.host_memory import host_memory_budget_bytes
from stage.backends.timing import active_share
from stage.memory_settings import MemorySettings, parse_amount, parse_places
from stage.model.spec import LayerSpec, MoeFfnSpec, tensor_refs
from stage.placement import (
    Budgets,
    LayerSize,
    PartSize,
    Place,
    Placement,
    Rates,
    choose,
    describe,
    measure,
)
from stage.weights.loader import raw_tensors

if TYPE_CHECKING:
    from stage.backends.cuda.backend import CudaBackend

_COPY_BYTES = 64 << 20
_READ_BYTES = 64 << 20
_RATE_BYTES = 1 << 30  # of weights that the host's rate is measured with
_PINNED_SHARE = 0.75  # of the host's budget, if nothing else is said
# Of what the GPU reads and multiplies at best, what decode and prefill reach (docs/gpu.md).
_DECODE_SHARE, _PREFILL_SHARE = 0.65, 0.45
_NO_HOST = 1.0  # bytes a second of a host that cannot compute the layers


@dataclass(frozen=True)
class Request:
    """What is to be placed: layers, with so much else on the GPU, and a KV cache."""

    file: GGUFFile
    layers: Sequence[LayerSpec]
    other_bytes: int  # of embedding and head
    kv_tokens: int


def place(backend: CudaBackend, request: Request, settings: MemorySettings) -> tuple[Placement, Rates] | None:
    """With the rates that it was chosen by. None: all layers stay on the GPU. Raises OutOfCapacityError where
    the budgets allow no placement."""
    sizes = [_size(request, layer) for layer in request.layers]
    free = backend.memory_budget_bytes() - request.other_bytes
    needed = sum(size.packed_bytes + size.kv_bytes for size in sizes)
    if settings.placement == "auto" and needed <= free:
        return None
    if not any(size.streamable for size in sizes):
        raise OutOfCapacityError(
            f"{gib(needed)} of layers and KV cache do not fit into {gib(free)} of GPU memory, and rows of "
            "each expert's matrix cannot be streamed by themselves: give this stage fewer layers"
        )
    host = host_budget_bytes(settings)
    pinned = parse_amount(settings.pinned_memory, host)
    budgets = Budgets(free, host, min(host, int(host * _PINNED_SHARE) if pinned is None else pinned))
    places = explicit_places(request.layers, settings.placement)
    rates = measure_rates(backend, request)
    placement = choose(sizes, budgets, rates) if places is None else measure(sizes, places, budgets, rates)
    get_logger().info(
        "placement", plan=describe(placement), link_gb_s=round(rates.link / 1e9, 1),
        host_gb_s=round(rates.host / 1e9, 1), file_gb_s=round(rates.file / 1e9, 1),
    )  # fmt: skip
    return placement, rates


def explicit_places(layers: Sequence[LayerSpec], setting: str) -> list[Place] | None:
    """What the setting says of these layers; None for auto.

    Raises ConfigError where it names the experts of a layer that has none."""
    if setting == "auto":
        return None
    named = parse_places(setting)
    places = [named.get(layer.index, Place.RESIDENT) for layer in layers]
    for layer, place in zip(layers, places, strict=True):
        if place.is_split and not isinstance(layer.ffn, MoeFfnSpec):
            raise ConfigError(f"placement: layer {layer.index} has no experts, so it cannot be {place.value}")
    return places


def host_budget_bytes(settings: MemorySettings) -> int:
    free = host_memory_budget_bytes()
    stated = parse_amount(settings.host_memory, free)
    return free if stated is None else stated


def _size(request: Request, layer: LayerSpec) -> LayerSize:
    raw = raw_tensors(request.file, tensor_refs(layer))
    streamable = True

    def part(experts_only: bool, share: float) -> PartSize:
        nonlocal streamable
        refs = matrix_refs(layer, experts_only)
        packed = sum(
            int(np.prod(raw[ref].shape[:-2], dtype=np.int64))
            * packed_bytes(raw[ref].ggml_type, raw[ref].shape[-2], raw[ref].shape[-1])
            for ref in refs
        )
        try:
            return PartSize(packed, BlobLayout.of(request.file, raw, refs).nbytes, share)
        except UnsupportedModelError:
            streamable = False
            return PartSize(packed, packed, share)

    ffn = layer.ffn
    whole = part(False, active_share(request.file, layer))
    experts = (
        part(True, ffn.num_experts_used / ffn.num_experts) if isinstance(ffn, MoeFfnSpec) else PartSize()
    )
    kv_bytes = kv_bytes_per_token(layer) * request.kv_tokens
    return LayerSize(
        whole.packed_bytes, whole.raw_bytes, kv_bytes, whole.active_share, streamable, experts
    )


# --- rates --------------------------------------------------------------------------------------------------


@torch.inference_mode()
def measure_rates(backend: CudaBackend, request: Request) -> Rates:
    """Takes about half a second."""
    from cuda.bindings import driver

    device = backend.device
    pool = HostPool(_COPY_BYTES, driver)
    try:
        source, target = pool.take(_COPY_BYTES), torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
        link = _Link(driver, source, target)
        alone = link.rate()
        host, host_beside, link_beside, batch_8 = _host_rates(request, link)
        halves = torch.randn((4096, 4096), device=device).half()
        product_s = _event_s(lambda: torch.mm(halves, halves))
        copy_s = _event_s(lambda: target.clone())
    finally:
        torch.cuda.synchronize(device)
        pool.close()
    layer = request.layers[len(request.layers) // 2]
    flops = (
        2
        * sum(int(np.prod(one.shape)) for one in raw_tensors(request.file, matrix_refs(layer)).values())
        * active_share(request.file, layer)
    )
    return Rates(
        link=alone,
        link_beside_host=min(link_beside, alone),
        host=host,
        host_beside_link=min(host_beside, host),
        gpu=_DECODE_SHARE * 2 * _COPY_BYTES / copy_s,
        gpu_prefill=_PREFILL_SHARE * 2 * 4096**3 / product_s / flops,
        file=_file_rate(request),
        host_batch_8=batch_8,
    )


def link_rate(device: torch.device) -> float:
    """Bytes a second from pinned memory to the GPU, with nothing else to do."""
    from cuda.bindings import driver

    target = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)  # makes the context, if none is there
    pool = HostPool(_COPY_BYTES, driver)
    try:
        return _Link(driver, pool.take(_COPY_BYTES), target).rate()
    finally:
        torch.cuda.synchronize(device)
        pool.close()


class _Link:
    """Copies to the GPU, timed, or over and over in the background."""

    def __init__(self, driver: object, source: np.ndarray, target: torch.Tensor) -> None:
        self._driver, self._source, self._target = driver, source, target
        self._stream = torch.cuda.Stream(target.device)

    def copy(self, times: int) -> None:
        for _ in range(times):
            self._driver.cuMemcpyHtoDAsync(  # type: ignore[attr-defined]
                self._target.data_ptr(),
                self._source.ctypes.data,
                self._source.nbytes,
                self._stream.cuda_stream,
            )
        self._stream.synchronize()

    def rate(self) -> float:
        self.copy(1)
        started = time.perf_counter()
        self.copy(6)
        return 6 * self._source.nbytes / (time.perf_counter() - started)

    def beside(self, work: Callable[[], float]) -> tuple[float, float]:
        """What `work` returns while copies go on, and their rate meanwhile."""
        stop = threading.Event()
        copied = 0

        def copy() -> None:
            nonlocal copied
            while not stop.is_set():
                self.copy(2)
                copied += 2

        thread = threading.Thread(target=copy, name="link-rate")
        started = time.perf_counter()
        thread.start()
        try:
            result = work()
        finally:
            stop.set()
            thread.join()
        return result, copied * self._source.nbytes / (time.perf_counter() - started)


def _host_rates(request: Request, link: _Link) -> tuple[float, float, float, float]:
    """Bytes a second of the CPU engine, alone and beside the link; the link's rate beside it; and how many
    times longer it takes for 8 rows."""
    if abi.library() is None:
        return _NO_HOST, _NO_HOST, link.rate(), 1.0
    # More layers than the caches hold.
    specs = request.layers[: max(4, int(_RATE_BYTES / _size(request, request.layers[0]).raw_bytes))]
    cpu = CpuBackend(max(1, len(usable_cores()) - 1))
    try:
        raws = [raw_tensors(request.file, tensor_refs(spec)) for spec in specs]
        layers = [cpu.prepare_layer(spec, raw) for spec, raw in zip(specs, raws, strict=True)]
        nbytes = sum(tensor.nbytes for raw in raws for tensor in raw.values())
        kv = cpu.allocate_kv(specs, 8, 16)
        hidden_size = specs[0].attention.norm.size

        def seconds(rows: int, repeats: int) -> float:
            batch = make_batch([(0, 1, np.asarray([i], np.int32)) for i in range(rows)], 16)
            hidden_states = torch.randn((rows, hidden_size), generator=torch.Generator().manual_seed(0))
            times = []
            for _ in range(repeats):
                started = time.perf_counter()
                for layer in layers:
                    cpu.run_layer(layer, kv, batch, hidden_states)
                times.append(time.perf_counter() - started)
            return statistics.median(times)

        seconds(1, 1)  # reads the pages
        one, eight = seconds(1, 5), seconds(8, 1)
        beside, link_beside = link.beside(lambda: seconds(1, 5))
    except UnsupportedModelError:
        return _NO_HOST, _NO_HOST, link.rate(), 1.0
    finally:
        cpu.close()
    active = nbytes * active_share(request.file, specs[0])
    return active / one, active / beside, link_beside, max(1.0, eight / one)


def _file_rate(request: Request) -> float:
    """Bytes a second that several threads read from the file, from the page cache or not."""
    raw = raw_tensors(request.file, matrix_refs(request.layers[-1]))
    largest = max(raw, key=lambda ref: raw[ref].nbytes)
    info = request.file.tensors[largest.name]
    pieces = [
        (start, min(4 << 20, info.nbytes - start))
        for start in range(0, min(info.nbytes, _READ_BYTES), 4 << 20)
    ]
    into = [np.ones(size, np.uint8) for _, size in pieces]  # touched, as the ring's slots are
    file = os.open(request.file.paths[info.part], os.O_RDONLY)
    try:
        started = time.perf_counter()
        with ThreadPoolExecutor(4) as readers:
            list(
                readers.map(
                    lambda i: os.preadv(file, [into[i].data], info.offset + pieces[i][0]), range(len(pieces))
                )
            )
        return sum(size for _, size in pieces) / (time.perf_counter() - started)
    finally:
        os.close(file)


def _event_s(run: Callable[[], object]) -> float:
    run()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(8):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 8e3
