"""Whole models on the GPU: the golden logits, chunks and batches, and graphs against eager steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from common.gguf.reader import GGUFFile
from stage.backends.base import Batch, Decoder, DecodeRow, make_batch
from stage.model.registry import build_spec
from stage.model.spec import tensor_refs
from stage.sampler import SamplingOptions
from stage.weights.loader import raw_tensors

pytestmark = pytest.mark.gpu

ARCHITECTURES = [
    "gemma3-window16",
    "llama-gqa-ropefreqs",
    "llama-moe-8x2",
    "llama-tied-linear",
    "phi3-longrope",
    "qwen2-bias",
    "qwen2-yarn",
    "qwen3-qknorm",
    "qwen3moe-8x3",
]
GREEDY = SamplingOptions(
    temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0, repeat_penalty=1.0, repeat_last_n=64,
    presence_penalty=0.0, frequency_penalty=0.0, seed=1,
)  # fmt: skip
STORIES = ["stories260K-f32", "stories260K-f16", "stories260K-q8_0", "stories260K-q4_0"]


class Model:
    """A whole model on one backend, its sequences' blocks one after the other."""

    def __init__(
        self, path: Path, context: int, block_size: int = 16, num_blocks: int = 64, graphs: bool = True
    ) -> None:
        from stage.backends.cuda.backend import CudaBackend

        file = GGUFFile.open(path)
        spec = build_spec(file, context)
        self.spec = spec
        self.backend = CudaBackend(torch.device("cuda", 0), graphs)
        self.backend.check(spec)
        self.block_size = block_size
        self.embedding = self.backend.prepare_embedding(
            spec.embedding, raw_tensors(file, tensor_refs(spec.embedding))
        )
        self.layers = [
            self.backend.prepare_layer(layer, raw_tensors(file, tensor_refs(layer))) for layer in spec.layers
        ]
        self.head = self.backend.prepare_head(spec.head, raw_tensors(file, tensor_refs(spec.head)))
        self.kv = self.backend.allocate_kv(spec.layers, num_blocks, block_size)

    def forward(self, sequences: list[tuple[int, list[int], np.ndarray]]) -> torch.Tensor:
        """(start position, tokens, block table) each -> logits of all rows, f32 [rows, vocab] on the host."""
        batch = make_batch([(start, len(ids), table) for start, ids, table in sequences], self.block_size)
        tokens = np.concatenate([np.asarray(ids, np.int32) for _, ids, _ in sequences])
        return self.backend.logits(self.head, self.hidden_states(batch, tokens)).cpu()

    def hidden_states(self, batch: Batch, tokens: np.ndarray) -> torch.Tensor:
        x = self.backend.embed(self.embedding, tokens)
        for layer in self.layers:
            x = self.backend.run_layer(layer, self.kv, batch, x)
        return x

    def decoder(self, max_context: int) -> Decoder:
        return self.backend.decoder(self.embedding, self.layers, self.head, self.kv, max_context)


def files(cases: Path, name: str) -> tuple[Path, list[int], np.ndarray]:
    folder = "stories260K" if name.startswith("stories") else "architectures"
    ids = np.loadtxt(cases / "logits" / "IDS", dtype=np.int64).reshape(-1).tolist()
    golden = np.fromfile(cases / "logits" / f"{name}.f32", "<f4").reshape(len(ids), -1)
    return cases / "gguf" / folder / f"{name}.gguf", ids, golden


def kl(want: np.ndarray, got: np.ndarray) -> np.ndarray:
    """KL divergence at each position, nats."""
    p = torch.from_numpy(want).double().log_softmax(-1)
    q = torch.from_numpy(np.ascontiguousarray(got)).double().log_softmax(-1)
    divergence: np.ndarray = (p.exp() * (p - q)).sum(-1).numpy()
    return divergence


@pytest.mark.parametrize("name", ARCHITECTURES + STORIES)
def test_golden_logits(cases: Path, name: str) -> None:
    """Prefill of all, of chunks, and one by one as decode: near the float32 meaning each time."""
    path, ids, golden = files(cases, name)
    model = Model(path, context=256)
    blocks = np.arange(16, dtype=np.int32)
    for chunks in ([80], [70, 10], [33, 40, 7], [1] * 80):
        rows, at = [], 0
        for chunk in chunks:
            rows.append(model.forward([(at, ids[at : at + chunk], blocks)]).numpy())
            at += chunk
        got = np.concatenate(rows)
        divergence = kl(golden, got)
        # Where two experts' shares all but tie, another rounding takes the other one: that place is another
        # model.
        if "moe" in name:
            divergence = np.sort(divergence)[:-2]
        assert divergence.mean() < 2e-5, chunks[0]
        gaps = np.sort(golden, axis=1)[:, -1] - np.sort(golden, axis=1)[:, -2]
        differs = got.argmax(1) != golden.argmax(1)
        assert not (differs & (gaps > 0.05)).any()


@pytest.mark.parametrize("name", ["llama-gqa-ropefreqs", "qwen3moe-8x3", "gemma3-window16"])
def test_sequences_of_a_mixed_batch_do_not_mix(cases: Path, name: str) -> None:
    path, ids, _ = files(cases, name)
    model = Model(path, context=256)
    tables = [np.arange(16 * i, 16 * i + 16, dtype=np.int32)[::-1].copy() for i in range(3)]
    alone = model.forward([(0, ids, tables[0])])
    model.forward([(0, ids[:50], tables[1]), (0, ids[:20], tables[2])])
    mixed = model.forward([(50, ids[50:51], tables[1]), (20, ids[20:60], tables[2]), (0, ids[:7], tables[0])])
    want = torch.cat((alone[50:51], alone[20:60], alone[:7]))
    assert float((mixed - want).abs().max()) < 0.01 * float(want.abs().max())


@pytest.mark.parametrize("count", [3, 12])
@pytest.mark.parametrize(
    "name", ["llama-gqa-ropefreqs", "qwen3moe-8x3", "gemma3-window16", "stories260K-q8_0"]
)
def test_graphs_and_eager_give_the_same_bits(cases: Path, name: str, count: int) -> None:
    path, ids, _ = files(cases, name)
    tokens = {}
    for graphs in (False, True):
        model = Model(path, context=256, num_blocks=16 * count, graphs=graphs)
        tables = [np.arange(16 * i, 16 * i + 16, dtype=np.int32) for i in range(count)]
        lengths = [(5, 40, 21)[i % 3] + i // 3 for i in range(count)]
        for table, length in zip(tables, lengths, strict=True):
            model.forward([(0, ids[:length], table)])
        decoder = model.decoder(256)
        drawn = []
        for start in range(0, 60, 20):
            rows = [
                DecodeRow(index, length + start, ids[: length + 1] if start == 0 else [], table, GREEDY)
                for index, (length, table) in enumerate(zip(lengths, tables, strict=True))
            ]
            assert decoder.continues(rows) == (start > 0)
            drawn.append(decoder.issue(rows, 20))
        keys = [model.kv.keys[layer.index][: 16 * count].clone() for layer in model.spec.layers]
        tokens[graphs] = [step for draws in drawn for step in draws.wait()], keys
    assert tokens[False][0] == tokens[True][0]
    assert all(torch.equal(a, b) for a, b in zip(tokens[False][1], tokens[True][1], strict=True))


@pytest.mark.parametrize("name", ["llama-gqa-ropefreqs", "qwen3moe-8x3", "gemma3-window16"])
def test_a_part_replayed_gives_the_same_bits_as_layer_by_layer(cases: Path, name: str) -> None:
    path, ids, _ = files(cases, name)
    model = Model(path, context=256)
    half = len(model.layers) // 2
    table = np.arange(16, dtype=np.int32)
    parts = [
        model.backend.replayer(model.embedding, model.layers[:half], model.kv, 256),
        model.backend.replayer(None, model.layers[half:], model.kv, 256),
    ]
    for position in range(40):
        tokens = np.asarray(ids[position : position + 1], np.int32)
        batch = make_batch([(position, 1, table)], 16)
        want = model.hidden_states(batch, tokens)
        got: np.ndarray | torch.Tensor = tokens
        for part in parts:
            assert part is not None and part.takes(batch)
            got = part.run(batch, got)
        assert torch.equal(torch.as_tensor(got), want)
