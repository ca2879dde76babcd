"""What placement is told of a model's layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.synth_model import RECIPES, Shape, write
from common.errors import ConfigError
from common.gguf.reader import GGUFFile
from stage.backends.cuda.placing import Request, _size, explicit_places
from stage.model.registry import build_spec
from stage.placement import Place

SHAPE = Shape("llama", 2, 512, 8, 2, 64, 1024, 100)
MATRIX_WEIGHTS = 512 * 512 * 2 + 128 * 512 * 2 + 3 * 512 * 1024


@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_of_every_type_can_be_streamed(recipe: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, SHAPE, recipe)
    file = GGUFFile.open(path)
    layers = build_spec(file, 256).layers
    size = _size(Request(file, layers, 0, 256), layers[0])
    assert size.streamable
    assert size.kv_bytes == 256 * 2 * 2 * 2 * 64
    bits = {"f32": 32, "bf16": 16, "f16": 16, "q8_0": 8.5}.get(recipe)
    if bits is not None:
        stored = MATRIX_WEIGHTS * bits / 8
        assert stored <= size.raw_bytes <= stored + 8 * 4096
        assert size.packed_bytes == MATRIX_WEIGHTS * min(bits, 16) / 8


def test_experts_are_sized_by_themselves(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, replace(SHAPE, experts=(8, 2)), "bf16")
    file = GGUFFile.open(path)
    layers = build_spec(file, 256).layers
    size = _size(Request(file, layers, 0, 256), layers[0])
    experts = 8 * 3 * 512 * 1024 * 2
    assert size.experts.packed_bytes == experts
    assert experts <= size.experts.raw_bytes <= experts + 4 * 4096
    assert size.experts.active_share == 0.25
    assert size.packed_bytes - experts == (512 * 512 * 2 + 128 * 512 * 2) * 2
    assert explicit_places(layers, "auto") is None
    assert explicit_places(layers, "1=host-experts") == [Place.RESIDENT, Place.HOST_EXPERTS]


def test_a_layer_without_experts_cannot_be_split(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, SHAPE, "q8_0")
    layers = build_spec(GGUFFile.open(path), 256).layers
    with pytest.raises(ConfigError, match="layer 1 has no experts"):
        explicit_places(layers, "0=streamed,1=streamed-experts")
    assert explicit_places(layers[:1], "1=streamed-experts") == [Place.RESIDENT]  # another stage's layer
