"""Attention over the paged cache against float64: norm, rotary embedding, append; decode and prefill in one
batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from stage.backends.base import make_batch

pytestmark = pytest.mark.gpu


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, window: int | None, softcap: float | None
) -> torch.Tensor:
    """q [rows, heads, d] (scaled), k and v [keys, kv_heads, d], all float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("rhd,khd->hrk", q, k)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows = torch.arange(start, start + len(q), device=q.device)[:, None]
    keys = torch.arange(len(k), device=q.device)[None]
    seen = keys <= rows
    if window:
        seen &= keys > rows - window
    scores = scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("hrk,khd->rhd", scores.softmax(-1), v)


def turn(x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor, neox: bool) -> torch.Tensor:
    """x [rows, heads, d] float64."""
    angles = (positions[:, None].float() * frequencies).double()[:, None]
    cos, sin, half = angles.cos(), angles.sin(), frequencies.numel()
    y = x.clone()
    first = slice(0, half) if neox else slice(0, None, 2)
    second = slice(half, 2 * half) if neox else slice(1, None, 2)
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., second] * cos + x[..., first] * sin
    return y


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "softcap", "block_size", "neox", "norms"),
    [
        (32, 8, 128, None, None, 32, False, False),
        (32, 8, 64, None, None, 16, True, True),
        (8, 8, 64, 20, None, 8, False, False),
        (14, 2, 80, None, 30.0, 64, True, False),
        (4, 1, 256, 40, None, 32, True, True),
        (16, 1, 96, None, 20.0, 16, True, False),
        (3, 1, 32, None, None, 32, False, False),
    ],
)
def test_decode_and_prefill(
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    softcap: float | None,
    block_size: int,
    neox: bool,
    norms: bool,
) -> None:
    from stage.backends.cuda.arguments import AttentionArgs, RopeArgs
    from stage.backends.cuda.forward import Forward, Rows
    from stage.backends.cuda.kv_cache import head_stride
    from stage.backends.cuda.launch import Kernels

    device = torch.device("cuda", 0)
    forward = Forward(Kernels(device))
    stride, shift = head_stride(head_dim), block_size.bit_length() - 1
    rng = np.random.default_rng(0)
    num_blocks = 8192 // block_size
    sequences = [
        (0, 37),
        (700, 1),
        (5, 1),
        (100, 65),
        (0, 1),
        (1500, 9),
        (4000, 1),
        (0, 130),
        (300, 200),
    ]  # start position, rows
    order = rng.permutation(num_blocks).astype(np.int32)
    tables, at = [], 0
    for start, count in sequences:
        needed = -(-(start + count) // block_size)
        tables.append(order[at : at + needed])
        at += needed
    batch = make_batch(
        [(start, count, table) for (start, count), table in zip(sequences, tables, strict=True)], block_size
    )
    torch.manual_seed(0)
    keys = torch.zeros((num_blocks, kv_heads, block_size, stride), dtype=torch.float16, device=device)
    values = torch.zeros((num_blocks, kv_heads, stride, block_size), dtype=torch.float16, device=device)
    keys[..., :head_dim] = torch.randn((num_blocks, kv_heads, block_size, head_dim), device=device)
    values[:, :, :head_dim] = torch.randn((num_blocks, kv_heads, head_dim, block_size), device=device)
    qkv = torch.randn((batch.num_rows, (heads + 2 * kv_heads) * head_dim), device=device)
    weights = torch.rand((2, head_dim), device=device) + 0.5
    frequencies = 10000.0 ** -(torch.arange(0, head_dim, 2, device=device) / head_dim)
    q16 = torch.empty((batch.num_rows, heads, stride), dtype=torch.float16, device=device)
    out = torch.full((batch.num_rows, heads * head_dim), torch.nan, dtype=torch.float16, device=device)
    rows = Rows.of(batch, device)
    group, scale = heads // kv_heads, 1 / math.sqrt(head_dim)
    assert rows.slots is not None
    rope = RopeArgs(
        qkv=qkv.data_ptr(), positions=rows.positions.data_ptr(), slots=rows.slots.data_ptr(),
        block_tables=rows.block_tables.data_ptr(), table_stride=rows.block_tables.shape[1],
        inverse_frequencies=frequencies.data_ptr(), q_norm=weights[0].data_ptr() if norms else None,
        k_norm=weights[1].data_ptr() if norms else None, q=q16.data_ptr(), keys=keys.data_ptr(),
        values=values.data_ptr(), qkv_stride=qkv.shape[1], num_heads=heads, num_kv_heads=kv_heads,
        head_dim=head_dim, head_stride=stride, rope_dim=head_dim, neox=neox, magnitude=1.0, scale=scale,
        norm_eps=1e-6, block_shift=shift,
    )  # fmt: skip
    args = AttentionArgs(
        q=q16.data_ptr(), keys=keys.data_ptr(), values=values.data_ptr(), positions=rows.positions.data_ptr(),
        block_tables=rows.block_tables.data_ptr(), out=out.data_ptr(), partial=forward._partial.data_ptr(),
        arrived=forward._arrived.data_ptr(), table_stride=rows.block_tables.shape[1], num_heads=heads,
        num_kv_heads=kv_heads, group=group, group_shift=(group - 1).bit_length(), head_dim=head_dim,
        out_stride=heads * head_dim, block_shift=shift, window=window or 0, softcap=softcap or 0.0,
    )  # fmt: skip
    forward._prefill_attention(args, rope, rows)
    forward._decode_attention(args, rope, rows)

    q, k_new, v_new = qkv.double().split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=1)
    q, k_new, v_new = (x.unflatten(1, (-1, head_dim)) for x in (q, k_new, v_new))
    if norms:
        q, k_new = (
            x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
            for x, weight in ((q, weights[0]), (k_new, weights[1]))
        )
    q, k_new = (turn(x, rows.positions, frequencies, neox) for x in (q, k_new))
    for sequence, table in zip(batch.sequences, tables, strict=True):
        here = slice(sequence.row_start, sequence.row_start + sequence.num_rows)
        start, length = sequence.start_position, sequence.context_length
        index = torch.from_numpy(table.astype(np.int64)).to(device)
        k = keys[index].transpose(1, 2).reshape(-1, kv_heads, stride)[:length, :, :head_dim].double()
        v = values[index].permute(0, 3, 1, 2).reshape(-1, kv_heads, stride)[:length, :, :head_dim].double()
        assert float((k[start:] - k_new[here]).norm() / k_new[here].norm()) < 5e-4, sequence
        assert float((v[start:] - v_new[here]).norm() / v_new[here].norm()) < 5e-4, sequence
        want = attend(q[here] * scale, k, v, start, window, softcap)
        got = out[here].view(-1, heads, head_dim).double()
        assert float((got - want).norm() / want.norm()) < 1e-3, sequence
