"""Operands that captured graphs read must never move."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from stage.backends.cuda.compile import Family
from stage.backends.cuda.forward import Forward
from stage.backends.cuda.linear import MATMUL_ROWS


def test_a_prompt_moves_no_operand_of_a_decode_step() -> None:
    """Experts make several rows of each: of 64 rows by 8 experts just as of 64."""
    nothing_runs = SimpleNamespace(device=torch.device("cpu"), arch="sm_75", family=Family.FMA)
    forward = Forward(nothing_runs)  # type: ignore[arg-type]
    for each in (1, 2, 8):
        decode = forward._buffer("inner", 16, 96, each=each)
        assert len(decode) == MATMUL_ROWS * each
        address = decode.data_ptr()
        for num_rows in (MATMUL_ROWS, MATMUL_ROWS + 1, 500, 2048):
            assert len(forward._buffer("inner", num_rows, 96, each=each)) >= num_rows * each
        for num_rows in (1, 16, MATMUL_ROWS):
            assert forward._buffer("inner", num_rows, 96, each=each).data_ptr() == address
    assert torch.equal(decode, torch.zeros_like(decode))
