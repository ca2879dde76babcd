"""The CPU backend on whole models: golden logits, however the prompt is cut."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from stage.backends.cpu import CpuBackend, variants
from tests.stage.backends.whole_model import WholeModel

if not variants():
    pytest.skip("the native CPU backend was not built here (no C++ compiler)", allow_module_level=True)

NAMES = ("gemma3-window16", "llama-gqa-ropefreqs", "llama-moe-8x2", "llama-tied-linear", "phi3-longrope",
         "qwen2-bias", "qwen2-yarn", "qwen3-qknorm", "qwen3moe-8x3", "stories260K-f32", "stories260K-f16",
         "stories260K-q8_0", "stories260K-q4_0")  # fmt: skip
# llama.cpp's GELU is a half-precision table; 16-bit activations of quantised weights on logits up to 17.
TOLERANCE = {"gemma3-window16": 3e-3, "stories260K-q8_0": 2e-3, "stories260K-q4_0": 2e-3}


def golden(cases: Path, name: str) -> tuple[Path, list[int], np.ndarray]:
    ids = [int(token) for token in (cases / "logits/IDS").read_text().split()]
    folder = "stories260K" if name.startswith("stories") else "architectures"
    logits = np.fromfile(cases / f"logits/{name}.f32", np.float32).reshape(len(ids), -1)
    return cases / f"gguf/{folder}/{name}.gguf", ids, logits


@pytest.mark.parametrize("chunks", [(), (7, 1, 20, 2), (1,) * 80], ids=["whole", "chunks", "tokens"])
@pytest.mark.parametrize("name", NAMES)
def test_golden_logits(cases: Path, name: str, chunks: Iterable[int]) -> None:
    path, ids, expected = golden(cases, name)
    backend = CpuBackend(threads=2, accuracy="exact", kv_dtype="f32")
    logits = WholeModel(path, backend).logits(ids, chunks).numpy()
    backend.close()
    assert np.abs(logits - expected).max() < TOLERANCE.get(name, 1e-4)
    assert (logits.argmax(1) == expected.argmax(1)).all()


@pytest.mark.parametrize("name", ["llama-gqa-ropefreqs", "stories260K-q8_0"])
def test_golden_logits_with_a_half_precision_cache(cases: Path, name: str) -> None:
    path, ids, expected = golden(cases, name)
    backend = CpuBackend(threads=2, accuracy="exact")
    logits = WholeModel(path, backend).logits(ids).numpy()
    backend.close()
    assert np.abs(logits - expected).max() < 1e-2
    assert (logits.argmax(1) == expected.argmax(1)).all()


def test_sequences_side_by_side_are_as_alone(cases: Path) -> None:
    path, ids, _ = golden(cases, "qwen3-qknorm")
    backend = CpuBackend(threads=2, accuracy="exact")
    alone = WholeModel(path, backend).logits(ids[:30])
    together = WholeModel(path, backend, sequences=9)
    together.forward([(seq, 0, ids[:29]) for seq in range(9)])
    last = together.forward([(seq, 29, ids[29:30]) for seq in range(9)])
    backend.close()
    assert (last - alone[-1]).abs().max() < 1e-4
