"""What a file asks for ends in its spec; what is not understood is refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from common.errors import CorruptDataError, PipeLLMError, UnsupportedModelError
from common.gguf.reader import GGUFFile
from stage.model.registry import build_spec
from stage.model.spec import (
    Activation,
    DenseFfnSpec,
    ModelSpec,
    MoeFfnSpec,
    RopeKind,
    TensorRef,
    tensor_refs,
)
from tests.gguf_files import write_gguf, write_tiny_llama

WIDTH, FF, HEADS, KV_HEADS, VOCAB, LAYERS = 32, 48, 4, 2, 40, 2
HEAD_DIM = WIDTH // HEADS
KV_WIDTH = KV_HEADS * HEAD_DIM


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def plain_metadata(arch: str, layers: int = LAYERS) -> dict[str, Any]:
    return {
        "general.architecture": arch,
        f"{arch}.context_length": 256,
        f"{arch}.embedding_length": WIDTH,
        f"{arch}.block_count": layers,
        f"{arch}.feed_forward_length": FF,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.vocab_size": VOCAB,
    }


def plain_tensors(layers: int = LAYERS) -> dict[str, np.ndarray]:
    tensors = {"token_embd.weight": ones(VOCAB, WIDTH), "output_norm.weight": ones(WIDTH)}
    for i in range(layers):
        tensors |= {
            f"blk.{i}.attn_norm.weight": ones(WIDTH),
            f"blk.{i}.attn_q.weight": ones(WIDTH, WIDTH),
            f"blk.{i}.attn_k.weight": ones(KV_WIDTH, WIDTH),
            f"blk.{i}.attn_v.weight": ones(KV_WIDTH, WIDTH),
            f"blk.{i}.attn_output.weight": ones(WIDTH, WIDTH),
            f"blk.{i}.ffn_norm.weight": ones(WIDTH),
            f"blk.{i}.ffn_gate.weight": ones(FF, WIDTH),
            f"blk.{i}.ffn_up.weight": ones(FF, WIDTH),
            f"blk.{i}.ffn_down.weight": ones(WIDTH, FF),
        }
    return tensors


def spec_of(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray], context: int | None = None
) -> ModelSpec:
    with GGUFFile.open(write_gguf(path / "model.gguf", metadata, tensors)) as file:
        return build_spec(file, context)


def test_a_plain_llama(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, plain_metadata("llama"), plain_tensors())
    assert (spec.architecture, spec.context_length, spec.vocab_size, spec.hidden_size) == (
        "llama",
        256,
        40,
        32,
    )
    assert [layer.index for layer in spec.layers] == [0, 1]
    attention, ffn = spec.layers[1].attention, spec.layers[1].ffn
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (4, 2, 8)
    assert attention.scale == pytest.approx(8**-0.5) and attention.norm.eps == pytest.approx(1e-5)
    assert attention.k.weight == TensorRef("blk.1.attn_k.weight")
    assert (attention.k.in_features, attention.k.out_features, attention.k.bias) == (32, 16, None)
    assert attention.rope.kind is RopeKind.NORM and attention.rope.dim == 8
    assert attention.rope.freq_base == 10000 and attention.rope.linear_factor == 1
    assert attention.sliding_window is None and attention.logit_softcap is None
    assert isinstance(ffn, DenseFfnSpec) and ffn.activation is Activation.SILU
    assert spec.layers[1].kv_width == 16
    assert spec.head.output.weight == spec.embedding.weight  # tied


def test_every_tensor_of_the_file_is_in_the_spec(tmp_path: Path) -> None:
    with GGUFFile.open(write_tiny_llama(tmp_path / "model.gguf")) as file:
        spec = build_spec(file)
        assert {ref.name for ref in tensor_refs(spec)} == set(file.tensors)
        assert spec.vocab_size == 512 and spec.context_length == 512


def test_fused_tensors_and_biases_in_any_architecture(tmp_path: Path) -> None:
    tensors = plain_tensors(1)
    for name in ("attn_q", "attn_k", "attn_v", "ffn_gate"):
        del tensors[f"blk.0.{name}.weight"]
    tensors |= {
        "blk.0.attn_qkv.weight": ones(WIDTH + 2 * KV_WIDTH, WIDTH),
        "blk.0.attn_qkv.bias": ones(WIDTH + 2 * KV_WIDTH),
        "blk.0.attn_output.bias": ones(WIDTH),
        "blk.0.ffn_up.weight": ones(2 * FF, WIDTH),
        "blk.0.ffn_up.bias": ones(2 * FF),
        "blk.0.ffn_down.bias": ones(WIDTH),
        "output.weight": ones(VOCAB, WIDTH),
        "output.bias": ones(VOCAB),
    }
    spec = spec_of(tmp_path, plain_metadata("qwen2", 1), tensors)
    attention, ffn = spec.layers[0].attention, spec.layers[0].ffn
    assert attention.q.weight == TensorRef("blk.0.attn_qkv.weight", 0, 32)
    assert attention.k.weight == TensorRef("blk.0.attn_qkv.weight", 32, 48)
    assert attention.v.bias == TensorRef("blk.0.attn_qkv.bias", 48, 64)
    assert attention.output.bias == TensorRef("blk.0.attn_output.bias")
    assert isinstance(ffn, DenseFfnSpec)
    assert ffn.gate.weight == TensorRef("blk.0.ffn_up.weight", 0, 48)
    assert ffn.up.bias == TensorRef("blk.0.ffn_up.bias", 48, 96)
    assert ffn.down.bias is not None and spec.head.output.bias == TensorRef("output.bias")


def test_hyperparameters_of_each_layer(tmp_path: Path) -> None:
    metadata = plain_metadata("llama") | {
        "llama.attention.head_count": np.array([4, 2], np.int32),
        "llama.attention.head_count_kv": np.array([4, 1], np.uint32),
        "llama.feed_forward_length": np.array([48, 16], np.int32),
    }
    tensors = plain_tensors() | {
        "blk.0.attn_k.weight": ones(32, WIDTH),
        "blk.0.attn_v.weight": ones(32, WIDTH),
        "blk.1.attn_q.weight": ones(16, WIDTH),
        "blk.1.attn_k.weight": ones(8, WIDTH),
        "blk.1.attn_v.weight": ones(8, WIDTH),
        "blk.1.attn_output.weight": ones(WIDTH, 16),
        "blk.1.ffn_gate.weight": ones(16, WIDTH),
        "blk.1.ffn_up.weight": ones(16, WIDTH),
        "blk.1.ffn_down.weight": ones(WIDTH, 16),
    }
    spec = spec_of(tmp_path, metadata, tensors)
    assert [(layer.attention.num_heads, layer.kv_width) for layer in spec.layers] == [(4, 32), (2, 8)]
    with pytest.raises(CorruptDataError, match=r"head_count.* 2 values, the model has 3 layers"):
        spec_of(tmp_path, metadata | {"llama.block_count": 3}, tensors)


def test_caps_window_and_scale(tmp_path: Path) -> None:
    metadata = plain_metadata("llama") | {
        "llama.attention.sliding_window": 128,
        "llama.attention.scale": 0.25,
        "llama.attn_logit_softcapping": 50.0,
        "llama.final_logit_softcapping": 30.0,
    }
    spec = spec_of(tmp_path, metadata, plain_tensors())
    attention = spec.layers[0].attention
    assert (attention.sliding_window, attention.scale, attention.logit_softcap) == (128, 0.25, 50.0)
    assert spec.head.logit_softcap == 30.0


def moe_tensors(experts: int, size: int) -> dict[str, np.ndarray]:
    tensors = {name: tensor for name, tensor in plain_tensors(1).items() if "ffn_" not in name}
    return tensors | {
        "blk.0.ffn_norm.weight": ones(WIDTH),
        "blk.0.ffn_gate_inp.weight": ones(experts, WIDTH),
        "blk.0.ffn_gate_exps.weight": ones(experts, size, WIDTH),
        "blk.0.ffn_up_exps.weight": ones(experts, size, WIDTH),
        "blk.0.ffn_down_exps.weight": ones(experts, WIDTH, size),
    }


def test_experts(tmp_path: Path) -> None:
    metadata = plain_metadata("llama", 1) | {"llama.expert_count": 4, "llama.expert_used_count": 2}
    ffn = spec_of(tmp_path, metadata, moe_tensors(4, FF)).layers[0].ffn
    assert isinstance(ffn, MoeFfnSpec) and (ffn.num_experts, ffn.num_experts_used) == (4, 2)
    assert (ffn.down.in_features, ffn.down.out_features) == (FF, WIDTH)

    fused = moe_tensors(4, 16)
    del fused["blk.0.ffn_gate_exps.weight"], fused["blk.0.ffn_up_exps.weight"]
    fused["blk.0.ffn_gate_up_exps.weight"] = ones(4, 32, WIDTH)
    ffn = spec_of(tmp_path, metadata | {"llama.expert_feed_forward_length": 16}, fused).layers[0].ffn
    assert isinstance(ffn, MoeFfnSpec)
    assert ffn.up.weight == TensorRef("blk.0.ffn_gate_up_exps.weight", 16, 32)

    with pytest.raises(CorruptDataError, match="expert_used_count is 5"):
        spec_of(tmp_path, metadata | {"llama.expert_used_count": 5}, moe_tensors(4, FF))
    with pytest.raises(UnsupportedModelError, match=r"expert_gating_func = 2"):
        spec_of(tmp_path, metadata | {"llama.expert_gating_func": 2}, moe_tensors(4, FF))
    old = moe_tensors(4, FF) | {"blk.0.ffn_gate.0.weight": ones(FF, WIDTH)}
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.ffn_gate\.0\.weight"):
        spec_of(tmp_path, metadata, old)


def gemma_tensors(layers: int) -> dict[str, np.ndarray]:
    tensors = plain_tensors(layers)
    for i in range(layers):
        tensors |= {
            f"blk.{i}.attn_q_norm.weight": ones(HEAD_DIM),
            f"blk.{i}.attn_k_norm.weight": ones(HEAD_DIM),
            f"blk.{i}.post_attention_norm.weight": ones(WIDTH),
            f"blk.{i}.post_ffw_norm.weight": ones(WIDTH),
        }
    return tensors


def test_gemma3_alternates_local_and_global_layers(tmp_path: Path) -> None:
    metadata = plain_metadata("gemma3", 7) | {
        "gemma3.attention.sliding_window": 16,
        "gemma3.rope.freq_base": 1e6,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
    }
    spec = spec_of(tmp_path, metadata, gemma_tensors(7))
    assert spec.embedding.scale == math.sqrt(WIDTH)
    windows = [layer.attention.sliding_window for layer in spec.layers]
    assert windows == [16, 16, 16, 16, 16, None, 16]
    local, global_ = spec.layers[0].attention.rope, spec.layers[5].attention.rope
    assert (local.freq_base, local.linear_factor) == (10000, 1)
    assert (global_.freq_base, global_.linear_factor) == (1e6, 8)
    ffn = spec.layers[0].ffn
    assert isinstance(ffn, DenseFfnSpec) and ffn.activation is Activation.GELU_TANH
    assert ffn.post_norm is not None and spec.layers[0].attention.post_norm is not None

    stated = metadata | {"gemma3.attention.sliding_window_pattern": 2, "gemma3.rope.freq_base_swa": 5000.0}
    layers = spec_of(tmp_path, stated, gemma_tensors(7)).layers
    assert [layer.attention.sliding_window is None for layer in layers] == [False, True] * 3 + [False]
    assert layers[0].attention.rope.freq_base == 5000
    flags = metadata | {
        "gemma3.attention.sliding_window_pattern": [True, False, False, True, True, True, True]
    }
    layers = spec_of(tmp_path, flags, gemma_tensors(7)).layers
    assert [layer.attention.sliding_window is None for layer in layers][:4] == [False, True, True, False]


def test_gemma3_27b_scales_by_its_hidden_size(tmp_path: Path) -> None:
    metadata = plain_metadata("gemma3", 62) | {
        "gemma3.attention.key_length": HEAD_DIM,
        "gemma3.attention.head_count": 2,
        "gemma3.attention.head_count_kv": 2,
    }
    tensors = gemma_tensors(62)
    for i in range(62):
        tensors |= {
            f"blk.{i}.attn_q.weight": ones(2 * HEAD_DIM, WIDTH),
            f"blk.{i}.attn_output.weight": ones(WIDTH, 2 * HEAD_DIM),
        }
    spec = spec_of(tmp_path, metadata, tensors)
    assert spec.layers[0].attention.scale == pytest.approx((WIDTH / 2) ** -0.5)
    assert all(layer.attention.sliding_window is None for layer in spec.layers)  # the file has no window


def test_context_length_chooses_longrope_factors(tmp_path: Path) -> None:
    metadata = plain_metadata("phi3") | {
        "phi3.rope.scaling.type": "longrope",
        "phi3.rope.scaling.original_context_length": 32,
        "phi3.rope.scaling.attn_factor": 1.19,
    }
    tensors = plain_tensors() | {
        "rope_factors_long.weight": ones(HEAD_DIM // 2),
        "rope_factors_short.weight": ones(HEAD_DIM // 2),
    }
    for context, factors in ((None, "long"), (33, "long"), (32, "short")):
        rope = spec_of(tmp_path, metadata, tensors, context).layers[0].attention.rope
        assert rope.factors == f"rope_factors_{factors}.weight"
        assert rope.magnitude == pytest.approx(1.19)


def test_harmless_keys_are_accepted(tmp_path: Path) -> None:
    metadata = plain_metadata("llama") | {
        "llama.tensor_data_layout": "Meta AI original pth",
        "llama.attention.causal": True,
        "llama.attention.max_alibi_bias": 0.0,
        "llama.expert_count": 0,
        "llama.logit_scale": 1.0,
        "llama.rope.scaling.type": "none",
        "llama.rope.scaling.factor": 1.0,
        "llama.attention.value_length": HEAD_DIM,
        "general.quantized_by": "someone",
        "quantize.imatrix.entries_count": 224,
    }
    spec_of(tmp_path, metadata, plain_tensors())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.clamp_kqv", 8.0),
        ("attention.max_alibi_bias", 8.0),
        ("attention.causal", False),
        ("attention.sliding_window_pattern", 4),
        ("expert_count", 4),
        ("logit_scale", 0.5),
        ("pooling_type", 3),
        ("rope.dimension_sections", np.array([1, 2, 1, 0], np.int32)),
        ("rope.scaling.yarn_ext_factor", 0.5),
        ("something.new", 1),
        ("something.named", "x" * 200),
    ],
)
def test_a_key_that_is_not_honoured_is_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"model\.gguf.*qwen2\.{key}"):
        spec_of(tmp_path, plain_metadata("qwen2") | {f"qwen2.{key}": value}, plain_tensors())


def test_a_tensor_that_nothing_reads_is_refused_by_name(tmp_path: Path) -> None:
    for name in ("blk.0.attn_q_norm.weight", "blk.0.attn_norm.bias", "blk.2.ffn_up.weight", "v.patch.weight"):
        with pytest.raises(UnsupportedModelError, match=name):
            spec_of(tmp_path, plain_metadata("llama"), plain_tensors() | {name: ones(4, 4)})


@pytest.mark.parametrize("missing", list(plain_tensors(1)))
def test_a_missing_tensor_is_named(tmp_path: Path, missing: str) -> None:
    tensors = plain_tensors()
    shape = list(tensors.pop(missing).shape[::-1])
    with pytest.raises(CorruptDataError) as caught:
        spec_of(tmp_path, plain_metadata("llama"), tensors)
    assert repr(missing) in str(caught.value) and str(shape) in str(caught.value)


@pytest.mark.parametrize("wrong", list(plain_tensors(1)))
def test_a_wrong_shape_is_named_with_both_shapes(tmp_path: Path, wrong: str) -> None:
    tensors = plain_tensors()
    shape = tensors[wrong].shape[::-1]
    tensors[wrong] = ones(*tensors[wrong].shape[:-1], shape[0] + 1)
    with pytest.raises(CorruptDataError) as caught:
        spec_of(tmp_path, plain_metadata("llama"), tensors)
    message = str(caught.value)
    assert (
        repr(wrong) in message and str(list(shape)) in message and str([shape[0] + 1, *shape[1:]]) in message
    )


def test_the_embedding_must_fit_the_tokenizer(tmp_path: Path) -> None:
    metadata = plain_metadata("llama") | {"tokenizer.ggml.tokens": ["x"] * (VOCAB + 1)}
    with pytest.raises(CorruptDataError, match=r"token_embd.weight.*\[32, 40\].*\[32, 41\]"):
        spec_of(tmp_path, metadata, plain_tensors())


def test_a_tensor_type_that_is_not_read_is_refused_by_name(tmp_path: Path) -> None:
    metadata = plain_metadata("llama") | {"llama.embedding_length": 256, "llama.attention.key_length": 8}
    tensors = {"token_embd.weight": ones(VOCAB, 256), "output_norm.weight": ones(256)}
    for name, tensor in plain_tensors().items():
        if name.startswith("blk"):
            shape = tuple(
                256 if size == WIDTH and "attn_output" not in name else size for size in tensor.shape
            )
            tensors[name] = ones(*shape)
    for i in range(LAYERS):
        tensors[f"blk.{i}.attn_q.weight"] = ones(WIDTH, 256)
        tensors[f"blk.{i}.attn_output.weight"] = ones(256, WIDTH)
    tensors["blk.1.attn_k.weight"] = ones(KV_WIDTH, 256)
    kinds = {"blk.1.attn_k.weight": GGMLQuantizationType.TQ2_0}
    path = write_gguf(tmp_path / "model.gguf", metadata, tensors, quantization=kinds)
    with (
        GGUFFile.open(path) as file,
        pytest.raises(UnsupportedModelError, match=r"blk\.1\.attn_k\.weight.*TQ2_0"),
    ):
        build_spec(file)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"general.architecture": "mamba"}, UnsupportedModelError, "'mamba' is not supported.*llama"),
        ({"general.type": "adapter"}, UnsupportedModelError, "'adapter'"),
        ({"llama.rope.scaling.type": "dynamic"}, UnsupportedModelError, "rope.scaling.type.*'dynamic'"),
        ({"llama.attention.value_length": 4}, UnsupportedModelError, "value_length"),
        ({"llama.block_count": 4_000_000_000}, CorruptDataError, "block_count"),
        ({"llama.attention.head_count": 0}, CorruptDataError, "head_count.* 0, expected is at least 1"),
        ({"llama.attention.head_count": "4"}, CorruptDataError, "head_count.* str"),
        ({"llama.attention.head_count_kv": 3}, CorruptDataError, "4 heads, no multiple of its 3"),
        ({"llama.attention.layer_norm_rms_epsilon": math.nan}, CorruptDataError, "epsilon.* nan"),
        ({"llama.rope.dimension_count": 7}, CorruptDataError, "dimension_count.* 7"),
        ({"llama.rope.dimension_count": 16}, CorruptDataError, "dimension_count.* 16"),
        ({"llama.rope.freq_base": 0.0}, CorruptDataError, "freq_base"),
        ({"llama.rope.scaling.factor": -2.0}, CorruptDataError, "factor"),
    ],
)
def test_bad_values_are_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[PipeLLMError], message: str
) -> None:
    with pytest.raises(error, match=message):
        spec_of(tmp_path, plain_metadata("llama") | changes, plain_tensors())
