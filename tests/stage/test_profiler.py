"""What the coordinator plans with: measured times, and bytes as the backend stores them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from common.gguf.reader import GGUFFile
from stage import profiler
from stage.backends.reference import ReferenceBackend
from stage.model.registry import build_spec
from stage.runner import Runner
from tests.gguf_files import write_gguf, write_tiny_llama


def test_measures_a_layer_and_counts_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "_EVICT_BYTES", 1 << 20)
    with GGUFFile.open(write_tiny_llama(tmp_path / "tiny.gguf", layers=5)) as file:
        spec = build_spec(file)
        costs = profiler.measure(ReferenceBackend(memory_bytes=1 << 30), file, spec)
        runner = Runner.load(
            ReferenceBackend(), file, spec, 0, 5, embedding=True, head=True, num_kv_blocks=3, kv_block_size=8
        )
    assert costs.fingerprint == file.fingerprint
    assert (costs.num_layers, costs.context_length) == (5, 512)
    assert costs.embedding_bytes + costs.head_bytes + sum(costs.layer_weight_bytes) == runner.weight_bytes
    assert sum(costs.layer_kv_bytes_per_token) * 3 * 8 == runner.kv.nbytes
    assert costs.memory_budget_bytes == 1 << 30 and costs.kv_block_size == 0
    # A layer of this size takes microseconds to milliseconds.
    assert 1e-6 < costs.layer_decode_s < 1
    per_layer_byte = costs.layer_decode_s / costs.layer_weight_bytes[2]
    assert costs.head_s == pytest.approx(costs.head_bytes * per_layer_byte)
    assert 0 < costs.embedding_s < costs.head_s


def test_experts_that_a_row_does_not_go_through_cost_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head is rated by the bytes that one row read, of a layer with one of its eight experts."""
    monkeypatch.setattr(profiler, "_EVICT_BYTES", 1 << 20)
    width, experts = 32, 8
    shapes = {
        "token_embd.weight": (40, width),
        "output_norm.weight": (width,),
        "blk.0.attn_norm.weight": (width,),
        "blk.0.ffn_norm.weight": (width,),
        "blk.0.ffn_gate_inp.weight": (experts, width),
    }
    shapes |= {f"blk.0.attn_{name}.weight": (width, width) for name in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{name}_exps.weight": (experts, width, width) for name in ("gate", "up", "down")}
    metadata = {
        "llama.context_length": 64,
        "llama.embedding_length": width,
        "llama.block_count": 1,
        "llama.feed_forward_length": width,
        "llama.attention.head_count": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.expert_count": experts,
        "llama.expert_used_count": 1,
    }
    tensors = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    with GGUFFile.open(write_gguf(tmp_path / "moe.gguf", metadata, tensors)) as file:
        costs = profiler.measure(ReferenceBackend(), file, build_spec(file))
    read_bytes = 4 * (2 * width + experts * width + 4 * width**2 + 3 * width**2)
    assert costs.layer_weight_bytes[0] == read_bytes + 4 * (3 * (experts - 1) * width**2)
    assert costs.head_s == pytest.approx(costs.head_bytes * costs.layer_decode_s / read_bytes)
