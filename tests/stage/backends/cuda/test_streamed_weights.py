"""A streamed layer is the resident one: the same numbers around its matrices, and from its blob the same
tiles, bit for bit, through the recipes that streaming goes by."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GGMLType

from common.errors import UnsupportedModelError
from stage.backends.base import RawTensors
from stage.backends.cuda import streamed_weights, weights
from stage.backends.cuda.host_pool import BlobLayout, BlobTensor
from stage.backends.cuda.linear import Linear
from stage.backends.cuda.repack import TILE_BYTES, PackedMatrix, describe, pack, packed_bytes
from stage.backends.cuda.streamed_weights import StreamedLoader, matrix_refs, slot_bytes
from stage.backends.cuda.weights import Layer, WeightLoader
from stage.model.spec import LayerSpec
from tests.stage.backends.cpu.random_weights import random_layer
from tests.stage.backends.cuda.host_kernels import HostUploader
from tests.stage.backends.cuda.host_repack import HostRepack, aligned_bytes
from tests.stage.backends.cuda.random_weights import random_raw

CPU = torch.device("cpu")
F32, F16, BF16, Q4_K, Q6_K = GGMLType.F32, GGMLType.F16, GGMLType.BF16, GGMLType.Q4_K, GGMLType.Q6_K


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> HostRepack:
    return HostRepack(tmp_path_factory.mktemp("host"))


def blob_of(
    spec: LayerSpec, raw: RawTensors, experts_only: bool = False
) -> tuple[BlobLayout, np.ndarray]:
    tensors, end = {}, 0
    for ref in matrix_refs(spec, experts_only):
        tensors[ref] = BlobTensor(raw[ref], Path(), 0, end)
        end += -(-raw[ref].nbytes // 32) * 32
    blob = aligned_bytes(end)
    for tensor in tensors.values():
        blob[tensor.offset : tensor.offset + tensor.nbytes] = tensor.raw.data.reshape(-1)
    return BlobLayout(tensors, end), blob


def linears(layer: Layer) -> list[Linear]:
    return [layer.qkv, layer.output, layer.ffn.gate_up, layer.ffn.down]


def same(a: object, b: object) -> bool:
    """Of tensors and dataclasses all the way down."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, PackedMatrix | Linear | weights.Norm) or dataclasses.is_dataclass(a):
        fields = dataclasses.fields(a)  # type: ignore[arg-type]
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("parts", ["dense", "experts", "experts alone"])
@pytest.mark.parametrize(
    "types",
    [[BF16], [F32], [F16], [Q4_K], [BF16, BF16, F32], [Q4_K, BF16, Q4_K, F32, Q6_K], [F32, F32, BF16, BF16]],
    ids=lambda types: "-".join(one.name for one in types),
)
def test_streamed_layers_equal_resident_ones(
    host: HostRepack,
    types: list[GGMLType],
    parts: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights, "Uploader", HostUploader)
    monkeypatch.setattr(streamed_weights, "PIECE_ELEMENTS", 5000)  # several pieces a matrix
    rng = np.random.default_rng(len(types))
    ffn = 264 if set(types) <= {F32, F16, BF16} else 256
    alone = parts == "experts alone"
    experts = None if parts == "dense" else (4, 2)
    spec, raw = random_layer(rng, types, 512, (8, 2, 32), ffn, experts, bias=True)
    want = WeightLoader(CPU).layer(spec, raw)
    layout, blob = blob_of(spec, raw, alone)
    streamed = StreamedLoader(CPU).streamed(spec, raw, layout)
    for number, linear in enumerate(linears(streamed.layer)):
        off_gpu = number >= 2 or not alone
        assert all(segment.matrix.tiles.is_meta == off_gpu for segment in linear.segments)
    slot = aligned_bytes(slot_bytes(raw[ref] for ref in layout.tensors))
    for recipe in streamed.recipes:
        host.run(recipe, blob.ctypes.data, slot.ctypes.data)
    got = streamed.view(torch.from_numpy(slot))
    for a, b in zip(linears(want), linears(got), strict=True):
        assert same(a, b)
    assert same(want, got)


@pytest.mark.parametrize("ggml_type", list(TILE_BYTES), ids=lambda t: t.name)
def test_a_matrix_is_described_in_any_pieces(ggml_type: GGMLType) -> None:
    raw = random_raw(ggml_type, 75, 768, 3)
    rows = torch.from_numpy(raw.data.copy())
    packed = pack(rows, ggml_type, 768)
    described = describe(iter((rows[40:], rows[:7], rows[7:40])), ggml_type, (75, 768))
    assert described.tiles.is_meta
    assert described.nbytes == packed.nbytes == packed_bytes(ggml_type, 75, 768)
    for name in ("kernel_type", "exponent", "inverse", "rows", "columns", "row_tiles", "column_tiles"):
        assert getattr(described, name) == getattr(packed, name)


def test_types_without_kernels_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="IQ2_XXS"):
        packed_bytes(GGMLType.IQ2_XXS, 16, 256)
    with pytest.raises(UnsupportedModelError, match="IQ2_XXS"):
        describe(iter(()), GGMLType.IQ2_XXS, (16, 256))
