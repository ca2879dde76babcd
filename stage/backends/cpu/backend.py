"""The backend that computes on the file's own quantised bytes with the native kernels.

It owns the prepared plans, the native engine and its threads; how a layer is computed is in native/. Each
call releases Python's lock while it runs, and calls from several threads take turns.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.errors import ConfigError, InvalidRequestError, OutOfCapacityError, UnsupportedModelError
from common.gguf.reader import GGUFFile
from common.log import get_logger
from common.sizes import gib
from stage.backends.base import Batch, HostSampling, RawTensors
from stage.backends.cpu import abi
from stage.backends.cpu.cores import shared_by, usable_cores
from stage.backends.cpu.kv_cache import CpuKvCache, bytes_per_token, check_kv_dtype
from stage.backends.cpu.layer_range import LayerRange, NativeBatch
from stage.backends.cpu.plan import (
    Head,
    Layer,
    Plan,
    build_head,
    build_layer,
    check_layer,
    embedding_matrix,
)
from stage.backends.cpu.windows import LayerWindows, layer_bytes, least_bytes
from stage.backends.host_memory import host_memory_budget_bytes
from stage.model.spec import EmbeddingSpec, HeadSpec, LayerSpec, ModelSpec, SpecPart
from stage.weights.quants import RawTensor

ACCURACIES = ("fast", "exact")
_FROM_FILE_BYTES = 1 << 50  # the file is the limit
# Forces a kernel variant (one of `variants()`), to test the lower ones on a CPU that has a higher one.
VARIANT_VARIABLE = "PIPELLM_CPU_VARIANT"


def variants() -> list[str]:
    """The kernel variants this CPU runs, best first; empty where the native library was not built."""
    library = abi.library()
    return [] if library is None else library.pipellm_variants().decode().split()


@dataclass(frozen=True)
class Embedding:
    matrix: Plan
    vocab_size: int
    hidden_size: int
    scale: float


class CpuBackend(HostSampling):
    """Native kernels on the weights as they lie in the mapped file.

    `threads`: None or 0 for one a physical core available to the process, and an equal part of them while
    other processes compute there; else so many, always. `accuracy`: "exact" multiplies by 16-bit activations
    everywhere; "fast" by 8-bit ones where 16 would hold up a step (docs/cpu.md).
    `kv_dtype`: "f16", "q8_0" or "f32". `memory_bytes`: what weights and KV cache may take; 0: what is free.

    Raises ConfigError for an option out of its range, or where the native library was not built.
    """

    name = "cpu"
    device = torch.device("cpu")

    def __init__(
        self,
        threads: int | None = None,
        accuracy: str = "fast",
        kv_dtype: str = "f16",
        memory_bytes: int = 0,
        variant: str | None = None,
    ) -> None:
        library = abi.library()
        if library is None:
            raise ConfigError(
                "the native CPU backend was not built when this was installed (it needs g++, GCC 11 or "
                "newer): install one and run pip install again, or use --backend reference"
            )
        if accuracy not in ACCURACIES:
            raise ConfigError(f"accuracy is {accuracy!r}, expected one of {', '.join(ACCURACIES)}")
        check_kv_dtype(kv_dtype)
        self._library = library
        self.kv_dtype = kv_dtype
        self.accuracy = accuracy
        self._memory_bytes = memory_bytes
        self.variant = _chosen_variant(variant or os.environ.get(VARIANT_VARIABLE))
        cores = usable_cores()
        self.threads = threads or len(cores)
        # One hardware thread of each core; more threads than that go anywhere the process may.
        cpus = np.array(cores if self.threads <= len(cores) else [], np.int32)
        share = "" if threads else shared_by(cores)
        self._engine: int | None = library.pipellm_create(
            self.variant.encode(), self.threads, abi.address(cpus), len(cpus), share.encode(),
            accuracy == "exact",
        )  # fmt: skip
        # torch's own pool would spin against ours after every operation of the sampler's.
        torch.set_num_threads(1)
        self._batch: NativeBatch | None = None
        self._windows: LayerWindows | None = None  # where not all layers fit into memory

    def check(self, spec: ModelSpec) -> None:
        for layer in spec.layers:
            check_layer(layer)

    def stored_bytes(self, part: SpecPart, raw: RawTensors) -> int:
        """The file's own pages, and float32 copies of norms and biases."""
        return sum(_stored_bytes(tensor) for tensor in raw.values())

    def kv_bytes_per_token(self, layer: LayerSpec) -> int:
        return bytes_per_token(layer, self.kv_dtype)

    def memory_budget_bytes(self) -> int:
        return self._memory_bytes or host_memory_budget_bytes()

    def offload_budget_bytes(self) -> int:
        return _FROM_FILE_BYTES

    def place(self, file: GGUFFile, layers: Sequence[LayerSpec], other_bytes: int, kv_tokens: int) -> bool:
        """Layers that do not fit into memory are computed from the file, some at a time."""
        sizes = [layer_bytes(file, layer) for layer in layers]
        kv_bytes = kv_tokens * sum(self.kv_bytes_per_token(layer) for layer in layers)
        room = self.memory_budget_bytes() - other_bytes - kv_bytes
        if sum(sizes) <= room:
            return False
        if room < least_bytes(sizes):
            raise OutOfCapacityError(
                f"{gib(other_bytes)} of weights outside the layers, {gib(kv_bytes)} of KV cache and "
                f"{gib(least_bytes(sizes))} for layers on their way do not fit into "
                f"{gib(self.memory_budget_bytes())} of memory: lower the context length, or give this stage "
                "more memory"
            )
        self._windows = LayerWindows(file, layers, room)
        get_logger().warning(
            "layers_from_file", layers=len(self._windows.windowed), of=len(layers),
            reason="they do not fit into memory: each is read again for every step",
        )  # fmt: skip
        return True

    def prepare_embedding(self, spec: EmbeddingSpec, raw: RawTensors) -> Embedding:
        self._check_types(raw.values())
        vocab_size, hidden_size = raw[spec.weight].shape
        return Embedding(embedding_matrix(raw[spec.weight]), vocab_size, hidden_size, spec.scale)

    def prepare_layer(self, spec: LayerSpec, raw: RawTensors) -> Layer:
        self._check_types(raw.values())
        return build_layer(spec, raw)

    def prepare_head(self, spec: HeadSpec, raw: RawTensors) -> Head:
        self._check_types(raw.values())
        return build_head(spec, raw)

    def allocate_kv(self, layers: Sequence[LayerSpec], num_blocks: int, block_size: int) -> CpuKvCache:
        return CpuKvCache(layers, num_blocks, block_size, self.kv_dtype)

    def embed(self, embedding: Embedding, token_ids: np.ndarray) -> torch.Tensor:
        ids = np.ascontiguousarray(token_ids, np.int32)
        out = torch.empty((len(ids), embedding.hidden_size), dtype=torch.float32)
        status = self._library.pipellm_embed(
            self._engine,
            embedding.matrix.address,
            abi.address(ids),
            len(ids),
            embedding.scale,
            out.data_ptr(),
        )
        if status:
            raise InvalidRequestError(f"token ids must lie in [0, {embedding.vocab_size}); there are others")
        return out

    def run_layer(
        self, layer: Layer, kv: CpuKvCache, batch: Batch, hidden_states: torch.Tensor
    ) -> torch.Tensor:
        """Works in place where `hidden_states` is contiguous."""
        hidden_states = hidden_states.contiguous()
        if self._windows is not None:
            self._windows.entering(layer.index)
        self._run(LayerRange([layer], kv), batch, hidden_states)
        if self._windows is not None:
            self._windows.leaving(layer.index)
        return hidden_states

    def run_feed_forward(self, layer: Layer, hidden_states: torch.Tensor) -> None:
        """The layer without its attention: float32 [rows, hidden_size], contiguous, changed in place."""
        rows = len(hidden_states)
        if self._library.pipellm_run_feed_forward(
            self._engine, layer.plan.address, hidden_states.data_ptr(), rows
        ):
            raise OutOfCapacityError(f"no memory for the activations of {rows} rows: smaller chunks")

    def _run(self, layers: LayerRange, batch: Batch, hidden_states: torch.Tensor) -> None:
        native = self._batch  # kept by this call, whatever another thread runs meanwhile
        if native is None or native.batch is not batch:
            native = self._batch = NativeBatch(self._library, batch)
        layers.run(self._library, self._engine, native, hidden_states.data_ptr())

    def replayer(
        self, embedding: Embedding | None, layers: Sequence[Layer], kv: CpuKvCache, max_context: int
    ) -> CpuReplayer | None:
        """None where layers come from the file one by one."""
        return CpuReplayer(self, embedding, LayerRange(layers, kv)) if self._windows is None else None

    def logits(self, head: Head, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = hidden_states.contiguous()
        rows = len(hidden_states)
        out = torch.empty((rows, head.vocab_size), dtype=torch.float32)
        status = self._library.pipellm_logits(
            self._engine,
            head.norm.address,
            head.output.address,
            head.logit_softcap,
            hidden_states.data_ptr(),
            rows,
            out.data_ptr(),
        )
        if status:
            raise OutOfCapacityError(f"no memory for the activations of {rows} rows: smaller chunks")
        return out

    def close(self) -> None:
        """Ends the engine's threads."""
        if self._engine is not None:
            self._library.pipellm_destroy(self._engine)
            self._engine = None
            self._batch = None
        if self._windows is not None:
            self._windows.close()
            self._windows = None

    def _check_types(self, tensors: Iterable[RawTensor]) -> None:
        for tensor in tensors:
            if not self._library.pipellm_supports(int(tensor.ggml_type)):
                raise UnsupportedModelError(
                    f"tensor type {tensor.ggml_type.name} is not supported by the native CPU backend"
                )


class CpuReplayer:
    """A range of layers in one call."""

    def __init__(self, backend: CpuBackend, embedding: Embedding | None, layers: LayerRange) -> None:
        self._backend, self._embedding, self._layers = backend, embedding, layers

    def takes(self, batch: Batch) -> bool:
        return True

    def run(self, batch: Batch, inputs: np.ndarray | torch.Tensor) -> torch.Tensor:
        if self._embedding is not None and isinstance(inputs, np.ndarray):
            hidden_states = self._backend.embed(self._embedding, inputs)
        else:
            hidden_states = torch.as_tensor(inputs).contiguous()
        self._backend._run(self._layers, batch, hidden_states)
        return hidden_states


def _chosen_variant(asked: str | None) -> str:
    available = variants()
    if asked is None:
        return available[0]
    if asked not in available:
        raise ConfigError(
            f"{VARIANT_VARIABLE} (or variant) is {asked!r}; this CPU runs {', '.join(available)}"
        )
    return asked


def _stored_bytes(raw: RawTensor) -> int:
    return raw.nbytes if len(raw.shape) > 1 else raw.nbytes + 4 * raw.shape[0]
