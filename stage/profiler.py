"""Measures what a model costs on this stage's device, for the coordinator's plan.

One layer stands for all: it is loaded, timed and dropped. The head is timed on a GPU, where it loads fast; on
a host, and where it does not fit, it is estimated at the rate at which that layer's weights went by.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch

from common.gguf.reader import GGUFFile
from protos import stage_pb2
from stage.backends.base import Backend, make_batch
from stage.backends.timing import active_share
from stage.model.spec import LayerSpec, ModelSpec, SpecPart, tensor_refs
from stage.weights.loader import raw_tensors

_CONTEXT = 64
_KV_BLOCK_SIZE = 16
_MIN_RUNS, _MAX_RUNS, _MAX_S = 5, 11, 0.5
# Read between two runs, so that weights come from memory, as they do when a whole model goes by: more than
# most caches hold, and little enough that a load does not wait for it.
_EVICT_BYTES = 64 << 20


def measure(backend: Backend, file: GGUFFile, spec: ModelSpec) -> stage_pb2.ProfileResponse:
    """Times one middle layer on `backend` and counts bytes as the backend would store them."""
    budget_bytes = backend.memory_budget_bytes()  # before torch keeps memory of the measurement's own
    offload_bytes = backend.offload_budget_bytes()
    layer = spec.layers[len(spec.layers) // 2]
    decode_s = _time_layer(backend, file, spec, layer)
    active_bytes = _stored_bytes(backend, file, layer) * active_share(file, layer)
    head_bytes = _stored_bytes(backend, file, spec.head)
    embedding_bytes = _stored_bytes(backend, file, spec.embedding)
    s_per_byte = decode_s / active_bytes
    return stage_pb2.ProfileResponse(
        fingerprint=file.fingerprint,
        num_layers=len(spec.layers),
        context_length=spec.context_length,
        layer_decode_s=decode_s,
        embedding_s=embedding_bytes / spec.vocab_size * s_per_byte,
        head_s=_time_head(backend, file, spec, budget_bytes, head_bytes) or head_bytes * s_per_byte,
        layer_weight_bytes=[_stored_bytes(backend, file, layer) for layer in spec.layers],
        layer_kv_bytes_per_token=[backend.kv_bytes_per_token(layer) for layer in spec.layers],
        embedding_bytes=embedding_bytes,
        head_bytes=head_bytes,
        memory_budget_bytes=budget_bytes,
        offload_budget_bytes=offload_bytes,
    )


@torch.inference_mode()
def _time_layer(backend: Backend, file: GGUFFile, spec: ModelSpec, layer: LayerSpec) -> float:
    """Seconds of a forward of one row, at position `_CONTEXT`, through a layer: the median by the host's
    clock, or what a GPU takes in a graph, where the host has no part."""
    prepared = backend.prepare_layer(layer, raw_tensors(file, tensor_refs(layer)))
    num_blocks = _CONTEXT // _KV_BLOCK_SIZE + 1
    kv = backend.allocate_kv([layer], num_blocks, _KV_BLOCK_SIZE)
    batch = make_batch([(_CONTEXT, 1, np.arange(num_blocks, dtype=np.int32))], _KV_BLOCK_SIZE)
    if backend.name == "cuda":
        from stage.backends.cuda import rates, weights

        if isinstance(prepared, weights.Layer):
            return rates.layer_s(backend, prepared, kv, batch)  # type: ignore[arg-type]
    hidden_states = torch.randn((1, spec.hidden_size), generator=torch.Generator().manual_seed(0))
    hidden_states = hidden_states.to(backend.device)
    evictor = torch.ones(_EVICT_BYTES // 4, device=backend.device)

    def seconds() -> float:
        rows = hidden_states.clone()
        evictor.sum().item()
        _synchronize(backend)
        started = time.perf_counter()
        backend.run_layer(prepared, kv, batch, rows)
        _synchronize(backend)
        return time.perf_counter() - started

    return _median(seconds)


def _time_head(
    backend: Backend, file: GGUFFile, spec: ModelSpec, budget_bytes: int, head_bytes: int
) -> float | None:
    """On a GPU: seconds of one row through the head. None where it is to be estimated."""
    if backend.name != "cuda" or 2 * head_bytes > budget_bytes:
        return None
    from stage.backends.cuda import rates

    head = backend.prepare_head(spec.head, raw_tensors(file, tensor_refs(spec.head)))
    return rates.head_s(backend, head)  # type: ignore[arg-type]


def _median(run: Callable[[], float]) -> float:
    run()  # warms up: memory, threads, kernels compiled at first use
    times: list[float] = []
    while len(times) < _MIN_RUNS or (len(times) < _MAX_RUNS and sum(times) < _MAX_S):
        times.append(run())
    return median(times)


def _synchronize(backend: Backend) -> None:
    if backend.device.type == "cuda":
        torch.cuda.synchronize(backend.device)


def _stored_bytes(backend: Backend, file: GGUFFile, part: SpecPart) -> int:
    return backend.stored_bytes(part, raw_tensors(file, tensor_refs(part)))
