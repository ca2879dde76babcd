"""The reference backend's calls: weights to float32 tensors, and layers in order of their definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.errors import InvalidRequestError
from common.gguf.reader import GGUFFile
from stage.backends.base import Batch, HostSampling, RawTensors
from stage.backends.host_memory import host_memory_budget_bytes
from stage.backends.reference.attention import Attention
from stage.backends.reference.ffn import DenseFfn, MoeFfn
from stage.backends.reference.kv_cache import ReferenceKvCache, bytes_per_token
from stage.backends.reference.ops import ACTIVATIONS, Linear, RmsNorm, Rope, softcap
from stage.model.rope import rope_table
from stage.model.spec import (
    AttentionSpec,
    DenseFfnSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    LinearSpec,
    ModelSpec,
    MoeFfnSpec,
    NormSpec,
    RopeSpec,
    SpecPart,
    TensorRef,
)
from stage.weights.quants import RawTensor, dequantize

_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Embedding:
    raw: RawTensor  # [vocab_size, hidden_size], as in the file: rows are dequantised as they are looked up
    scale: float


@dataclass(frozen=True)
class Layer:
    attention: Attention
    ffn: DenseFfn | MoeFfn


@dataclass(frozen=True)
class Head:
    norm: RmsNorm
    output: Linear
    logit_softcap: float | None


class ReferenceBackend(HostSampling):
    """Float32 on the CPU. `memory_bytes`: what weights and KV cache may take; 0: what the host has free."""

    name = "reference"
    device = torch.device("cpu")

    def __init__(self, memory_bytes: int = 0) -> None:
        self._memory_bytes = memory_bytes

    def check(self, spec: ModelSpec) -> None:
        """Every spec can be run."""

    def stored_bytes(self, part: SpecPart, raw: RawTensors) -> int:
        if isinstance(part, EmbeddingSpec):
            return raw[part.weight].nbytes
        return sum(int(np.prod(tensor.shape)) * _FLOAT_BYTES for tensor in raw.values())

    def kv_bytes_per_token(self, layer: LayerSpec) -> int:
        return bytes_per_token(layer)

    def memory_budget_bytes(self) -> int:
        return self._memory_bytes or host_memory_budget_bytes()

    def offload_budget_bytes(self) -> int:
        return 0

    def place(self, file: GGUFFile, layers: Sequence[LayerSpec], other_bytes: int, kv_tokens: int) -> bool:
        return False

    def prepare_embedding(self, spec: EmbeddingSpec, raw: RawTensors) -> Embedding:
        return Embedding(raw[spec.weight], spec.scale)

    def prepare_layer(self, spec: LayerSpec, raw: RawTensors) -> Layer:
        return Layer(_attention(spec.attention, spec.index, raw), _ffn(spec.ffn, raw))

    def prepare_head(self, spec: HeadSpec, raw: RawTensors) -> Head:
        return Head(_norm(spec.norm, raw), _linear(spec.output, raw), spec.logit_softcap)

    def allocate_kv(self, layers: Sequence[LayerSpec], num_blocks: int, block_size: int) -> ReferenceKvCache:
        return ReferenceKvCache(layers, num_blocks, block_size)

    def embed(self, embedding: Embedding, token_ids: np.ndarray) -> torch.Tensor:
        vocab_size = embedding.raw.shape[0]
        if len(token_ids) and not 0 <= token_ids.min() <= token_ids.max() < vocab_size:
            raise InvalidRequestError(f"token ids must lie in [0, {vocab_size}); there are others")
        rows = dequantize(embedding.raw[token_ids])
        return rows if embedding.scale == 1 else rows.mul_(embedding.scale)

    def run_layer(
        self, layer: Layer, kv: ReferenceKvCache, batch: Batch, hidden_states: torch.Tensor
    ) -> torch.Tensor:
        hidden_states = hidden_states + layer.attention(hidden_states, kv, batch)
        return hidden_states + layer.ffn(hidden_states)

    def logits(self, head: Head, hidden_states: torch.Tensor) -> torch.Tensor:
        return softcap(head.output(head.norm(hidden_states)), head.logit_softcap)

    def close(self) -> None:
        """Holds nothing of its own."""


def _attention(spec: AttentionSpec, index: int, raw: RawTensors) -> Attention:
    return Attention(
        spec=spec,
        layer=index,
        norm=_norm(spec.norm, raw),
        q=_linear(spec.q, raw),
        k=_linear(spec.k, raw),
        v=_linear(spec.v, raw),
        output=_linear(spec.output, raw),
        rope=_rope(spec.rope, raw),
        q_norm=_optional_norm(spec.q_norm, raw),
        k_norm=_optional_norm(spec.k_norm, raw),
        post_norm=_optional_norm(spec.post_norm, raw),
    )


def _ffn(spec: DenseFfnSpec | MoeFfnSpec, raw: RawTensors) -> DenseFfn | MoeFfn:
    norm, post_norm = _norm(spec.norm, raw), _optional_norm(spec.post_norm, raw)
    gate, up, down = (_linear(linear, raw) for linear in (spec.gate, spec.up, spec.down))
    activation = ACTIVATIONS[spec.activation]
    if isinstance(spec, DenseFfnSpec):
        return DenseFfn(norm, gate, up, down, activation, post_norm)
    router = _linear(spec.router, raw)
    return MoeFfn(norm, router, gate, up, down, activation, spec.num_experts_used, post_norm)


def _linear(spec: LinearSpec, raw: RawTensors) -> Linear:
    bias = None if spec.bias is None else dequantize(raw[spec.bias])
    return Linear(dequantize(raw[spec.weight]), bias)


def _norm(spec: NormSpec, raw: RawTensors) -> RmsNorm:
    return RmsNorm(dequantize(raw[TensorRef(spec.weight)]), spec.eps)


def _optional_norm(spec: NormSpec | None, raw: RawTensors) -> RmsNorm | None:
    return None if spec is None else _norm(spec, raw)


def _rope(spec: RopeSpec, raw: RawTensors) -> Rope:
    factors = None if spec.factors is None else dequantize(raw[TensorRef(spec.factors)]).numpy()
    inverse_frequencies, magnitude = rope_table(spec, factors)
    return Rope(spec.kind, torch.from_numpy(inverse_frequencies), torch.tensor(magnitude))
