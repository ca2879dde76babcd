"""A layer of the reference backend against the same layer written out in numpy, row by row, in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from stage.backends.base import make_batch
from stage.backends.reference import ReferenceBackend
from stage.backends.reference import attention as attention_module
from stage.model.spec import (
    Activation,
    AttentionSpec,
    DenseFfnSpec,
    LayerSpec,
    LinearSpec,
    MoeFfnSpec,
    NormSpec,
    RopeKind,
    RopeSpec,
    TensorRef,
    tensor_refs,
)
from stage.weights.quants import GGMLType, RawTensor

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FF, EXPERTS, USED = 24, 6, 2, 8, 20, 5, 2
EPS = 1e-5
BLOCK_SIZE = 4


class Tensors:
    """Random tensors, made as they are named."""

    def __init__(self, seed: int = 0) -> None:
        self.values: dict[str, np.ndarray] = {}
        self._rng = np.random.default_rng(seed)

    def linear(self, name: str, out: int, inputs: int, bias: bool, experts: int = 0) -> LinearSpec:
        stack = (experts,) if experts else ()
        self.values[name] = self._rng.normal(0, inputs**-0.5, (*stack, out, inputs)).astype(np.float32)
        if bias:
            self.values[name + ".bias"] = self._rng.normal(0, 0.5, (*stack, out)).astype(np.float32)
        return LinearSpec(TensorRef(name), inputs, out, TensorRef(name + ".bias") if bias else None)

    def norm(self, name: str, size: int) -> NormSpec:
        self.values[name] = self._rng.normal(1, 0.2, size).astype(np.float32)
        return NormSpec(name, size, EPS)

    def raw(self, layer: LayerSpec) -> dict[TensorRef, RawTensor]:
        return {
            ref: RawTensor(self.values[ref.name].view(np.uint8), GGMLType.F32, self.values[ref.name].shape)
            for ref in tensor_refs(layer)
        }

    def apply(self, linear: LinearSpec, x: np.ndarray, expert: int | None = None) -> np.ndarray:
        weight = self.values[linear.weight.name].astype(np.float64)
        bias = np.zeros(1) if linear.bias is None else self.values[linear.bias.name].astype(np.float64)
        if expert is not None:
            weight = weight[expert]
            bias = bias if linear.bias is None else bias[expert]
        return weight @ x + bias

    def normed(self, norm: NormSpec | None, x: np.ndarray) -> np.ndarray:
        if norm is None:
            return x
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + norm.eps) * self.values[norm.weight]


def turned(spec: RopeSpec, head: np.ndarray, position: int) -> np.ndarray:
    out = head.copy()
    for i in range(spec.dim // 2):
        a, b = (2 * i, 2 * i + 1) if spec.kind is RopeKind.NORM else (i, i + spec.dim // 2)
        angle = position / spec.linear_factor * spec.freq_base ** (-2 * i / spec.dim)
        cos, sin = math.cos(angle) * spec.magnitude, math.sin(angle) * spec.magnitude
        out[a], out[b] = head[a] * cos - head[b] * sin, head[a] * sin + head[b] * cos
    return out


def activated(activation: Activation, x: np.ndarray) -> np.ndarray:
    if activation is Activation.SILU:
        return x / (1 + np.exp(-x))
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def naive_attention(tensors: Tensors, spec: AttentionSpec, rows: np.ndarray) -> np.ndarray:
    """All rows of one sequence, from position 0 on."""
    normed = [tensors.normed(spec.norm, row) for row in rows]
    q, k, v = (
        [list(tensors.apply(linear, x).reshape(-1, spec.head_dim)) for x in normed]
        for linear in (spec.q, spec.k, spec.v)
    )
    for heads, norm in ((q, spec.q_norm), (k, spec.k_norm)):
        for p, row in enumerate(heads):
            row[:] = [turned(spec.rope, tensors.normed(norm, head), p) for head in row]
    out = []
    for p in range(len(rows)):
        heads = []
        first = 0 if spec.sliding_window is None else max(0, p - spec.sliding_window + 1)
        for h in range(spec.num_heads):
            kv_head = h * spec.num_kv_heads // spec.num_heads
            scores = np.array([q[p][h] @ k[j][kv_head] * spec.scale for j in range(first, p + 1)])
            if spec.logit_softcap:
                scores = spec.logit_softcap * np.tanh(scores / spec.logit_softcap)
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            heads.append(sum(w * v[first + j][kv_head] for j, w in enumerate(weights)))
        out.append(tensors.normed(spec.post_norm, tensors.apply(spec.output, np.concatenate(heads))))
    return np.array(out)


def naive_ffn(tensors: Tensors, spec: DenseFfnSpec | MoeFfnSpec, row: np.ndarray) -> np.ndarray:
    def through(expert: int | None) -> np.ndarray:
        gate = activated(spec.activation, tensors.apply(spec.gate, x, expert))
        return tensors.apply(spec.down, gate * tensors.apply(spec.up, x, expert), expert)

    x = tensors.normed(spec.norm, row)
    if isinstance(spec, DenseFfnSpec):
        return tensors.normed(spec.post_norm, through(None))
    logits = tensors.apply(spec.router, x)
    chosen = np.argsort(-logits)[: spec.num_experts_used]
    weights = np.exp(logits[chosen] - logits[chosen].max())
    weights /= weights.sum()
    out = sum(weight * through(int(expert)) for weight, expert in zip(weights, chosen, strict=True))
    return tensors.normed(spec.post_norm, out)


def layer_spec(
    tensors: Tensors,
    *,
    kind: RopeKind = RopeKind.NORM,
    rope_dim: int = HEAD_DIM,
    window: int | None = None,
    cap: float | None = None,
    extras: bool = False,
    moe: bool = False,
) -> LayerSpec:
    attention = AttentionSpec(
        norm=tensors.norm("attn_norm", HIDDEN),
        q=tensors.linear("q", HEADS * HEAD_DIM, HIDDEN, extras),
        k=tensors.linear("k", KV_HEADS * HEAD_DIM, HIDDEN, extras),
        v=tensors.linear("v", KV_HEADS * HEAD_DIM, HIDDEN, extras),
        output=tensors.linear("output", HIDDEN, HEADS * HEAD_DIM, extras),
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        scale=0.9,
        rope=RopeSpec(kind, rope_dim, 100.0, linear_factor=2.0, magnitude=1.1),
        q_norm=tensors.norm("q_norm", HEAD_DIM) if extras else None,
        k_norm=tensors.norm("k_norm", HEAD_DIM) if extras else None,
        post_norm=tensors.norm("attn_post", HIDDEN) if extras else None,
        sliding_window=window,
        logit_softcap=cap,
    )
    experts = EXPERTS if moe else 0
    norm = tensors.norm("ffn_norm", HIDDEN)
    gate = tensors.linear("gate", FF, HIDDEN, extras, experts)
    up = tensors.linear("up", FF, HIDDEN, extras, experts)
    down = tensors.linear("down", HIDDEN, FF, extras, experts)
    post_norm = tensors.norm("ffn_post", HIDDEN) if extras else None
    ffn: DenseFfnSpec | MoeFfnSpec
    if moe:
        router = tensors.linear("router", EXPERTS, HIDDEN, extras)
        ffn = MoeFfnSpec(norm, router, gate, up, down, Activation.SILU, EXPERTS, USED, post_norm)
    else:
        activation = Activation.GELU_TANH if extras else Activation.SILU
        ffn = DenseFfnSpec(norm, gate, up, down, activation, post_norm)
    return LayerSpec(3, attention, ffn)


VARIANTS = {
    "plain": {},
    "neox, half of a head rotated": {"kind": RopeKind.NEOX, "rope_dim": 4},
    "norm, half of a head rotated": {"rope_dim": 4},
    "window": {"window": 5},
    "window of one": {"window": 1},
    "softcap": {"cap": 1.5},
    "biases, QK norm, post norms, GELU": {"extras": True, "kind": RopeKind.NEOX},
    "experts": {"moe": True},
    "experts with biases": {"moe": True, "extras": True},
    "all of it": {"moe": True, "extras": True, "window": 6, "cap": 2.0, "kind": RopeKind.NEOX},
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("max_scores", [1 << 24, 100], ids=["at once", "some rows at a time"])
def test_layer_against_numpy(
    variant: dict[str, object], max_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sequences, prefilled in chunks of uneven size beside one another, blocks in any order."""
    monkeypatch.setattr(attention_module, "_MAX_SCORES", max_scores)
    tensors = Tensors()
    spec = layer_spec(tensors, **variant)  # type: ignore[arg-type]
    backend = ReferenceBackend()
    layer = backend.prepare_layer(spec, tensors.raw(spec))
    kv = backend.allocate_kv([spec], 16, BLOCK_SIZE)
    rng = np.random.default_rng(5)
    blocks = rng.permutation(16).astype(np.int32)
    tables = (blocks[:6], blocks[6:10])
    inputs = [rng.normal(0, 1, (length, HIDDEN)).astype(np.float32) for length in (21, 13)]
    results: list[list[np.ndarray]] = [[], []]
    for chunks in (((0, 0, 7), (1, 0, 1)), ((1, 1, 5),), ((0, 7, 1), (1, 6, 7)), ((0, 8, 13),)):
        batch = make_batch([(start, rows, tables[s]) for s, start, rows in chunks], BLOCK_SIZE)
        rows = np.concatenate([inputs[s][start : start + rows] for s, start, rows in chunks])
        out = backend.run_layer(layer, kv, batch, torch.from_numpy(rows)).numpy()
        for (s, _, num_rows), sequence in zip(chunks, batch.sequences, strict=True):
            results[s].append(out[sequence.row_start : sequence.row_start + num_rows])
    for s in (0, 1):
        hidden_states = inputs[s].astype(np.float64)
        hidden_states = hidden_states + naive_attention(tensors, spec.attention, hidden_states)
        expected = hidden_states + np.array([naive_ffn(tensors, spec.ffn, row) for row in hidden_states])
        assert np.allclose(np.concatenate(results[s]), expected, rtol=1e-4, atol=1e-5)
