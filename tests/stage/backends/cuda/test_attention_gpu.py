"""Attention over the paged cache against float64: norm, rotary embedding, append; decode and prefill in one
batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.stage.backends.cuda.paged_attention import AttentionCase, check_attention

pytestmark = pytest.mark.gpu

SEQUENCES = ((0, 37), (700, 1), (5, 1), (100, 65), (0, 1), (1500, 9), (4000, 1), (0, 130), (300, 200))


@pytest.mark.parametrize(
    "shape",  # heads, KV heads, elements a head; window, soft cap; block size; neox, norms
    [
        (32, 8, 128, None, None, 32, False, False),
        (32, 8, 64, None, None, 16, True, True),
        (8, 8, 64, 20, None, 8, False, False),
        (14, 2, 80, None, 30.0, 64, True, False),
        (4, 1, 256, 40, None, 32, True, True),
        (16, 1, 96, None, 20.0, 16, True, False),
        (3, 1, 32, None, None, 32, False, False),
    ],
    ids=str,
)
def test_decode_and_prefill(shape: tuple[Any, ...]) -> None:
    from stage.backends.cuda.forward import Forward
    from stage.backends.cuda.launch import Kernels

    forward = Forward(Kernels(torch.device("cuda", 0)))
    check_attention(forward, AttentionCase(*shape, sequences=SEQUENCES, cached_tokens=8192))
