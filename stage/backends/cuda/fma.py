"""Launches of the kernels without matrix units (kernels/fma_*.cu): what a GPU below 8.0 runs in place of
`matvec`, `matmul` and `attention`. Same tiles, same cache, same arguments.
"""

from __future__ import annotations

from stage.backends.cuda.arguments import AttentionArgs, LinearArgs, RopeArgs
from stage.backends.cuda.launch import Kernels

WARPS = 4  # a block of attention
_ROWS = 8  # (token, head) pairs a warp of attention takes
_MOST_TOKENS = 16  # a block of a product keeps in registers


def linear(
    kernels: Kernels, types: str, epilogue: str, num_tokens: int, warps: int, args: LinearArgs
) -> None:
    """One or two weights against `num_tokens` rows; with args.experts each of them by itself."""
    together = 1 if args.experts else min(1 << (num_tokens - 1).bit_length(), _MOST_TOKENS)
    grid = (-(-num_tokens // together), args.row_tiles[0] + args.row_tiles[1], 1)
    expression = f"fma_linear<{types}, {together}, {epilogue}, {warps}>"
    kernels.launch("fma_linear.cu", expression, grid, 32 * warps, args)


def prefill_tokens(group_shift: int) -> int:
    """Tokens of a prefill tile."""
    return _ROWS >> min(group_shift, 3)


def prefill_attention(kernels: Kernels, args: AttentionArgs, head_stride: int) -> None:
    """args.tiles: of `prefill_tokens` rows each. Q lies in args.q, K and V in the cache."""
    args.group_shift = min(args.group_shift, 3)  # of a piece of the group
    grid = (-(-args.num_tiles // WARPS), _pieces(args), 1)
    shared = WARPS * _ROWS * head_stride * 4
    expression = f"fma_attention_prefill<{head_stride}>"
    kernels.launch("fma_attention.cu", expression, grid, 32 * WARPS, args, shared)


def decode_attention(
    kernels: Kernels, args: AttentionArgs, rope: RopeArgs, num_rows: int, splits: int
) -> None:
    """Norms of heads, RoPE and the append of K and V included."""
    grid = (_pieces(args), num_rows, splits)
    shared = WARPS * _ROWS * (rope.head_stride + 4) * 4
    expression = f"fma_attention_decode<{rope.head_stride}>"
    kernels.launch("fma_attention.cu", expression, grid, 32 * WARPS, (args, rope), shared)


def _pieces(args: AttentionArgs) -> int:
    return int(args.num_kv_heads) * -(-args.group // _ROWS)
