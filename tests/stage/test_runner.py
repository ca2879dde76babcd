"""A stage's range of layers: split or whole, in chunks or at once, alone or in a batch, the same logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from gguf import GGMLQuantizationType

from common.errors import CancelledError, InvalidRequestError, NotReadyError, OutOfCapacityError
from common.gguf.reader import GGUFFile
from common.sizes import gib
from stage.backends.base import make_batch
from stage.backends.reference import ReferenceBackend
from stage.model.registry import build_spec
from stage.model.spec import ModelSpec
from stage.runner import Runner
from tests.gguf_files import write_tiny_llama

LAYERS, VOCAB, BLOCK_SIZE, NUM_BLOCKS = 4, 512, 8, 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[GGUFFile, ModelSpec]]:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_llama(path, layers=LAYERS, quantization=GGMLQuantizationType.Q8_0)
    with GGUFFile.open(path) as file:
        yield file, build_spec(file)


def load(model: tuple[GGUFFile, ModelSpec], start: int = 0, end: int = LAYERS, **changes: object) -> Runner:
    arguments: dict[str, object] = {
        "embedding": start == 0,
        "head": end == LAYERS,
        "num_kv_blocks": NUM_BLOCKS,
        "kv_block_size": BLOCK_SIZE,
    }
    return Runner.load(ReferenceBackend(), *model, start, end, **(arguments | changes))  # type: ignore[arg-type]


def tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, count).astype(np.int32)


def through_a_link(hidden_states: torch.Tensor) -> torch.Tensor:
    """The same values at an address that no allocator would choose."""
    memory = np.empty(hidden_states.numel() + 1, np.float32)[1:]
    copied = torch.from_numpy(memory).view(hidden_states.shape)
    return copied.copy_(hidden_states)


def forward(runners: Sequence[Runner], rows: Sequence[tuple[int, np.ndarray, np.ndarray]]) -> torch.Tensor:
    """Logits of all rows of (start position, token ids, block table) triples."""
    batch = make_batch([(start, len(ids), table) for start, ids, table in rows], BLOCK_SIZE)
    carried: np.ndarray | torch.Tensor = np.concatenate([ids for _, ids, _ in rows])
    for runner in runners:
        carried = through_a_link(runner.forward(batch, carried))
    assert isinstance(carried, torch.Tensor)
    return runners[-1].logits(carried, np.arange(batch.num_rows))


TABLE = np.array([5, 2, 9, 0, 31, 7], np.int32)


@pytest.mark.parametrize("cuts", [(0, 2, 4), (0, 1, 4), (0, 1, 3, 4), (0, 1, 2, 3, 4)])
def test_split_equals_whole_bit_for_bit(model: tuple[GGUFFile, ModelSpec], cuts: tuple[int, ...]) -> None:
    whole = [load(model)]
    split = [load(model, start, end) for start, end in pairwise(cuts)]
    assert [runner.has_embedding for runner in split] == [True] + [False] * (len(split) - 1)
    assert [runner.has_head for runner in split] == [False] * (len(split) - 1) + [True]
    ids = tokens(30)
    for start, end in ((0, 20), (20, 21), (21, 30)):
        rows = [(start, ids[start:end], TABLE)]
        assert torch.equal(forward(whole, rows), forward(split, rows))
    assert sum(runner.kv.nbytes for runner in split) == whole[0].kv.nbytes
    assert sum(runner.weight_bytes for runner in split) == whole[0].weight_bytes


@pytest.mark.parametrize("chunk", [1, 2, 7, 8, 9, 39, 40])
def test_chunks_of_any_size_give_the_same(model: tuple[GGUFFile, ModelSpec], chunk: int) -> None:
    ids = tokens(40)
    expected = forward([load(model)], [(0, ids, TABLE)])
    runner = load(model)
    parts = [forward([runner], [(start, ids[start : start + chunk], TABLE)]) for start in range(0, 40, chunk)]
    assert torch.allclose(torch.cat(parts), expected, atol=1e-4, rtol=0)


def test_a_batch_gives_each_sequence_what_it_gets_alone(model: tuple[GGUFFile, ModelSpec]) -> None:
    lengths = (1, 20, 9, 33)
    tables = np.split(np.random.default_rng(1).permutation(NUM_BLOCKS)[:24].astype(np.int32), 4)
    prompts = [tokens(length, seed) for seed, length in enumerate(lengths)]
    together = [load(model)]
    forward(
        together, [(0, ids[:-1], table) for ids, table in zip(prompts, tables, strict=True) if len(ids) > 1]
    )
    rows = [(len(ids) - 1, ids[-1:], table) for ids, table in zip(prompts, tables, strict=True)]
    batched = forward(together, rows)
    for ids, logits in zip(prompts, batched, strict=True):
        alone = forward([load(model)], [(0, ids, TABLE)])[-1]
        assert torch.allclose(logits, alone, atol=1e-4, rtol=0)


def test_logits_of_some_rows(model: tuple[GGUFFile, ModelSpec]) -> None:
    runner = load(model)
    batch = make_batch([(0, 10, TABLE)], BLOCK_SIZE)
    hidden_states = runner.forward(batch, tokens(10))
    every = runner.logits(hidden_states, np.arange(10))
    some = runner.logits(hidden_states, np.array([9, 3]))
    assert every.shape == (10, VOCAB) and every.dtype == torch.float32
    assert torch.allclose(some, every[[9, 3]], atol=1e-5)


def test_progress_ends_at_the_weights_bytes(model: tuple[GGUFFile, ModelSpec]) -> None:
    seen: list[tuple[int, int]] = []
    runner = load(model, 1, 3, on_progress=lambda done, total: seen.append((done, total)))
    assert [total for _, total in seen] == [runner.weight_bytes] * 2
    assert seen[0][0] * 2 == seen[1][0] == runner.weight_bytes  # two layers of equal size


def test_cancelling_ends_a_load(model: tuple[GGUFFile, ModelSpec]) -> None:
    seen: list[int] = []
    with pytest.raises(CancelledError):
        load(model, on_progress=lambda done, _: seen.append(done), cancelled=lambda: len(seen) == 2)
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("start", "end", "changes"),
    [
        (2, 2, {}),
        (3, 2, {}),
        (0, LAYERS + 1, {}),
        (1, 3, {"embedding": True}),
        (1, 3, {"head": True}),
        (0, 2, {"num_kv_blocks": 0}),
        (0, 2, {"kv_block_size": 0}),
    ],
)
def test_impossible_ranges_are_refused(
    model: tuple[GGUFFile, ModelSpec], start: int, end: int, changes: dict[str, object]
) -> None:
    with pytest.raises(InvalidRequestError):
        load(model, start, end, **changes)


def test_what_does_not_fit_is_refused_with_what_is_missing(model: tuple[GGUFFile, ModelSpec]) -> None:
    needed = load(model).weight_bytes

    def refusal(memory: int, num_blocks: int) -> str:
        with pytest.raises(OutOfCapacityError) as caught:
            Runner.load(
                ReferenceBackend(memory), *model, 0, LAYERS, embedding=True, head=True,
                num_kv_blocks=num_blocks, kv_block_size=BLOCK_SIZE,
            )  # fmt: skip
        return str(caught.value)

    said = refusal(needed - 2**20, 1)
    assert f"{gib(needed)} of weights" in said and f"{gib(needed - 2**20)} are free" in said
    assert "MiB are missing. Lower" in said  # no KV cache would do
    per_block = BLOCK_SIZE * sum(ReferenceBackend().kv_bytes_per_token(layer) for layer in model[1].layers)
    said = refusal(needed + 3 * per_block, NUM_BLOCKS)
    assert f"{gib((NUM_BLOCKS - 3) * per_block)} are missing" in said
    assert f"a KV cache of {3 * BLOCK_SIZE} tokens would fit" in said


def test_inputs_are_checked(model: tuple[GGUFFile, ModelSpec]) -> None:
    batch = make_batch([(0, 3, TABLE)], BLOCK_SIZE)
    with pytest.raises(InvalidRequestError, match=r"\(4,\), expected is \(3,\)"):
        load(model).forward(batch, tokens(4))
    with pytest.raises(InvalidRequestError, match=r"\(3, 65\), expected is \(3, 64\)"):
        load(model, 1).forward(batch, torch.zeros(3, 65))
    for token in (-1, VOCAB):
        with pytest.raises(InvalidRequestError, match="token ids"):
            load(model).forward(batch, np.array([0, token, 1], np.int32))


def test_kv_cache_becomes_resident_as_it_is_used(model: tuple[GGUFFile, ModelSpec]) -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    runner = load(model, num_kv_blocks=100_000)
    forward([runner], [(0, tokens(40), TABLE)])
    assert runner.kv.nbytes == LAYERS * 2 * 4 * 32 * 100_000 * BLOCK_SIZE  # 800 MB
    assert process.memory_info().rss - before < 64 << 20
    runner.close()


def test_the_file_may_be_closed_after_loading(tmp_path: Path) -> None:
    with GGUFFile.open(write_tiny_llama(tmp_path / "tiny.gguf", layers=LAYERS)) as file:
        runner = load((file, build_spec(file)))
        expected = forward([runner], [(0, tokens(5), TABLE)])
    assert torch.equal(forward([runner], [(0, tokens(5), TABLE)]), expected)
    for _ in range(2):
        runner.close()
    with pytest.raises(NotReadyError):
        forward([runner], [(0, tokens(5), TABLE)])
