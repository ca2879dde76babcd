"""What a launch is called, and what it reads, as told from its arguments."""

from __future__ import annotations

from stage.backends.cuda.arguments import GreedyArgs, LinearArgs
from stage.backends.cuda.profiling import describe
from stage.backends.cuda.repack import packed_bytes
from stage.weights.quants import GGMLType


def test_a_product_reads_its_packed_weights() -> None:
    args = LinearArgs()
    args.row_tiles[0], args.row_tiles[1], args.column_tiles = 256, 64, 16
    expression = "matvec<Q4_K, Q6_K, STORE, true, 8>"
    name, size = describe(expression, args)
    assert name == f"{expression} 5120 x 4096"
    assert size == packed_bytes(GGMLType.Q4_K, 4096, 4096) + packed_bytes(GGMLType.Q6_K, 1024, 4096)
    assert describe("matmul<Q4_K, Q6_K, 2, STORE>", (args,))[1] == size


def test_experts_are_read_once_a_token() -> None:
    args = LinearArgs()
    args.row_tiles[0], args.column_tiles, args.experts, args.num_tokens = 8, 2, 1, 6
    _, size = describe("matvec<Q8_0, Q8_0, GATED, true, 8>", args)
    assert size == 6 * packed_bytes(GGMLType.Q8_0, 128, 512)


def test_other_kernels_have_no_weights() -> None:
    assert describe("greedy", GreedyArgs()) == ("greedy", 0)
