"""Products on packed weights against float64, every type, through each family of kernels."""

from __future__ import annotations

import pytest
import torch
from gguf import GGMLQuantizationType as GGMLType

from stage.backends.cuda.repack import TILE_BYTES, pack
from stage.model.spec import Activation
from stage.weights.quants import dequantize
from tests.stage.backends.cuda.random_weights import random_raw

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def ops():  # type: ignore[no-untyped-def]
    from stage.backends.cuda.launch import Kernels
    from stage.backends.cuda.linear import LinearOps

    return LinearOps(Kernels(torch.device("cuda", 0)))


def operand(rows: int, features: int) -> torch.Tensor:
    from stage.backends.cuda.linear import padded

    x = torch.zeros((max(rows, 64), padded(features)), dtype=torch.float16, device="cuda")
    x[:rows, :features] = torch.randn((rows, features), device="cuda")
    return x


def laid_out(ops, rows: int, x: torch.Tensor, back: bool = False) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """x [64, columns] as a product of `rows` rows takes it, from its meaning, or `back`; kernels/common.cuh,
    operand_index, in other words."""
    tiled = ops.tiled_rows(rows)
    if not tiled:
        return x
    if back:  # [sub-block][step, half][row][t][pair]
        parts = x.flatten()[: tiled * x.shape[1]].view(-1, 2, 2, tiled, 4, 2)
        plain = torch.zeros_like(x)
        plain[:tiled] = parts.permute(3, 0, 4, 1, 2, 5).reshape(tiled, -1)
        return plain
    out = torch.zeros_like(x)
    parts = x[:tiled].reshape(tiled, -1, 4, 2, 2, 2)  # [row][sub-block][t][step][half][pair]
    out.view(-1)[: tiled * x.shape[1]] = parts.permute(1, 3, 4, 0, 2, 5).flatten()
    return out


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def segment_of(ggml_type: GGMLType, rows: int, columns: int, seed: int, start: int = 0):  # type: ignore[no-untyped-def]
    from stage.backends.cuda.linear import Segment

    raw = random_raw(ggml_type, rows, columns, seed)
    matrix = pack(torch.from_numpy(raw.data.copy()).cuda(), ggml_type, columns)
    return Segment(matrix, start, None), dequantize(raw).cuda().double()


@pytest.mark.parametrize("ggml_type", list(TILE_BYTES), ids=lambda t: t.name)
def test_every_type_in_every_family(ops, ggml_type: GGMLType) -> None:  # type: ignore[no-untyped-def]
    from stage.backends.cuda.linear import Epilogue, Linear, Operand

    rows, columns = 200, 1280
    segment, weight = segment_of(ggml_type, rows, columns, seed=2)
    linear = Linear((segment,), columns, rows)
    assert relative(ops.dequantize(segment.matrix, 0, rows), weight) < 6e-4
    for tokens in (1, 3, 8, 9, 16, 31, 64, 130):
        x = operand(tokens, columns)
        out = torch.full((tokens, rows), torch.nan, device="cuda")
        ops.run(linear, Operand(laid_out(ops, tokens, x)), tokens, out, Epilogue.STORE)
        assert relative(out, x[:tokens, :columns].double() @ weight.T) < 1e-3, tokens


@pytest.mark.parametrize("tokens", [1, 2, 8, 17, 64, 100])
def test_two_types_side_by_side_with_bias_and_residual(ops, tokens: int) -> None:  # type: ignore[no-untyped-def]
    from stage.backends.cuda.linear import Epilogue, Linear, Operand, Segment

    columns = 4096
    first, first_weight = segment_of(GGMLType.Q4_K, 1280, columns, seed=3)
    second, second_weight = segment_of(GGMLType.Q6_K, 264, columns, seed=4)
    biases = torch.randn(1280, device="cuda"), torch.randn(264, device="cuda")
    linear = Linear(
        (Segment(first.matrix, 0, biases[0]), Segment(second.matrix, 1280, biases[1])), columns, 1544
    )
    x = operand(tokens, columns)
    before = torch.randn((tokens, 1544), device="cuda")
    weight, bias = torch.cat((first_weight, second_weight)), torch.cat(biases)
    want = before.double() + x[:tokens].double() @ weight.T + bias
    out = before.clone()
    ops.run(linear, Operand(laid_out(ops, tokens, x)), tokens, out, Epilogue.RESIDUAL)
    assert relative(out, want) < 1e-3
    again = before.clone()
    ops.run(linear, Operand(laid_out(ops, tokens, x)), tokens, again, Epilogue.RESIDUAL)
    assert torch.equal(out, again)


@pytest.mark.parametrize("tokens", [9, 24, 64])
def test_as_many_rows_as_a_head_has(ops, tokens: int) -> None:  # type: ignore[no-untyped-def]
    """Enough row tiles for the largest blocks; the last one is not full."""
    from stage.backends.cuda.linear import Epilogue, Linear, Operand

    rows, columns = 20000, 768
    segment, weight = segment_of(GGMLType.Q6_K, rows, columns, seed=9)
    x = operand(tokens, columns)
    out = torch.full((tokens, rows), torch.nan, device="cuda")
    linear = Linear((segment,), columns, rows)
    ops.run(linear, Operand(laid_out(ops, tokens, x)), tokens, out, Epilogue.STORE)
    assert relative(out, x[:tokens, :columns].double() @ weight.T) < 1e-3


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("tokens", [1, 5, 20, 64, 90])
def test_gate_and_up_together(ops, tokens: int, activation: Activation) -> None:  # type: ignore[no-untyped-def]
    from stage.backends.cuda.linear import Epilogue, Linear, Operand, Segment

    size, columns = 1032, 2048
    gate, up = (random_raw(GGMLType.Q4_K, size, columns, seed) for seed in (5, 6))
    both = torch.stack(
        [torch.from_numpy(one.data.copy()).view(size // 8, 8, -1) for one in (gate, up)], dim=1
    )
    matrix = pack(both.flatten(0, 2).cuda(), GGMLType.Q4_K, columns)
    x = operand(tokens, columns)
    out = torch.zeros((max(tokens, 64), 1280), dtype=torch.float16, device="cuda")
    linear = Linear((Segment(matrix, 0, None),), columns, 2 * size, gated=activation)
    ops.run(linear, Operand(laid_out(ops, tokens, x)), tokens, out, Epilogue.GATED)
    out = laid_out(ops, tokens, out, back=True)[:tokens]
    g, u = (x[:tokens].double() @ dequantize(one).cuda().double().T for one in (gate, up))
    gelu = torch.nn.functional.gelu(g, approximate="tanh")
    want = (torch.nn.functional.silu(g) if activation == Activation.SILU else gelu) * u
    assert relative(out[:, :size], want) < 1.5e-3
    assert not out[:, size:].any()


@pytest.mark.parametrize("tokens", [1, 6, 13, 64])
def test_a_norm_folded_into_the_products_around_it(ops, tokens: int) -> None:  # type: ignore[no-untyped-def]
    """RESIDUAL leaves the next product's operand; bit for bit what rms_operand makes of the same rows."""
    from stage.backends.cuda.arguments import OperandArgs
    from stage.backends.cuda.linear import Epilogue, Linear, Norm, Operand

    size, inner = 584, 1024
    down, down_weight = segment_of(GGMLType.Q6_K, size, inner, seed=7)
    up, up_weight = segment_of(GGMLType.F16, 96, size, seed=8)
    weight = torch.rand(size, device="cuda") + 0.5
    norm = Norm(weight, weight / 8, 8.0, 1e-5)
    rows = torch.randn((tokens, size), device="cuda") * 30
    x = operand(tokens, inner)
    want_rows = rows.double() + x[:tokens].double() @ down_weight.T
    left = Operand(operand(tokens, size), torch.full((tokens, 37), torch.nan, device="cuda"), norm)
    down_x = Operand(laid_out(ops, tokens, x))
    ops.run(Linear((down,), inner, size), down_x, tokens, rows, Epilogue.RESIDUAL, left)
    assert relative(rows, want_rows) < 1e-3
    made = Operand(operand(tokens, size), torch.full((tokens, 37), torch.nan, device="cuda"), norm)
    args = OperandArgs(
        x=rows.data_ptr(), weight=norm.scaled.data_ptr(), out=made.x.data_ptr(),
        squares=made.squares.data_ptr(), size=size, out_stride=made.x.stride(0), tiled=ops.tiled_rows(tokens),
    )  # fmt: skip
    ops._kernels.launch("norm.cu", "rms_operand", (tokens, 2, 1), 256, args)
    plain = [laid_out(ops, tokens, one.x, back=True)[:tokens, :size] for one in (left, made)]
    assert torch.equal(*plain)
    assert torch.equal(left.squares, made.squares)
    out = torch.full((tokens, 96), torch.nan, device="cuda")
    ops.run(Linear((up,), size, 96), left, tokens, out, Epilogue.STORE)
    exact = rows.double()
    normed = exact * (exact.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    assert relative(out, normed @ up_weight.T) < 1e-3
