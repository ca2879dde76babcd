"""Writes GGUF models of real shapes with random finite weights, for measurements of speed alone.

    python benchmarks/synth_model.py llama-8b q4_k_m /tmp/llama-8b-q4_k_m.gguf

Speed does not depend on what the weights are as long as they are finite and the activations stay so; blocks
come from a random pool, with scales that give weights of about 0.02.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUFWriter
from gguf import GGMLQuantizationType as GGMLType


@dataclass(frozen=True)
class Shape:
    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int  # of each expert, where there are any
    vocab_size: int
    experts: tuple[int, int] = (0, 0)  # how many, and how many a row meets


SHAPES = {
    "llama-1b": Shape("llama", 16, 2048, 32, 8, 64, 8192, 128256),
    "llama-3b": Shape("llama", 28, 3072, 24, 8, 128, 8192, 128256),
    "llama-8b": Shape("llama", 32, 4096, 32, 8, 128, 14336, 128256),
    "llama-70b": Shape("llama", 80, 8192, 64, 8, 128, 28672, 128256),
    "qwen-14b": Shape("llama", 48, 5120, 40, 8, 128, 13824, 152064),
    "qwen-32b": Shape("llama", 64, 5120, 40, 8, 128, 27648, 152064),
    "moe-30b": Shape("llama", 48, 2048, 32, 4, 128, 768, 151936, (128, 8)),
}

# The type of most weights, that of the head, and that of attn_v and ffn_down in half of the layers.
RECIPES = {
    "q4_k_m": (GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.Q6_K),
    "q8_0": (GGMLType.Q8_0, GGMLType.Q8_0, GGMLType.Q8_0),
    "q6_k": (GGMLType.Q6_K, GGMLType.Q6_K, GGMLType.Q6_K),
    "q4_0": (GGMLType.Q4_0, GGMLType.Q6_K, GGMLType.Q4_0),
    "f16": (GGMLType.F16, GGMLType.F16, GGMLType.F16),
    "bf16": (GGMLType.BF16, GGMLType.BF16, GGMLType.BF16),
    "f32": (GGMLType.F32, GGMLType.F32, GGMLType.F32),
}

# Where a block's f16 scales lie, and how large they are.
_SCALES = {
    GGMLType.Q4_K: ((0, 8e-5), (2, 6e-4)),
    GGMLType.Q6_K: ((208, 2e-5),),
    GGMLType.Q8_0: ((0, 2e-4),),
    GGMLType.Q4_0: ((0, 3e-3),),
}
_POOL_BLOCKS = 1 << 15


def uses_better_type(layer: int, num_layers: int) -> bool:
    """Whether a _M recipe gives attn_v and ffn_down of this layer the larger type: the first and last
    eighth, and every third between."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2


def tensors(shape: Shape, recipe: str) -> Iterator[tuple[str, GGMLType, tuple[int, ...]]]:
    """(name, type, shape) of every tensor, in the order of the file."""
    base, head, better = RECIPES[recipe]
    hidden = shape.hidden_size
    heads, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield "token_embd.weight", base, (shape.vocab_size, hidden)
    yield "output_norm.weight", GGMLType.F32, (hidden,)
    yield "output.weight", head, (shape.vocab_size, hidden)
    for i in range(shape.num_layers):
        larger = better if uses_better_type(i, shape.num_layers) else base
        yield f"blk.{i}.attn_norm.weight", GGMLType.F32, (hidden,)
        yield f"blk.{i}.attn_q.weight", base, (heads, hidden)
        yield f"blk.{i}.attn_k.weight", base, (kv, hidden)
        yield f"blk.{i}.attn_v.weight", larger, (kv, hidden)
        yield f"blk.{i}.attn_output.weight", base, (hidden, heads)
        yield f"blk.{i}.ffn_norm.weight", GGMLType.F32, (hidden,)
        stack, suffix = shape.experts[:1] if shape.experts[0] else (), "_exps" if shape.experts[0] else ""
        if stack:
            yield f"blk.{i}.ffn_gate_inp.weight", GGMLType.F32, (*stack, hidden)
        yield f"blk.{i}.ffn_gate{suffix}.weight", base, (*stack, shape.ffn_size, hidden)
        yield f"blk.{i}.ffn_up{suffix}.weight", base, (*stack, shape.ffn_size, hidden)
        yield f"blk.{i}.ffn_down{suffix}.weight", larger, (*stack, hidden, shape.ffn_size)


class Pool:
    """Random tensors; those of one type and shape are the same."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)
        self._made: dict[tuple[GGMLType, tuple[int, ...]], np.ndarray] = {}

    def tensor(self, ggml_type: GGMLType, shape: tuple[int, ...]) -> np.ndarray:
        """f32 or f16, or for matrices the bytes of another type (uint8 [..., rows, row_bytes])."""
        key = (ggml_type, shape)
        if key not in self._made:
            self._made[key] = self._make(ggml_type, shape)
        return self._made[key]

    def _make(self, ggml_type: GGMLType, shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) == 1:
            return (1 + 0.1 * self._rng.standard_normal(shape)).astype(np.float32)
        if ggml_type in (GGMLType.F32, GGMLType.F16, GGMLType.BF16):
            values = (self._rng.standard_normal(1 << 20) * 0.02).astype(np.float32)
            if ggml_type == GGMLType.F16:
                values = values.astype(np.float16)
            if ggml_type == GGMLType.BF16:
                halves = (values.view(np.uint32) >> 16).astype(np.uint16)
                return np.resize(halves, shape).view(np.uint8)
            return np.resize(values, shape)
        block_elements, block_bytes = GGML_QUANT_SIZES[ggml_type]
        pool = self._rng.integers(0, 256, (_POOL_BLOCKS, block_bytes), dtype=np.uint8)
        for at, size in _SCALES[ggml_type]:
            scales = (size * self._rng.uniform(0.5, 1.5, (_POOL_BLOCKS, 1))).astype(np.float16)
            pool[:, at : at + 2] = scales.view(np.uint8)
        blocks = int(np.prod(shape)) // block_elements
        return np.resize(pool, (blocks, block_bytes)).reshape(*shape[:-1], -1)


def write(path: Path, shape: Shape, recipe: str) -> None:
    writer = GGUFWriter(path, shape.architecture)
    writer.add_context_length(131072)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.ffn_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab_size)
    if shape.experts[0]:
        writer.add_expert_count(shape.experts[0])
        writer.add_expert_used_count(shape.experts[1])
    writer.add_tokenizer_model("no_vocab")
    pool = Pool()
    for name, ggml_type, tensor_shape in tensors(shape, recipe):
        plain = ggml_type in (GGMLType.F32, GGMLType.F16)
        writer.add_tensor(name, pool.tensor(ggml_type, tensor_shape), raw_dtype=None if plain else ggml_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("path", type=Path)
    args = parser.parse_args()
    write(args.path, SHAPES[args.shape], args.recipe)


if __name__ == "__main__":
    main()
