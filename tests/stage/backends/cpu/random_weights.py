"""Random tensors of every type, and random layers around them, as raw bytes a backend can prepare."""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GGMLType

from stage.backends.base import RawTensors
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
from stage.weights.quants import BLOCK_LAYOUTS, RawTensor

FLOAT_TYPES = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)


def random_raw(rng: np.random.Generator, ggml_type: GGMLType, shape: tuple[int, ...]) -> RawTensor:
    """Any bits in the quants; scales such that weights are about 0.05 in size."""
    elements, nbytes = gguf.GGML_QUANT_SIZES[ggml_type]
    layout = BLOCK_LAYOUTS[ggml_type]
    blocks = np.frombuffer(rng.bytes(int(np.prod(shape)) // elements * nbytes), np.uint8).copy().view(layout)
    largest = {"Q8_0": 127, "IQ4_NL": 127, "Q6_K": 3000, "IQ4_XS": 4000, "Q4_K": 900, "Q5_K": 1900,
               "Q2_K": 45, "Q3_K": 120}.get(ggml_type.name, 16)  # fmt: skip
    for name in layout.names or ():
        values = rng.standard_normal(len(blocks)).astype(np.float32) * 0.05
        if ggml_type in FLOAT_TYPES:
            top_half = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.int16)
            blocks[name] = top_half if ggml_type == GGMLType.BF16 else values
        elif name in ("d", "dmin", "m"):
            blocks[name] = values * 3 / largest
        elif name == "e":
            blocks[name] = rng.integers(118, 122, len(blocks))
    data = blocks.view(np.uint8).reshape(*shape[:-1], shape[-1] // elements * nbytes)
    return RawTensor(data, ggml_type, shape)


def random_layer(
    rng: np.random.Generator,
    weight_types: list[GGMLType],
    hidden: int = 256,
    heads: tuple[int, int, int] = (4, 2, 32),
    ffn: int = 256,
    experts: tuple[int, int] | None = None,
    window: int | None = None,
    softcap: float | None = None,
    rope: RopeKind = RopeKind.NEOX,
    activation: Activation = Activation.SILU,
    bias: bool = False,
    qk_norm: bool = False,
    post_norm: bool = False,
) -> tuple[LayerSpec, RawTensors]:
    """`heads`: query heads, KV heads, elements a head; `experts`: how many, how many are used.

    Weight types are taken in turn.
    """
    num_heads, num_kv_heads, head_dim = heads

    def linear(name: str, rows: int, cols: int, biased: bool = False) -> LinearSpec:
        return LinearSpec(TensorRef(name), cols, rows, TensorRef(name + ".bias") if biased else None)

    def norm(name: str, size: int, wanted: bool = True) -> NormSpec | None:
        return NormSpec(name, size, 1e-5) if wanted else None

    attention = AttentionSpec(
        norm=NormSpec("attn_norm", hidden, 1e-5),
        q=linear("q", num_heads * head_dim, hidden, bias),
        k=linear("k", num_kv_heads * head_dim, hidden, bias),
        v=linear("v", num_kv_heads * head_dim, hidden, bias),
        output=linear("output", hidden, num_heads * head_dim, bias),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=RopeSpec(rope, head_dim // 2 * 2, 10000.0),
        q_norm=norm("q_norm", head_dim, qk_norm),
        k_norm=norm("k_norm", head_dim, qk_norm),
        post_norm=norm("attn_post_norm", hidden, post_norm),
        sliding_window=window,
        logit_softcap=softcap,
    )
    common = {
        "norm": NormSpec("ffn_norm", hidden, 1e-5),
        "gate": linear("gate", ffn, hidden),
        "up": linear("up", ffn, hidden),
        "down": linear("down", hidden, ffn),
        "activation": activation,
        "post_norm": norm("ffn_post_norm", hidden, post_norm),
    }
    feed_forward: DenseFfnSpec | MoeFfnSpec
    if experts is None:
        feed_forward = DenseFfnSpec(**common)
    else:
        router = linear("router", experts[0], hidden)
        feed_forward = MoeFfnSpec(
            router=router, num_experts=experts[0], num_experts_used=experts[1], **common
        )
    spec = LayerSpec(0, attention, feed_forward)

    shapes: dict[str, tuple[int, ...]] = {}
    stacked = () if experts is None else (experts[0],)
    for one in (attention.q, attention.k, attention.v, attention.output):
        shapes[one.weight.name] = (one.out_features, one.in_features)
        shapes[one.weight.name + ".bias"] = (one.out_features,)
    for one in (feed_forward.gate, feed_forward.up, feed_forward.down):
        shapes[one.weight.name] = (*stacked, one.out_features, one.in_features)
    if isinstance(feed_forward, MoeFfnSpec):
        shapes["router"] = (experts[0] if experts else 0, hidden)
    for one_norm in ("attn_norm", "ffn_norm", "attn_post_norm", "ffn_post_norm"):
        shapes[one_norm] = (hidden,)
    shapes["q_norm"] = shapes["k_norm"] = (head_dim,)

    raw: dict[TensorRef, RawTensor] = {}
    for i, ref in enumerate(sorted(set(tensor_refs(spec)), key=lambda ref: ref.name)):
        shape = shapes[ref.name]
        if len(shape) == 1:
            values = rng.standard_normal(shape).astype(np.float32) * 0.1 + ("norm" in ref.name)
            raw[ref] = RawTensor(values.view(np.uint8), GGMLType.F32, shape)
        elif ref.name == "router":
            raw[ref] = random_raw(rng, GGMLType.F32, shape)
        else:
            raw[ref] = random_raw(rng, weight_types[i % len(weight_types)], shape)
    return spec, raw
