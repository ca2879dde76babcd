from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.daemons import Mesh
from tests.gguf_files import write_tiny_llama


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama of six layers with a tokenizer and a chat template."""
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    return write_tiny_llama(path, layers=6, context=512)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Mesh]:
    """Two stages linked by gRPC that serve the tiny model, shared by a module's tests, which must leave it
    serving."""
    with Mesh(tmp_path_factory.mktemp("mesh"), tiny_model, 2, carrier="grpc") as running:
        yield running
