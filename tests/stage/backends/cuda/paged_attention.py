"""Attention over the paged cache as a forward runs it, against float64, for the kernels of either family.

Norm, rotary embedding, append; decode and prefill in one batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from stage.backends.base import make_batch
from stage.backends.cuda.arguments import AttentionArgs, RopeArgs
from stage.backends.cuda.forward import Forward, Rows
from stage.backends.cuda.kv_cache import head_stride


@dataclass(frozen=True)
class AttentionCase:
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    softcap: float | None
    block_size: int
    neox: bool
    norms: bool
    sequences: tuple[tuple[int, int], ...]  # start position, rows
    cached_tokens: int  # that the cache has room for

    @property
    def num_blocks(self) -> int:
        return self.cached_tokens // self.block_size


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


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


def check_attention(forward: Forward, case: AttentionCase) -> None:
    device = forward.device
    heads, kv_heads, head_dim, block_size = case.heads, case.kv_heads, case.head_dim, case.block_size
    window, softcap = case.window, case.softcap
    stride, shift = head_stride(head_dim), block_size.bit_length() - 1
    order, tables, at = np.random.default_rng(0).permutation(case.num_blocks).astype(np.int32), [], 0
    for start, count in case.sequences:
        needed = -(-(start + count) // block_size)
        tables.append(order[at : at + needed])
        at += needed
    triples = [(*sequence, table) for sequence, table in zip(case.sequences, tables, strict=True)]
    batch = make_batch(triples, block_size)
    torch.manual_seed(0)
    keys = torch.zeros((case.num_blocks, kv_heads, block_size, stride), dtype=torch.float16, device=device)
    values = torch.zeros((case.num_blocks, kv_heads, stride, block_size), dtype=torch.float16, device=device)
    keys[..., :head_dim] = torch.randn((case.num_blocks, kv_heads, block_size, head_dim), device=device)
    values[:, :, :head_dim] = torch.randn((case.num_blocks, kv_heads, head_dim, block_size), device=device)
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
        inverse_frequencies=frequencies.data_ptr(), q_norm=weights[0].data_ptr() if case.norms else None,
        k_norm=weights[1].data_ptr() if case.norms else None, q=q16.data_ptr(), keys=keys.data_ptr(),
        values=values.data_ptr(), qkv_stride=qkv.shape[1], num_heads=heads, num_kv_heads=kv_heads,
        head_dim=head_dim, head_stride=stride, rope_dim=head_dim, neox=case.neox, magnitude=1.0, scale=scale,
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
    if case.norms:
        q, k_new = (
            x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
            for x, weight in ((q, weights[0]), (k_new, weights[1]))
        )
    q, k_new = (turn(x, rows.positions, frequencies, case.neox) for x in (q, k_new))
    for sequence, table in zip(batch.sequences, tables, strict=True):
        here = slice(sequence.row_start, sequence.row_start + sequence.num_rows)
        start, length = sequence.start_position, sequence.context_length
        index = torch.from_numpy(table.astype(np.int64)).to(device)
        k = keys[index].transpose(1, 2).reshape(-1, kv_heads, stride)[:length, :, :head_dim].double()
        v = values[index].permute(0, 3, 1, 2).reshape(-1, kv_heads, stride)[:length, :, :head_dim].double()
        assert relative(k[start:], k_new[here]) < 5e-4, sequence
        assert relative(v[start:], v_new[here]) < 5e-4, sequence
        want = attend(q[here] * scale, k, v, start, window, softcap)
        assert relative(out[here].view(-1, heads, head_dim), want) < 1e-3, sequence
