"""The CUDA backend: a layer as a handful of fused kernels on the file's own quantised weights.

Operands of products are f16 (weights scaled by a power of two so that they cannot leave its range), sums, the
residual stream, norms and the softmax are float32, the KV cache is f16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch

from common.errors import PipeLLMError, UnsupportedModelError
from common.gguf.reader import GGUFFile
from common.log import get_logger
from stage.backends.base import Batch, RawTensors, StreamingCounters, make_batch
from stage.backends.cuda import kv_cache, placing
from stage.backends.cuda.decode import CudaDecoder, RangeGraphs
from stage.backends.cuda.forward import Forward, Rows, context_bucket
from stage.backends.cuda.kv_cache import HEAD_STRIDES, CudaKvCache
from stage.backends.cuda.launch import Kernels
from stage.backends.cuda.offload import OffloadedLayers
from stage.backends.cuda.pieces import AnyLayer
from stage.backends.cuda.repack import packed_bytes
from stage.backends.cuda.sampling import MAX_ROWS, RowSampler
from stage.backends.cuda.weights import Embedding, Head, Layer, WeightLoader
from stage.memory_settings import MemorySettings, parse_amount
from stage.model.spec import EmbeddingSpec, HeadSpec, LayerSpec, LinearSpec, ModelSpec, MoeFfnSpec, SpecPart
from stage.placement import Place, Placement
from stage.sampler import Drawn, SamplingOptions
from stage.weights.paging import let_go
from stage.weights.quants import RawTensor

Part = TypeVar("Part")

RESERVE_BYTES = 1280 << 20  # what a step needs beyond weights and KV: operands, scratch, graphs, the context

_WARM_ROWS = 128  # past the last row that the decode kernels take

_MAX_GROUP, _MAX_EXPERTS, _MAX_EXPERTS_USED = 16, 512, 64


class CudaBackend:
    name = "cuda"

    def __init__(
        self, device: torch.device, graphs: bool = True, memory: MemorySettings | None = None
    ) -> None:
        if not torch.cuda.is_available():
            raise PipeLLMError(
                "no usable NVIDIA GPU: torch finds no CUDA device (driver, or a build without CUDA)"
            )
        self.device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(self.device)
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self.kernels = Kernels(self.device)
        self.forward = Forward(self.kernels)
        self._weights: WeightLoader | None = WeightLoader(self.device)
        self._last: tuple[Batch, Rows] | None = None  # every layer of a step is run with the same batch
        self._use_graphs = graphs
        self.memory = memory or MemorySettings()
        self.placement: Placement | None = None  # chosen by `place`; None: all layers on the GPU
        self.offloaded: OffloadedLayers | None = None
        self._max_link_bytes_per_s = 0.0
        self._sampler: RowSampler | None = None

    # --- what it can do, and what that takes --------------------------------------------------------------

    def check(self, spec: ModelSpec) -> None:
        for layer in spec.layers:
            attention = layer.attention
            where = f"layer {layer.index} of {spec.architecture}"
            if attention.head_dim > HEAD_STRIDES[-1] or attention.head_dim % 8:
                raise UnsupportedModelError(
                    f"{where}: the CUDA backend knows head sizes up to {HEAD_STRIDES[-1]} in steps of 8, "
                    f"not {attention.head_dim}"
                )
            group = attention.num_heads // attention.num_kv_heads
            if group > _MAX_GROUP:
                raise UnsupportedModelError(
                    f"{where}: {group} heads share a KV head; the CUDA backend takes up to {_MAX_GROUP}"
                )
            if attention.q_norm and attention.k_norm and attention.q_norm.eps != attention.k_norm.eps:
                raise UnsupportedModelError(f"{where}: Q and K norms with different epsilons")
            ffn = layer.ffn
            if isinstance(ffn, MoeFfnSpec):
                if ffn.num_experts > _MAX_EXPERTS or ffn.num_experts_used > _MAX_EXPERTS_USED:
                    raise UnsupportedModelError(
                        f"{where}: {ffn.num_experts_used} of {ffn.num_experts} experts; the CUDA backend "
                        f"takes up to {_MAX_EXPERTS_USED} of {_MAX_EXPERTS}"
                    )
                if any(part.bias for part in (ffn.gate, ffn.up, ffn.down)):
                    raise UnsupportedModelError(f"{where}: the CUDA backend knows no biases of experts")
            for linear in _linears(layer):
                if linear.in_features % 4:
                    raise UnsupportedModelError(
                        f"{where}: {linear.weight.name} has rows of {linear.in_features} elements; the CUDA "
                        "backend needs a multiple of 4"
                    )

    def stored_bytes(self, part: SpecPart, raw: RawTensors) -> int:
        return sum(_stored_bytes(tensor) for tensor in raw.values())

    def kv_bytes_per_token(self, layer: LayerSpec) -> int:
        return kv_cache.kv_bytes_per_token(layer)

    def memory_budget_bytes(self) -> int:
        torch.cuda.empty_cache()  # what torch keeps for later is free, too
        free, total = torch.cuda.mem_get_info(self.device)
        stated = parse_amount(self.memory.gpu_memory, total)
        return max(0, (free if stated is None else min(free, stated)) - RESERVE_BYTES)

    def offload_budget_bytes(self) -> int:
        return self.memory_budget_bytes() + placing.host_budget_bytes(self.memory)

    def place(self, file: GGUFFile, layers: Sequence[LayerSpec], other_bytes: int, kv_tokens: int) -> bool:
        placed = placing.place(self, placing.Request(file, layers, other_bytes, kv_tokens), self.memory)
        if placed is None:
            self.placement = None
            return False
        placement, rates = placed
        self.placement, self._max_link_bytes_per_s = placement, rates.link
        few, many = (
            {layer.index: place for layer, place in zip(layers, places, strict=True)}
            for places in (placement.places, placement.batch_places)
        )
        self.offload(file, layers, few, many, placement.pinned_bytes)
        return True

    def offload(
        self,
        file: GGUFFile,
        layers: Sequence[LayerSpec],
        places: Mapping[int, Place],
        batch_places: Mapping[int, Place],
        pinned_bytes: int,
        host_threads: int = 0,
        prefetch: bool = True,
    ) -> None:
        """Says, before any layer is prepared, where the layers' weights will lie (by global layer number): in
        steps of few rows, and in larger ones.

        Takes the pinned memory and the slots on the GPU. Raises UnsupportedModelError for a layer that cannot
        be streamed, OutOfCapacityError where the pinned memory is too small or not to be had."""
        if any(places[layer.index] != Place.RESIDENT for layer in layers):
            self.offloaded = OffloadedLayers(
                self.forward, file, layers, places, batch_places, pinned_bytes, host_threads, prefetch
            )

    # --- weights and cache --------------------------------------------------------------------------------

    @property
    def _loader(self) -> WeightLoader:
        if self._weights is None:
            raise PipeLLMError("the CUDA backend was closed")
        return self._weights

    def prepare_embedding(self, spec: EmbeddingSpec, raw: RawTensors) -> Embedding:
        return _uploaded(self._loader.embedding(spec, raw), raw)

    def prepare_layer(self, spec: LayerSpec, raw: RawTensors) -> AnyLayer:
        if self.offloaded is not None and self.offloaded.places[spec.index] != Place.RESIDENT:
            return _uploaded(self.offloaded.prepare(spec, raw), raw)
        return _uploaded(self._loader.layer(spec, raw), raw)

    def prepare_head(self, spec: HeadSpec, raw: RawTensors) -> Head:
        return _uploaded(self._loader.head(spec, raw), raw)

    def allocate_kv(self, layers: Sequence[LayerSpec], num_blocks: int, block_size: int) -> CudaKvCache:
        if self.offloaded is not None:
            return self.offloaded.allocate_kv(layers, num_blocks, block_size)
        return CudaKvCache(layers, num_blocks, block_size, self.device)

    # --- steps --------------------------------------------------------------------------------------------

    def embed(self, embedding: Embedding, token_ids: np.ndarray) -> torch.Tensor:
        torch.cuda.set_device(self.device)  # kernels are launched in the calling thread's context
        tokens = torch.from_numpy(np.ascontiguousarray(token_ids, dtype=np.int32)).to(self.device)
        return self.forward.embed(embedding, tokens)

    def run_layer(
        self, layer: AnyLayer, kv: CudaKvCache, batch: Batch, hidden_states: torch.Tensor
    ) -> torch.Tensor:
        if self._last is None or self._last[0] is not batch:
            torch.cuda.set_device(self.device)
            self._last = (batch, Rows.of(batch, self.device))
            if self.offloaded is not None:
                self.offloaded.begin(batch)
        hidden_states = hidden_states.to(self.device).contiguous()
        if isinstance(layer, Layer):
            self.forward.layer(layer, kv, self._last[1], hidden_states)
        elif self.offloaded is not None:
            self.offloaded.run(layer, kv, batch, self._last[1], hidden_states)
        if self.offloaded is not None:
            self.offloaded.ran(layer.spec.index)
        return hidden_states

    def logits(self, head: Head, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.forward.logits(head, hidden_states.to(self.device).contiguous())

    def sample(
        self,
        logits: torch.Tensor,
        options: Sequence[SamplingOptions],
        histories: Sequence[Sequence[int]],
    ) -> list[Drawn]:
        longest = max(map(len, histories))
        if self._sampler is None or self._sampler.max_history < longest:
            room = context_bucket(longest)
            self._sampler = RowSampler(self.kernels, logits.shape[1], room)
        drawn: list[Drawn] = []
        for start in range(0, len(options), MAX_ROWS):
            rows = slice(start, start + MAX_ROWS)
            drawn += self._sampler.sample(logits[rows], options[rows], histories[rows])
        return drawn

    def decoder(
        self,
        embedding: Embedding,
        layers: Sequence[AnyLayer],
        head: Head,
        kv: CudaKvCache,
        max_context: int,
    ) -> CudaDecoder:
        self._warm(embedding, layers, kv)
        decoder = CudaDecoder(self, embedding, layers, head, kv, max_context, self._use_graphs)
        decoder.warm()
        self._keep_pace()
        return decoder

    def replayer(
        self, embedding: Embedding | None, layers: Sequence[AnyLayer], kv: CudaKvCache, max_context: int
    ) -> RangeGraphs | None:
        self._warm(embedding, layers, kv)
        self._keep_pace()
        return RangeGraphs(self, embedding, layers, kv, max_context) if self._use_graphs else None

    @torch.inference_mode()
    def _warm(self, embedding: Embedding | None, layers: Sequence[AnyLayer], kv: CudaKvCache) -> None:
        """A prompt through all layers, so that the first one of a user waits for no compiler and no library.
        What it leaves in the cache nobody reads."""
        num_rows = min(_WARM_ROWS, kv.num_blocks * kv.block_size)
        table = np.arange(-(-num_rows // kv.block_size), dtype=np.int32)
        batch = make_batch([(0, num_rows, table)], kv.block_size)
        if embedding is not None:
            hidden_states = self.embed(embedding, np.zeros(num_rows, np.int32))
        else:
            shape = (num_rows, layers[0].spec.attention.output.out_features)
            hidden_states = torch.zeros(shape, dtype=torch.float32, device=self.device)
        for layer in layers:
            hidden_states = self.run_layer(layer, kv, batch, hidden_states)

    def _keep_pace(self) -> None:
        if self.offloaded is not None:
            self.offloaded.keep_pace(self.placement.prediction if self.placement is not None else None)

    def streaming(self) -> StreamingCounters | None:
        offloaded = self.offloaded  # another thread may close it
        if offloaded is None:
            return None
        return replace(offloaded.counters, max_link_bytes_per_s=self._max_link_bytes_per_s)

    def close(self) -> None:
        offloaded, self.offloaded = self.offloaded, None
        self._weights = None
        self._last = self._sampler = None
        try:
            if offloaded is not None:
                offloaded.close()
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        except torch.AcceleratorError as error:  # broken before: who noticed has said so
            get_logger().warning("gpu_memory_not_freed", reason=str(error).partition("\n")[0])


def _uploaded(part: Part, raw: RawTensors) -> Part:
    """The part, of whose pages in the mapped file this process need hold none any more."""
    for tensor in raw.values():
        if tensor.data.flags.c_contiguous:
            let_go(tensor.data)
    return part


def _linears(layer: LayerSpec) -> list[LinearSpec]:
    attention, ffn = layer.attention, layer.ffn
    return [attention.q, attention.k, attention.v, attention.output, ffn.gate, ffn.up, ffn.down]


def _stored_bytes(raw: RawTensor) -> int:
    if len(raw.shape) == 1:
        return 4 * raw.shape[0]
    stacked = int(np.prod(raw.shape[:-2], dtype=np.int64))
    return stacked * packed_bytes(raw.ggml_type, raw.shape[-2], raw.shape[-1])
