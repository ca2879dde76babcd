"""From a layer's spec and raw tensors to the native library's plan of pointers.

Matrices point into the mapped file; norms and biases, a few kilobytes, become float32 arrays that the plan
keeps, with everything else its pointers need alive.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from common.errors import UnsupportedModelError
from stage.backends.base import RawTensors
from stage.backends.cpu import abi
from stage.model.rope import rope_table
from stage.model.spec import (
    Activation,
    DenseFfnSpec,
    HeadSpec,
    LayerSpec,
    LinearSpec,
    MoeFfnSpec,
    NormSpec,
    RopeKind,
    RopeSpec,
    TensorRef,
)
from stage.weights.quants import RawTensor, dequantize

MAX_HEAD_DIM = 512  # kMaxHeadDim in native/kernels.h

_ROPE_KINDS = {RopeKind.NORM: 0, RopeKind.NEOX: 1}
_ACTIVATIONS = {Activation.SILU: 0, Activation.GELU_TANH: 1}


@dataclass(frozen=True)
class Rope:
    """`inverse_frequencies`: float32 [dim / 2]; `magnitude` multiplies cosines and sines."""

    inverse_frequencies: np.ndarray
    magnitude: float

    @cached_property
    def key(self) -> tuple[bytes, float]:
        """Equal for layers that can share a table."""
        return self.inverse_frequencies.tobytes(), self.magnitude


@dataclass(frozen=True)
class Plan:
    """A native struct (`address` is where it lies) and what its pointers refer to."""

    struct: ctypes.Structure
    address: int
    kept: tuple[object, ...]


@dataclass(frozen=True)
class Layer:
    index: int
    plan: Plan
    hidden_size: int
    rope: Rope


@dataclass(frozen=True)
class Head:
    norm: Plan
    output: Plan
    hidden_size: int
    vocab_size: int
    logit_softcap: float


class _Builder:
    """Makes structs and collects the arrays they point into."""

    def __init__(self, raw: RawTensors) -> None:
        self._raw = raw
        self.kept: list[object] = []

    def norm(self, spec: NormSpec | None) -> abi.Norm:
        if spec is None:
            return abi.Norm()
        weight = self._floats(TensorRef(spec.weight))
        return abi.Norm(abi.address(weight), spec.eps, spec.size)

    def linear(self, spec: LinearSpec) -> abi.Matrix:
        bias = None if spec.bias is None else abi.address(self._floats(spec.bias))
        return self.matrix(self._raw[spec.weight], bias)

    def matrix(self, raw: RawTensor, bias: int | None = None) -> abi.Matrix:
        self.kept.append(raw)
        rows, cols = raw.shape[-2:]
        return abi.Matrix(
            data=abi.address(raw.data),
            row_bytes=raw.data.strides[-2],
            expert_bytes=raw.data.strides[0] if len(raw.shape) == 3 else 0,
            bias=bias,
            type=int(raw.ggml_type),
            rows=rows,
            cols=cols,
        )

    def plan(self, struct: ctypes.Structure) -> Plan:
        return Plan(struct, ctypes.addressof(struct), tuple(self.kept))

    def _floats(self, ref: TensorRef) -> np.ndarray:
        values = dequantize(self._raw[ref]).numpy()
        self.kept.append(values)
        return values


def embedding_matrix(raw: RawTensor) -> Plan:
    builder = _Builder({})
    return builder.plan(builder.matrix(raw))


def build_head(spec: HeadSpec, raw: RawTensors) -> Head:
    builder = _Builder(raw)
    norm, output = builder.plan(builder.norm(spec.norm)), builder.plan(builder.linear(spec.output))
    softcap = spec.logit_softcap or 0.0
    return Head(norm, output, spec.output.in_features, spec.output.out_features, softcap)


def build_layer(spec: LayerSpec, raw: RawTensors) -> Layer:
    attention, ffn = spec.attention, spec.ffn
    builder = _Builder(raw)
    plan = abi.LayerPlan(
        attn_norm=builder.norm(attention.norm),
        q_norm=builder.norm(attention.q_norm),
        k_norm=builder.norm(attention.k_norm),
        attn_post_norm=builder.norm(attention.post_norm),
        ffn_norm=builder.norm(ffn.norm),
        ffn_post_norm=builder.norm(ffn.post_norm),
        q=builder.linear(attention.q),
        k=builder.linear(attention.k),
        v=builder.linear(attention.v),
        output=builder.linear(attention.output),
        gate=builder.linear(ffn.gate),
        up=builder.linear(ffn.up),
        down=builder.linear(ffn.down),
        scale=attention.scale,
        softcap=attention.logit_softcap or 0.0,
        hidden_size=attention.norm.size,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        window=attention.sliding_window or 0,
        rope_kind=_ROPE_KINDS[attention.rope.kind],
        rope_dim=attention.rope.dim,
        activation=_ACTIVATIONS[ffn.activation],
    )
    if isinstance(ffn, MoeFfnSpec):
        plan.router = builder.linear(ffn.router)
        plan.num_experts, plan.num_experts_used = ffn.num_experts, ffn.num_experts_used
    return Layer(spec.index, builder.plan(plan), attention.norm.size, _rope(attention.rope, raw))


def check_layer(spec: LayerSpec) -> None:
    """Refuses what the native plan has no field for (UnsupportedModelError)."""
    head_dim = spec.attention.head_dim
    if head_dim > MAX_HEAD_DIM:
        raise UnsupportedModelError(
            f"layer {spec.index}: heads of {head_dim} elements; the native CPU backend takes up to "
            f"{MAX_HEAD_DIM} (use --backend reference)"
        )
    experts_bias = isinstance(spec.ffn, MoeFfnSpec) and any(
        linear.bias is not None for linear in (spec.ffn.gate, spec.ffn.up, spec.ffn.down)
    )
    if experts_bias:
        raise UnsupportedModelError(
            f"layer {spec.index}: experts with biases are not supported by the native CPU backend "
            "(use --backend reference)"
        )
    if not isinstance(spec.ffn, DenseFfnSpec | MoeFfnSpec):
        raise UnsupportedModelError(
            f"layer {spec.index}: feed-forward {type(spec.ffn).__name__} is not known"
        )


def _rope(spec: RopeSpec, raw: RawTensors) -> Rope:
    factors = None if spec.factors is None else dequantize(raw[TensorRef(spec.factors)]).numpy()
    inverse_frequencies, magnitude = rope_table(spec, factors)
    return Rope(np.ascontiguousarray(inverse_frequencies, np.float32), magnitude)
