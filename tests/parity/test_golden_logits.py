"""Golden logits: every architecture and tensor type of the cases, whole, split and in chunks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from common.gguf.reader import GGUFFile
from tests.parity.running import Ring

CONTEXT = 256
ARCHITECTURES = (
    "gemma3-window16",
    "llama-gqa-ropefreqs",
    "llama-moe-8x2",
    "llama-tied-linear",
    "phi3-longrope",
    "qwen2-bias",
    "qwen2-yarn",
    "qwen3-qknorm",
    "qwen3moe-8x3",
)
STORIES = tuple(f"stories260K-{kind}" for kind in ("f32", "f16", "q8_0", "q4_0"))

EVERY = pytest.mark.parametrize("name", [*ARCHITECTURES, *STORIES])


def model_path(cases: Path, name: str) -> Path:
    folder = "stories260K" if name in STORIES else "architectures"
    return cases / "gguf" / folder / f"{name}.gguf"


@pytest.fixture(scope="session")
def ids(cases: Path) -> list[int]:
    return [int(token) for token in (cases / "logits" / "IDS").read_text().split()]


def test_the_lists_above_are_all_there_is(cases: Path) -> None:
    assert sorted(path.stem for path in (cases / "logits").glob("*.f32")) == sorted(
        [*ARCHITECTURES, *STORIES]
    )


@EVERY
def test_golden_logits(cases: Path, ids: list[int], name: str) -> None:
    golden = np.fromfile(cases / "logits" / f"{name}.f32", "<f4").reshape(len(ids), -1)
    logits = Ring(model_path(cases, name), CONTEXT).forward([(0, 0, ids)]).numpy()
    # llama.cpp's GELU, by which the golden values of gemma3 are made, is a table in half precision.
    tolerance = 3e-3 if name.startswith("gemma3") else 1e-4
    assert logits.shape == golden.shape
    assert np.abs(logits - golden).max() < tolerance
    assert np.array_equal(logits.argmax(-1), golden.argmax(-1))


@EVERY
@pytest.mark.parametrize("cuts", [(1,), (1, 2)], ids=["two stages", "three stages"])
def test_split_equals_whole_bit_for_bit(
    cases: Path, ids: list[int], name: str, cuts: tuple[int, ...]
) -> None:
    whole, split = (Ring(model_path(cases, name), CONTEXT, at) for at in ((), cuts))
    for start, end in ((0, 40), (40, 41), (41, 80)):
        rows = [(0, start, ids[start:end])]
        assert torch.equal(whole.forward(rows), split.forward(rows))


@EVERY
@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_chunks_of_any_size_give_the_same(cases: Path, ids: list[int], name: str, chunk: int) -> None:
    ring = Ring(model_path(cases, name), CONTEXT)
    whole = ring.forward([(0, 0, ids)])
    assert torch.allclose(ring.in_chunks(ids, chunk), whole, atol=1e-4, rtol=0)


def test_stories_tell_the_published_text(cases: Path) -> None:
    """Greedy from the start token, one row at a time."""
    path = model_path(cases, "stories260K-f32")
    published = (path.parent / "expected_greedy.txt").read_text().rstrip("\n")
    with GGUFFile.open(path) as file:
        pieces = file.require("tokenizer.ggml.tokens", list)
        token = file.require("tokenizer.ggml.bos_token_id", int)
    ring = Ring(path, 512)
    text = ""
    for position in range(len(published)):
        token = int(ring.forward([(0, position, [token])])[0].argmax())
        piece = pieces[token]
        text += chr(int(piece[3:5], 16)) if piece.startswith("<0x") else piece.replace("▁", " ")
        if len(text) > len(published):
            break
    assert text.lstrip(" ").startswith(published)
