"""The kernels for GPUs below 8.0, run on the host's CPU: products and attention against float64."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as GGMLType

from stage.backends.cuda.compile import Family, family_of
from stage.backends.cuda.forward import Forward
from stage.backends.cuda.linear import Epilogue, Linear, LinearOps, Norm, Operand, Segment, padded
from stage.backends.cuda.repack import TILE_BYTES, PackedMatrix, pack
from stage.model.spec import Activation
from stage.weights.quants import dequantize
from tests.stage.backends.cuda.host_kernels import HostKernels, compile_on_host
from tests.stage.backends.cuda.paged_attention import AttentionCase, check_attention, relative
from tests.stage.backends.cuda.random_weights import random_raw

TYPES = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "MXFP4", "F16"),
)
PRODUCTS = [
    *(f"{name}, {name}, {rows}, STORE" for name in TYPES for rows in (1, 16)),
    *(f"Q4_K, Q6_K, {rows}, RESIDUAL" for rows in (1, 2, 4, 8, 16)),
    *(f"Q4_K, Q4_K, {rows}, RESIDUAL" for rows in (1, 8, 16)),
    *(f"Q4_K, Q4_K, {rows}, GATED" for rows in (1, 4)),
]
HEADS = (64, 96, 128, 256)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to run the device code on the host with")
    names = {f"fma_linear<{product}, 8>": "LinearArgs" for product in PRODUCTS}
    names |= {f"fma_attention_prefill<{head}>": "AttentionArgs" for head in HEADS}
    names |= {f"fma_attention_decode<{head}>": "AttentionArgs, RopeArgs" for head in HEADS}
    names["rope"] = "RopeArgs"
    sources = ("fma_linear.cu", "fma_attention.cu", "rope.cu")
    return HostKernels(compile_on_host(compiler, tmp_path_factory.mktemp("host"), sources, names))


def operand(rows: int, features: int, seed: int = 0) -> torch.Tensor:
    x = torch.zeros((rows, padded(features)), dtype=torch.float16)
    x[:, :features] = torch.randn((rows, features), generator=torch.Generator().manual_seed(seed))
    return x


def packed(ggml_type: GGMLType, rows: int, columns: int, seed: int) -> tuple[PackedMatrix, torch.Tensor]:
    raw = random_raw(ggml_type, rows, columns, seed)
    return pack(torch.from_numpy(raw.data.copy()), ggml_type, columns), dequantize(raw).double()


@pytest.mark.parametrize("arch", ["sm_70", "sm_75", "compute_75"])
def test_the_family_goes_by_capability(arch: str) -> None:
    assert family_of(arch) == Family.FMA
    assert family_of("sm_80") == family_of("sm_120") == Family.MATRIX


@pytest.mark.parametrize("ggml_type", list(TILE_BYTES), ids=lambda t: t.name)
def test_every_type(kernels: HostKernels, ggml_type: GGMLType) -> None:
    rows, columns = 20, 768
    matrix, weight = packed(ggml_type, rows, columns, seed=2)
    ops, linear = LinearOps(kernels), Linear((Segment(matrix, 0, None),), columns, rows)  # type: ignore[arg-type]
    x = operand(19, columns)
    single = []
    for tokens in (1, 19):
        out = torch.full((tokens, rows), torch.nan)
        ops.run(linear, Operand(x[:tokens]), tokens, out, Epilogue.STORE)
        assert relative(out, x[:tokens, :columns].double() @ weight.T) < 6e-4
        single.append(out[0])
    assert torch.equal(*single), "a row's result depends on how many there are"


@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 18])
def test_two_types_with_biases_norms_and_a_residual(kernels: HostKernels, tokens: int) -> None:
    rows, columns = (32, 24), 2560  # more tiles of columns than a block has warps
    both = [packed(t, n, columns, 3) for t, n in zip((GGMLType.Q4_K, GGMLType.Q6_K), rows, strict=True)]
    biases = torch.randn(rows[0]), torch.randn(rows[1])
    segments = (Segment(both[0][0], 0, biases[0]), Segment(both[1][0], rows[0], biases[1]))
    weight, size = torch.cat([one[1] for one in both]), sum(rows)
    norm = Norm(torch.ones(columns), torch.ones(columns) / 8, 8.0, 1e-5)
    x = operand(tokens, columns)
    stream = x.double() * 8  # the rows that x is the scaled norm weight times
    squares = stream.float().square().unflatten(1, (-1, 16)).sum(-1)
    before = torch.randn((tokens, size))
    normed = stream * (stream.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    out = before.clone()
    LinearOps(kernels).run(  # type: ignore[arg-type]
        Linear(segments, columns, size), Operand(x, squares, norm), tokens, out, Epilogue.RESIDUAL
    )
    assert relative(out, before.double() + normed @ weight.T + torch.cat(biases)) < 6e-4


@pytest.mark.parametrize("tokens", [1, 5, 11])
def test_the_next_products_operand_comes_with_the_residual(kernels: HostKernels, tokens: int) -> None:
    rows, columns = 40, 256
    matrix, weight = packed(GGMLType.Q4_K, rows, columns, 5)
    norm_weight = torch.rand(rows) + 0.5
    norm = Norm(norm_weight, norm_weight / 8, 8.0, 1e-5)
    next_x, squares = torch.zeros((tokens, 256), dtype=torch.float16), torch.full((tokens, 3), torch.nan)
    x, out = operand(tokens, columns), torch.randn((tokens, rows))
    want = out.double() + x.double() @ weight.T
    linear, leaves = Linear((Segment(matrix, 0, None),), columns, rows), Operand(next_x, squares, norm)
    LinearOps(kernels).run(linear, Operand(x), tokens, out, Epilogue.RESIDUAL, leaves)  # type: ignore[arg-type]
    assert relative(out, want) < 6e-4
    assert torch.equal(next_x[:, :rows], (out * norm.scaled).half())
    assert not next_x[:, rows:].any()
    of_tiles = torch.nn.functional.pad(out, (0, 8)).square().unflatten(1, (3, 16)).sum(-1)
    assert torch.allclose(squares, of_tiles, rtol=1e-6)


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("tokens", [1, 3])
def test_gate_and_up(kernels: HostKernels, tokens: int, activation: Activation) -> None:
    size, columns = 24, 512
    gate, up = (random_raw(GGMLType.Q4_K, size, columns, seed) for seed in (5, 6))
    both = torch.stack(
        [torch.from_numpy(one.data.copy()).view(size // 8, 8, -1) for one in (gate, up)], dim=1
    )
    matrix = pack(both.flatten(0, 2), GGMLType.Q4_K, columns)
    x = operand(tokens, columns)
    out = torch.zeros((tokens, 256), dtype=torch.float16)
    linear = Linear((Segment(matrix, 0, None),), columns, 2 * size, gated=activation)
    LinearOps(kernels).run(linear, Operand(x), tokens, out, Epilogue.GATED)  # type: ignore[arg-type]
    g, u = (x.double() @ dequantize(one).double().T for one in (gate, up))
    gelu = torch.nn.functional.gelu(g, approximate="tanh")
    want = (torch.nn.functional.silu(g) if activation == Activation.SILU else gelu) * u
    assert relative(out[:, :size], want) < 1.5e-3
    assert not out[:, size:].any()


def test_experts(kernels: HostKernels) -> None:
    experts = [packed(GGMLType.Q8_0, 20, 512, seed) for seed in range(5)]
    one = experts[0][0]
    tiles = torch.stack([matrix.tiles for matrix, _ in experts])
    stack = PackedMatrix(tiles, one.kernel_type, one.exponent, one.inverse, 20, 512)
    assert len({matrix.exponent for matrix, _ in experts}) == 1
    x, chosen = operand(3, 512), torch.tensor([[4, 0], [1, 1], [3, 2]], dtype=torch.int32)
    out = torch.full((6, 20), torch.nan)
    linear = Linear((Segment(stack, 0, None),), 512, 20)
    LinearOps(kernels).run_experts(linear, x, chosen, 2, out, Epilogue.STORE)  # type: ignore[arg-type]
    want = [x[i // 2].double() @ experts[e][1].T for i, e in enumerate(chosen.flatten().tolist())]
    assert relative(out, torch.stack(want)) < 6e-4


@pytest.mark.parametrize(
    "shape",  # heads, KV heads, elements a head; window, soft cap; block size; neox, norms
    [
        (8, 2, 128, None, None, 32, False, False),
        (3, 1, 64, 20, None, 8, True, True),
        (4, 4, 80, None, 30.0, 16, True, False),
        (12, 1, 96, 70, 20.0, 64, True, False),
        (2, 1, 256, None, None, 16, False, True),
    ],
    ids=str,
)
def test_attention(kernels: HostKernels, shape: tuple[Any, ...]) -> None:
    sequences = ((0, 9), (70, 1), (5, 1), (60, 13), (0, 1), (310, 2), (830, 1))
    forward = Forward(kernels)  # type: ignore[arg-type]
    check_attention(forward, AttentionCase(*shape, sequences=sequences, cached_tokens=2048))
    assert not forward._arrived.any()


def test_no_kernel_of_the_other_family_was_asked_for(kernels: HostKernels) -> None:
    assert all(name == "rope" or name.startswith("fma_") for name in kernels.expressions)
