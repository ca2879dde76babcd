"""A whole model on one backend for measurements: its prepared parts, and what a step took and moved.

Knows no clock of its own beyond the host's; a GPU's events are backends/cuda/profiling.py's.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from common.errors import OutOfCapacityError
from common.gguf.reader import GGUFFile
from common.sizes import gib
from stage.backends.base import Backend, make_batch
from stage.model.spec import LayerSpec, ModelSpec, MoeFfnSpec, SpecPart, tensor_refs
from stage.weights.loader import raw_tensors

BLOCK_SIZE = 32


@dataclass(frozen=True)
class Span:
    """What one kernel or one part of the model took in a step, all its calls together."""

    name: str
    calls: int
    seconds: float
    bytes: int  # of weights and KV cache that it reads; 0: not counted

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Phase:
    """A step of `tokens` rows of one sequence after `depth` tokens of context."""

    tokens: int
    depth: int
    seconds: float  # as the stage runs it: decode on a GPU as a graph
    bytes: int  # of weights (read once) and KV cache (by decode rows)
    flops: float
    parts: tuple[Span, ...]  # embedding, layers, head
    eager_s: float | None = None  # decode on a GPU: launched kernel by kernel
    issue_s: float | None = None  # the same: the host's time to issue a replay
    kernels: tuple[Span, ...] = ()  # a GPU's
    num_launches: int = 0

    @property
    def kernel_s(self) -> float:
        return sum(span.seconds for span in self.kernels)


class Model:
    """All of a model, prepared, with a KV cache for one sequence of `max_context` tokens."""

    def __init__(self, backend: Backend, file: GGUFFile, spec: ModelSpec, max_context: int) -> None:
        """Raises OutOfCapacityError, with both numbers, where it does not fit; UnsupportedModelError."""
        backend.check(spec)
        self.backend, self.spec = backend, spec
        parts: list[SpecPart] = [spec.embedding, *spec.layers, spec.head]
        raw = [raw_tensors(file, tensor_refs(part)) for part in parts]
        stored = [backend.stored_bytes(part, tensors) for part, tensors in zip(parts, raw, strict=True)]
        self.num_blocks = -(-max_context // BLOCK_SIZE)
        self.kv_bytes_per_token = [backend.kv_bytes_per_token(layer) for layer in spec.layers]
        kv_bytes = self.num_blocks * BLOCK_SIZE * sum(self.kv_bytes_per_token)
        needed, free = sum(stored) + kv_bytes, backend.memory_budget_bytes()
        if needed > free:
            raise OutOfCapacityError(
                f"weights and a KV cache for {max_context} tokens take {gib(needed)}, {gib(free)} are free "
                f"for them on {backend.device}: {gib(needed - free)} are missing; take fewer tokens, or a "
                "smaller quantisation of the model"
            )
        self.weight_bytes = sum(stored)
        # What a row reads: a row of the embedding, the experts it goes through, all of the head.
        shares = [active_share(file, layer) for layer in spec.layers]
        self.row_bytes = [
            stored[0] // spec.vocab_size,
            *(int(size * share) for size, share in zip(stored[1:-1], shares, strict=True)),
            stored[-1],
        ]
        self.layer_elements = [
            elements(file, layer) * share for layer, share in zip(spec.layers, shares, strict=True)
        ]
        self.head_elements = spec.vocab_size * spec.hidden_size
        self.embedding = backend.prepare_embedding(spec.embedding, raw[0])
        self.layers = [
            backend.prepare_layer(layer, tensors)
            for layer, tensors in zip(spec.layers, raw[1:-1], strict=True)
        ]
        self.head = backend.prepare_head(spec.head, raw[-1])
        self.kv: Any = backend.allocate_kv(spec.layers, self.num_blocks, BLOCK_SIZE)
        self.block_table = np.arange(self.num_blocks, dtype=np.int32)
        self.largest_tensors = sorted(
            (tensor.data for tensors in raw for tensor in tensors.values()), key=lambda data: -data.nbytes
        )[:8]

    def random_tokens(self, count: int) -> np.ndarray:
        return np.random.default_rng(0).integers(0, self.spec.vocab_size, count, dtype=np.int32)

    def flops(self, tokens: int, depth: int) -> float:
        """Of matrix products and attention, a multiplication and an addition counted as two; the head for
        one row."""
        products = 2.0 * (tokens * sum(self.layer_elements) + self.head_elements)
        attended = 0.0
        for layer in self.spec.layers:
            attention = layer.attention
            lengths = np.arange(depth + 1, depth + tokens + 1, dtype=np.float64)
            if attention.sliding_window:
                lengths = np.minimum(lengths, attention.sliding_window)
            attended += 4.0 * attention.num_heads * attention.head_dim * float(lengths.sum())
        return products + attended

    def kv_bytes(self, layer: int, depth: int) -> int:
        """What one row reads of a layer's cache after `depth` tokens."""
        window = self.spec.layers[layer].attention.sliding_window or depth + 1
        return self.kv_bytes_per_token[layer] * min(depth + 1, window)

    def part_bytes(self, tokens: int, depth: int) -> list[int]:
        """Of each part: weights once, and the cache where a single row reads it."""
        cached = [self.kv_bytes(i, depth) if tokens == 1 else 0 for i in range(len(self.layers))]
        sizes = [self.row_bytes[0] * tokens, *self.row_bytes[1:]]
        return [size + kv for size, kv in zip(sizes, [0, *cached, 0], strict=True)]

    def part_names(self) -> list[str]:
        return ["embedding", *(f"layer {layer.index}" for layer in self.spec.layers), "head"]


def host_phase(model: Model, tokens: int, depth: int, repeats: int) -> Phase:
    """A step on a backend whose calls return when their work is done; medians."""
    ids = model.random_tokens(tokens)
    batch = make_batch([(depth, tokens, model.block_table)], BLOCK_SIZE)

    def step() -> list[float]:
        times = [time.perf_counter()]
        hidden_states = model.backend.embed(model.embedding, ids)
        times.append(time.perf_counter())
        for layer in model.layers:
            hidden_states = model.backend.run_layer(layer, model.kv, batch, hidden_states)
            times.append(time.perf_counter())
        model.backend.logits(model.head, hidden_states[-1:])
        times.append(time.perf_counter())
        return times

    step()  # pages in, memory taken
    runs = [step() for _ in range(repeats)]
    columns = zip(*(np.diff(run) for run in runs), strict=True)
    part_bytes = model.part_bytes(tokens, depth)
    parts = [
        Span(name, 1, float(statistics.median(column)), size)
        for name, column, size in zip(model.part_names(), columns, part_bytes, strict=True)
    ]
    return Phase(
        tokens=tokens,
        depth=depth,
        seconds=statistics.median(run[-1] - run[0] for run in runs),
        bytes=sum(part_bytes),
        flops=model.flops(tokens, depth),
        parts=tuple(parts),
    )


def torch_read_rate(size_bytes: int = 256 << 20, repeats: int = 5) -> float:
    """Bytes a second at which torch adds up a large tensor on this host."""
    data = torch.ones(size_bytes // 4)
    return size_bytes / fastest_s(lambda: data.sum().item(), repeats)


def fastest_s(run: Callable[[], Any], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def active_share(file: GGUFFile, layer: LayerSpec) -> float:
    """The share of a layer's weights that one row reads: not the experts it does not go through."""
    if not isinstance(layer.ffn, MoeFfnSpec):
        return 1.0
    experts = elements(file, (layer.ffn.gate, layer.ffn.up, layer.ffn.down))
    unused = 1 - layer.ffn.num_experts_used / layer.ffn.num_experts
    return 1 - unused * experts / elements(file, layer)


def elements(file: GGUFFile, part: Any) -> int:
    return sum(math.prod(raw.shape) for raw in raw_tensors(file, tensor_refs(part)).values())


def merged(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Spans of one name as one, the longest first."""
    by_name: dict[str, list[Span]] = {}
    for span in spans:
        by_name.setdefault(span.name, []).append(span)
    sums = [
        Span(name, sum(s.calls for s in same), sum(s.seconds for s in same), sum(s.bytes for s in same))
        for name, same in by_name.items()
    ]
    return tuple(sorted(sums, key=lambda span: -span.seconds))
