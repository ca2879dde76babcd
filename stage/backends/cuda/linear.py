"""Matrix products on packed weights: which kernel for how many rows, and with what it is called.

1 to 8 rows: `matvec`, bound by the weights' bytes. 9 to 64: `matmul`, which decodes a packet once for all
rows; on Hopper `matmul_warpgroup`. More: the weights become f16 a piece at a time and the library multiplies,
with float32 sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch

from common.errors import PipeLLMError
from stage.backends.cuda import fma
from stage.backends.cuda.arguments import DequantizeArgs, GatedArgs, LinearArgs
from stage.backends.cuda.compile import SPECIFIC, Family
from stage.backends.cuda.launch import Kernels
from stage.backends.cuda.repack import PackedMatrix
from stage.model.spec import Activation

MATVEC_ROWS, MATMUL_ROWS = 8, 64
_DEQUANTIZED_ELEMENTS = 1 << 26  # at once, for the library's products
_PARTIAL_BYTES = 32 << 20
_COLUMN_TILES = 4  # a block of matmul_warpgroup has at least
# Gate and up of many rows pass through f16: this keeps what they mean up to 2^20 in its range.
_GATED_SCALE = 2.0**-4


@dataclass(frozen=True)
class Norm:
    """An RMS norm. `scaled` = weight / inverse, a power of two away, so that f16(row scaled) stays in
    range: rows that are not yet divided by their norm may reach 2^18 there."""

    weight: torch.Tensor  # f32 [size]
    scaled: torch.Tensor
    inverse: float
    eps: float


class Epilogue(Enum):
    STORE = "STORE"
    RESIDUAL = "RESIDUAL"
    GATED = "GATED"


@dataclass(frozen=True)
class Segment:
    """Rows [start, start + matrix.rows) of a product's output."""

    matrix: PackedMatrix
    start: int
    bias: torch.Tensor | None  # f32 [matrix.rows]


@dataclass(frozen=True)
class Linear:
    """One product with the same input. `gated`: its one segment holds gate and up, interleaved by 8 rows."""

    segments: tuple[Segment, ...]
    in_features: int
    out_features: int
    gated: Activation | None = None


@dataclass(frozen=True)
class Operand:
    """The rows a product is made with: f16 [>= rows, padded(features)], zero past them; or the same tiled,
    where LinearOps.tiled_rows says so.

    With `squares` (f32 [rows, ceil(features / 16)]) x is the norm's scaled weight times rows that still
    have to be divided by their norm, which the product does.
    """

    x: torch.Tensor
    squares: torch.Tensor | None = None
    norm: Norm | None = None


def padded(features: int) -> int:
    """Elements from one row of an f16 operand to the next."""
    return -(-features // 256) * 256


def activation_code(activation: Activation) -> int:
    return 1 if activation == Activation.GELU_TANH else 0


class LinearOps:
    """Runs products on one device."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._partial = torch.empty(_PARTIAL_BYTES // 4, dtype=torch.float32, device=kernels.device)
        self._arrived = torch.zeros(4096, dtype=torch.int32, device=kernels.device)

    def tiled_rows(self, num_tokens: int) -> int:
        """Operands of so many rows are tiled (kernels/common.cuh, operand_index) for this many rows; 0: they
        are plain."""
        if self._kernels.arch not in SPECIFIC.values() or not MATVEC_ROWS < num_tokens <= MATMUL_ROWS:
            return 0
        return 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64

    def run(
        self,
        linear: Linear,
        operand: Operand,
        num_tokens: int,
        out: torch.Tensor,
        epilogue: Epilogue,
        leaves: Operand | None = None,
    ) -> None:
        """out: f32 [num_tokens, out_features] for STORE (set) and RESIDUAL (added to); for GATED the next
        product's operand.

        `leaves`: filled by RESIDUAL with the next product's operand, made of the completed rows; up to 64
        of them.
        """
        if num_tokens > MATMUL_ROWS:
            self._library(linear, operand.x, num_tokens, out, epilogue)
            return
        for first, second in _pairs(linear.segments):
            self._fused(linear, (first, second), operand, num_tokens, out, epilogue, leaves)

    def run_experts(
        self,
        linear: Linear,
        x: torch.Tensor,
        chosen: torch.Tensor,
        tokens_per_row: int,
        out: torch.Tensor,
        epilogue: Epilogue,
    ) -> None:
        """A product of single rows with the experts each has chosen. chosen: int [tokens]; x row i serves
        tokens [i tokens_per_row, (i + 1) tokens_per_row)."""
        for first, second in _pairs(linear.segments):
            args, types = self._arguments(linear, (first, second), x, chosen.numel(), out, epilogue)
            args.experts = chosen.data_ptr()
            for i, segment in enumerate((first, second)):
                if segment is not None:
                    args.expert_bytes[i] = segment.matrix.tiles[0].numel()
            args.tokens_per_row = tokens_per_row
            if self._kernels.family == Family.FMA:
                warps = matvec_warps(args.row_tiles[0] + args.row_tiles[1])
                fma.linear(self._kernels, types, epilogue.value, chosen.numel(), warps, args)
                continue
            grid = (args.row_tiles[0] + args.row_tiles[1], chosen.numel(), 1)
            self._matvec(types, epilogue, True, grid, args)

    def _arguments(
        self,
        linear: Linear,
        pair: tuple[Segment, Segment | None],
        x: torch.Tensor,
        num_tokens: int,
        out: torch.Tensor,
        epilogue: Epilogue,
    ) -> tuple[LinearArgs, str]:
        args = LinearArgs()
        first, second = pair
        for i, segment in enumerate(pair):
            if segment is None:
                continue
            matrix = segment.matrix
            args.tiles[i] = matrix.tiles.data_ptr()
            args.bias[i] = segment.bias.data_ptr() if segment.bias is not None else 0
            args.inverse[i] = matrix.inverse
            args.exponent[i] = matrix.exponent
            args.row_tiles[i] = matrix.row_tiles
            args.rows[i] = matrix.rows
            args.out_start[i] = segment.start
        args.column_tiles = first.matrix.column_tiles
        args.num_tokens = num_tokens
        args.x = x.data_ptr()
        args.x_stride = x.stride(0)
        if epilogue == Epilogue.GATED:
            args.half_out = out.data_ptr()
        else:
            args.out = out.data_ptr()
        args.out_stride = out.stride(0)
        args.activation = activation_code(linear.gated) if linear.gated else 0
        other = second or first
        return args, f"{first.matrix.kernel_type}, {other.matrix.kernel_type}"

    def _fused(
        self,
        linear: Linear,
        pair: tuple[Segment, Segment | None],
        operand: Operand,
        num_tokens: int,
        out: torch.Tensor,
        epilogue: Epilogue,
        leaves: Operand | None,
    ) -> None:
        args, types = self._arguments(linear, pair, operand.x, num_tokens, out, epilogue)
        if operand.squares is not None and operand.norm is not None:
            args.squares = operand.squares.data_ptr()
            args.num_squares = operand.squares.shape[1]
            args.norm_size = linear.in_features
            args.norm_eps = operand.norm.eps
            args.norm_inverse = operand.norm.inverse
        if leaves is not None and leaves.squares is not None and leaves.norm is not None:
            args.next_squares = leaves.squares.data_ptr()
            args.next_weight = leaves.norm.scaled.data_ptr()
            args.next_x = leaves.x.data_ptr()
            args.next_stride = leaves.x.stride(0)
        args.tiled = self.tiled_rows(num_tokens)
        if self._kernels.family == Family.FMA:
            warps = matvec_warps(args.row_tiles[0] + args.row_tiles[1])
            fma.linear(self._kernels, types, epilogue.value, num_tokens, warps, args)
            return
        if num_tokens <= MATVEC_ROWS:
            grid = (args.row_tiles[0] + args.row_tiles[1], 1, 1)
            self._matvec(types, epilogue, num_tokens == 1, grid, args)
            return
        if args.tiled:
            self._warpgroup(types, epilogue, args)
            return
        n = 2 if num_tokens <= 16 else 4 if num_tokens <= 32 else 8
        blocks = sum(-(-tiles // 8) for tiles in args.row_tiles)
        at_once = 2 * self._kernels.num_multiprocessors // blocks
        fit = _PARTIAL_BYTES // (blocks * n * 4096)
        splits = max(1, min(at_once, args.column_tiles, fit, 16))
        args.partial = self._partial.data_ptr()
        args.arrived = self._arrived.data_ptr()
        if splits > 1 and blocks > self._arrived.numel():
            raise PipeLLMError(f"a product of {blocks} blocks cannot be split: this is a fault of LinearOps")
        expression = f"matmul<{types}, {n}, {epilogue.value}>"
        self._kernels.launch("matmul.cu", expression, (blocks, splits, 1), 256, args, 2 * n * 8 * 576)

    def _warpgroup(self, types: str, epilogue: Epilogue, args: LinearArgs) -> None:
        rows, num_multiprocessors = args.tiled, self._kernels.num_multiprocessors
        # A multiprocessor holds four warpgroups: one block, which reads x once, where there are rows enough.
        groups = 4 if sum(args.row_tiles) >= 8 * num_multiprocessors else 2
        tiles = 4 * groups
        blocks = sum(-(-row_tiles // tiles) for row_tiles in args.row_tiles)
        at_once = num_multiprocessors * 4 // groups // blocks
        splits = 1
        while splits < 8 and 2 * splits <= min(at_once, args.column_tiles // _COLUMN_TILES):
            splits *= 2
        shared = max(3 * 512 * rows, tiles * rows * 64)  # three column tiles of x; at the end the sums
        expression = f"matmul_warpgroup<{types}, {rows}, {epilogue.value}, {groups}, {splits}>"
        grid = (blocks, splits, 1)
        self._kernels.launch("warpgroup.cu", expression, grid, 32 * tiles, args, shared)

    def _matvec(
        self, types: str, epilogue: Epilogue, single: bool, grid: tuple[int, int, int], args: LinearArgs
    ) -> None:
        warps = matvec_warps(grid[0])
        expression = f"matvec<{types}, {epilogue.value}, {str(single).lower()}, {warps}>"
        self._kernels.launch("matvec.cu", expression, grid, 32 * warps, args)

    # --- many rows ------------------------------------------------------------------------------------------

    def _library(
        self, linear: Linear, x: torch.Tensor, num_tokens: int, out: torch.Tensor, epilogue: Epilogue
    ) -> None:
        x = x[:num_tokens, : linear.in_features]
        for segment in linear.segments:
            step = max(16, _DEQUANTIZED_ELEMENTS // linear.in_features // 16 * 16)
            for start in range(0, segment.matrix.rows, step):
                rows = min(step, segment.matrix.rows - start)
                weight = self.dequantize(segment.matrix, start, rows).T
                if epilogue == Epilogue.GATED and linear.gated:
                    y = torch.empty((num_tokens, rows), dtype=torch.float16, device=x.device)
                    torch.addmm(y, x, weight, beta=0, alpha=_GATED_SCALE, out=y)
                    self.gated(linear.gated, y, out[:, start // 2 :], rows // 2, 0, 1 / _GATED_SCALE)
                    continue
                target = out[:, segment.start + start : segment.start + start + rows]
                beta = 1 if epilogue == Epilogue.RESIDUAL else 0
                torch.addmm(target, x, weight, out_dtype=torch.float32, beta=beta, out=target)
                if segment.bias is not None:
                    target += segment.bias[start : start + rows]

    def dequantize(self, matrix: PackedMatrix, start: int, rows: int) -> torch.Tensor:
        """Rows [start, start + rows) as f16 [rows, columns]; start: a multiple of 16."""
        stride = -(-matrix.columns // 8) * 8
        out = torch.empty((rows, stride), dtype=torch.float16, device=self._kernels.device)
        args = DequantizeArgs(
            tiles=matrix.tiles[start // 16].data_ptr(),
            out=out.data_ptr(),
            exponent=matrix.exponent,
            power=min(max(math.frexp(matrix.inverse)[1] - 1, -28), 30),
            column_tiles=matrix.column_tiles,
            rows=rows,
            stride=stride,
        )
        grid = (-(-rows // 16), 1, 1)
        self._kernels.launch("dequantize.cu", f"dequantize<{matrix.kernel_type}>", grid, 256, args)
        return out[:, : matrix.columns]

    def gated(
        self,
        activation: Activation,
        x: torch.Tensor,
        out: torch.Tensor,
        size: int,
        up_start: int,
        factor: float = 1.0,
        tiled: int = 0,
    ) -> None:
        """out[:, :size] = activation(gate) up, of x times `factor`. x: f32 or f16, interleaved by 8, or up
        beginning at `up_start` (not 0)."""
        args = GatedArgs(
            x=x.data_ptr(),
            out=out.data_ptr(),
            size=size,
            x_stride=x.stride(0),
            out_stride=out.stride(0),
            tiled=tiled,
            activation=activation_code(activation),
            up_start=up_start,
            factor=factor,
        )
        element = "u16" if x.dtype == torch.float16 else "float"
        grid = (x.shape[0], -(-size // 1024), 1)
        self._kernels.launch("norm.cu", f"gated<{element}>", grid, 128, args)


def matvec_warps(row_tiles: int) -> int:
    """Warps that share a row tile: few where there are many tiles (measured on an H200)."""
    return 4 if row_tiles >= 1024 else 8


def _pairs(segments: tuple[Segment, ...]) -> list[tuple[Segment, Segment | None]]:
    return [
        (segments[i], segments[i + 1] if i + 1 < len(segments) else None) for i in range(0, len(segments), 2)
    ]
