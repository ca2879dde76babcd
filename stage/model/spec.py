"""The declarative description of a model that every backend runs from.

A `ModelSpec` says which tensors there are, what they are for, and with which constants they are used; it
does no arithmetic, holds no weights, and knows no backend. One file an architecture
(`stage/model/<general.architecture>.py`) builds it from GGUF metadata.

Shapes: a linear weight is [out_features, in_features], row-major, as GGUF stores it (its first dimension
is the contiguous one, in_features). Experts add a leading dimension [num_experts, out, in].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class RopeKind(Enum):
    """Which dimensions of a head are rotated together."""

    NORM = "norm"  # pairs (2i, 2i + 1)
    NEOX = "neox"  # pairs (i, i + dim / 2)


class Activation(Enum):
    SILU = "silu"
    GELU_TANH = "gelu_tanh"  # 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))


@dataclass(frozen=True)
class TensorRef:
    """A tensor of the file, or rows [row_start, row_end) of it (fused QKV, fused gate and up)."""

    name: str
    row_start: int = 0
    row_end: int | None = None  # None: to the last


@dataclass(frozen=True)
class LinearSpec:
    """y = W x + b, with W [out_features, in_features] and b [out_features]."""

    weight: TensorRef
    in_features: int
    out_features: int
    bias: TensorRef | None = None


@dataclass(frozen=True)
class NormSpec:
    """RMS norm: x / sqrt(mean(x^2) + eps) * weight, over the last dimension of `size`."""

    weight: str
    size: int
    eps: float


@dataclass(frozen=True)
class YarnSpec:
    """YaRN (arXiv 2309.00071) as llama.cpp applies it."""

    factor: float
    original_context_length: int
    beta_fast: float
    beta_slow: float
    ext_factor: float  # 1 blends interpolation and extrapolation, 0 only interpolates
    attn_factor: float


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding. `stage.model.rope.rope_table` turns it into inverse frequencies and a magnitude."""

    kind: RopeKind
    dim: int  # the first `dim` dimensions of a head are rotated
    freq_base: float
    linear_factor: float = 1.0  # positions are divided by it
    yarn: YarnSpec | None = None
    factors: str | None = None  # tensor [dim / 2] that divides the inverse frequencies
    magnitude: float = 1.0  # multiplies cos and sin (LongRoPE's attention factor)


@dataclass(frozen=True)
class AttentionSpec:
    norm: NormSpec
    q: LinearSpec  # out_features = num_heads * head_dim
    k: LinearSpec  # out_features = num_kv_heads * head_dim
    v: LinearSpec
    output: LinearSpec
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # multiplies q k^T
    rope: RopeSpec
    q_norm: NormSpec | None = None  # over head_dim, before RoPE
    k_norm: NormSpec | None = None
    post_norm: NormSpec | None = None  # on the projected output, before the residual is added
    sliding_window: int | None = None  # a row at p sees positions (p - window, p]
    logit_softcap: float | None = None  # c tanh(score / c)


@dataclass(frozen=True)
class DenseFfnSpec:
    """down(activation(gate(x)) * up(x))."""

    norm: NormSpec
    gate: LinearSpec
    up: LinearSpec
    down: LinearSpec
    activation: Activation
    post_norm: NormSpec | None = None


@dataclass(frozen=True)
class MoeFfnSpec:
    """Experts: softmax over the router's logits, the `num_experts_used` largest, weights made to sum to one.

    gate, up and down name tensors [num_experts, out, in]; their LinearSpec gives one expert's features.
    """

    norm: NormSpec
    router: LinearSpec  # out_features = num_experts
    gate: LinearSpec
    up: LinearSpec
    down: LinearSpec
    activation: Activation
    num_experts: int
    num_experts_used: int
    post_norm: NormSpec | None = None


@dataclass(frozen=True)
class LayerSpec:
    index: int  # global number, as in blk.N
    attention: AttentionSpec
    ffn: DenseFfnSpec | MoeFfnSpec

    @property
    def kv_width(self) -> int:
        """Elements of K (and as many of V) a token leaves in this layer's cache."""
        return self.attention.num_kv_heads * self.attention.head_dim


@dataclass(frozen=True)
class EmbeddingSpec:
    weight: TensorRef  # [vocab_size, hidden_size]
    scale: float = 1.0  # multiplies the looked-up row


@dataclass(frozen=True)
class HeadSpec:
    norm: NormSpec
    output: LinearSpec  # [vocab_size, hidden_size]; the embedding's tensor where tied
    logit_softcap: float | None = None


@dataclass(frozen=True)
class ModelSpec:
    architecture: str
    context_length: int  # the model's own limit, tokens
    vocab_size: int
    hidden_size: int
    embedding: EmbeddingSpec
    layers: tuple[LayerSpec, ...]
    head: HeadSpec


SpecPart = EmbeddingSpec | LayerSpec | HeadSpec


def tensor_refs(part: object) -> Iterator[TensorRef]:
    """Every tensor that a spec, or any part of one, names (a tensor may appear more than once)."""
    if isinstance(part, TensorRef):
        yield part
    elif isinstance(part, NormSpec):
        yield TensorRef(part.weight)
    elif isinstance(part, RopeSpec):
        if part.factors is not None:
            yield TensorRef(part.factors)
    elif isinstance(part, tuple):
        for item in part:
            yield from tensor_refs(item)
    elif hasattr(part, "__dataclass_fields__"):
        for field in part.__dataclass_fields__:
            yield from tensor_refs(getattr(part, field))
