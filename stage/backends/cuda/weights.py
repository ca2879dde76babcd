"""A layer's raw tensors made into what the kernels take: packed products, norms, rotary tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from stage.backends.cuda.linear import Linear, Norm, Segment
from stage.backends.cuda.repack import PackedMatrix, pack
from stage.backends.cuda.upload import Uploader
from stage.model.rope import rope_table
from stage.model.spec import (
    Activation,
    DenseFfnSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    LinearSpec,
    MoeFfnSpec,
    NormSpec,
    TensorRef,
)
from stage.weights.quants import RawTensor, dequantize

RawTensors = Mapping[TensorRef, RawTensor]


@dataclass(frozen=True)
class DenseFfn:
    norm: Norm
    gate_up: Linear
    down: Linear
    activation: Activation
    post_norm: Norm | None


@dataclass(frozen=True)
class MoeFfn:
    norm: Norm
    router: torch.Tensor  # f32 [num_experts, hidden_size]
    router_bias: torch.Tensor | None
    gate_up: Linear
    down: Linear
    activation: Activation
    num_used: int
    post_norm: Norm | None


@dataclass(frozen=True)
class Layer:
    spec: LayerSpec
    norm: Norm
    qkv: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    inverse_frequencies: torch.Tensor  # f32 [rope dim / 2]
    magnitude: float
    output: Linear
    post_norm: Norm | None
    ffn: DenseFfn | MoeFfn


@dataclass(frozen=True)
class Attention:
    """A layer of experts without them."""

    layer: Layer

    @property
    def norm(self) -> Norm:
        return self.layer.norm


@dataclass(frozen=True)
class Experts:
    """The rest of it: router, experts and their norms."""

    ffn: MoeFfn


Part = Layer | Attention | Experts


@dataclass(frozen=True)
class Embedding:
    matrix: PackedMatrix
    scale: float


@dataclass(frozen=True)
class Head:
    norm: Norm
    output: Linear
    logit_softcap: float | None


class WeightLoader:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._uploader = Uploader(device)
        self._whole: dict[tuple[int, int], PackedMatrix] = {}  # embedding and head, which may be one tensor

    def embedding(self, spec: EmbeddingSpec, raw: RawTensors) -> Embedding:
        return Embedding(self._shared(raw[spec.weight]), spec.scale)

    def head(self, spec: HeadSpec, raw: RawTensors) -> Head:
        matrix = self._shared(raw[spec.output.weight])
        bias = self._vector(raw[spec.output.bias]) if spec.output.bias else None
        output = Linear((Segment(matrix, 0, bias),), spec.output.in_features, spec.output.out_features)
        return Head(self._norm(spec.norm, raw), output, spec.logit_softcap)

    def layer(self, spec: LayerSpec, raw: RawTensors) -> Layer:
        attention = spec.attention
        rope = attention.rope
        factors = dequantize(raw[TensorRef(rope.factors)]).numpy() if rope.factors else None
        frequencies, magnitude = rope_table(rope, factors)
        return Layer(
            spec=spec,
            norm=self._norm(attention.norm, raw),
            qkv=self._stacked((attention.q, attention.k, attention.v), raw),
            q_norm=self._norm(attention.q_norm, raw) if attention.q_norm else None,
            k_norm=self._norm(attention.k_norm, raw) if attention.k_norm else None,
            inverse_frequencies=torch.from_numpy(frequencies).to(self._device),
            magnitude=magnitude,
            output=self._stacked((attention.output,), raw),
            post_norm=self._norm(attention.post_norm, raw) if attention.post_norm else None,
            ffn=self._ffn(spec.ffn, raw),
        )

    def _ffn(self, spec: DenseFfnSpec | MoeFfnSpec, raw: RawTensors) -> DenseFfn | MoeFfn:
        return self._dense(spec, raw) if isinstance(spec, DenseFfnSpec) else self._moe(spec, raw)

    def _dense(self, spec: DenseFfnSpec, raw: RawTensors) -> DenseFfn:
        return DenseFfn(
            self._norm(spec.norm, raw),
            self._gate_up(spec, raw),
            self._stacked((spec.down,), raw),
            spec.activation,
            self._norm(spec.post_norm, raw) if spec.post_norm else None,
        )

    def _moe(self, spec: MoeFfnSpec, raw: RawTensors) -> MoeFfn:
        return MoeFfn(
            norm=self._norm(spec.norm, raw),
            router=dequantize(raw[spec.router.weight]).to(self._device),
            router_bias=self._vector(raw[spec.router.bias]) if spec.router.bias else None,
            gate_up=self._gate_up(spec, raw),
            down=self._stacked((spec.down,), raw),
            activation=spec.activation,
            num_used=spec.num_experts_used,
            post_norm=self._norm(spec.post_norm, raw) if spec.post_norm else None,
        )

    def _gate_up(self, spec: DenseFfnSpec | MoeFfnSpec, raw: RawTensors) -> Linear:
        """Gate and up interleaved by 8 rows where one kernel can take both, else one after the other."""
        gate, up = raw[spec.gate.weight], raw[spec.up.weight]
        size = spec.gate.out_features
        fusible = gate.ggml_type == up.ggml_type and size % 8 == 0 and not (spec.gate.bias or spec.up.bias)
        if not fusible:
            return self._stacked((spec.gate, spec.up), raw)
        matrix = self._matrix((gate, up), spec.gate.in_features, interleaved=True)
        segment = Segment(matrix, 0, None)
        return Linear((segment,), spec.gate.in_features, 2 * size, gated=spec.activation)

    def _stacked(self, parts: Sequence[LinearSpec], raw: RawTensors) -> Linear:
        """Products of one input, their outputs side by side; neighbours of one type become one matrix."""
        segments: list[Segment] = []
        start = i = 0
        while i < len(parts):
            j = i + 1
            tensor = raw[parts[i].weight]
            while j < len(parts) and raw[parts[j].weight].ggml_type == tensor.ggml_type:
                j += 1
            run = parts[i:j]
            matrix = self._matrix([raw[part.weight] for part in run], run[0].in_features, interleaved=False)
            bias = None
            if any(part.bias for part in run):
                bias = torch.cat(
                    [
                        self._vector(raw[part.bias])
                        if part.bias
                        else torch.zeros(part.out_features, device=self._device)
                        for part in run
                    ]
                )
            segments.append(Segment(matrix, start, bias))
            start += sum(part.out_features for part in run)
            i = j
        return Linear(tuple(segments), parts[0].in_features, start)

    def _matrix(self, parts: Sequence[RawTensor], columns: int, interleaved: bool) -> PackedMatrix:
        """Matrices of one type one above the other, or two that take turns by 8 rows."""
        raw = [self._uploader.bytes(part) for part in parts]
        if interleaved:
            data = torch.stack([one.unflatten(-2, (-1, 8)) for one in raw], dim=-3).flatten(-4, -2)
        else:
            data = torch.cat(raw, dim=-2) if len(raw) > 1 else raw[0]
        del raw  # the tiles take memory, too
        return self._pack(data, parts[0], columns)

    def _shared(self, tensor: RawTensor) -> PackedMatrix:
        key = (tensor.data.ctypes.data, tensor.data.nbytes)
        if key not in self._whole:
            self._whole[key] = self._pack(self._uploader.bytes(tensor), tensor, tensor.shape[-1])
        return self._whole[key]

    def _pack(self, data: torch.Tensor, tensor: RawTensor, columns: int) -> PackedMatrix:
        """data: [rows, row_bytes], or [experts, rows, row_bytes] with every expert's rows padded for
        itself."""
        if data.ndim == 2:
            return pack(data, tensor.ggml_type, columns)
        experts, rows, _ = data.shape
        data = torch.nn.functional.pad(data, (0, 0, 0, -rows % 16))
        packed = pack(data.flatten(0, 1), tensor.ggml_type, columns)
        tiles = packed.tiles.unflatten(0, (experts, -1))
        return PackedMatrix(tiles, packed.kernel_type, packed.exponent, packed.inverse, rows, columns)

    def _norm(self, spec: NormSpec, raw: RawTensors) -> Norm:
        weight = self._vector(raw[TensorRef(spec.weight)])
        inverse = 2.0 ** (math.frexp(float(weight.abs().amax()))[1] + 2)
        return Norm(weight, weight / inverse, inverse, spec.eps)

    def _vector(self, tensor: RawTensor) -> torch.Tensor:
        return dequantize(tensor).to(self._device)
