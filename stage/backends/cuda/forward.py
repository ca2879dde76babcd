"""The computation of a layer as a sequence of kernels, the same for eager steps and for captured ones.

Knows nothing of where a batch's tensors come from: `Rows` holds them, on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from common.errors import PipeLLMError
from stage.backends.base import Batch
from stage.backends.cuda import fma
from stage.backends.cuda.arguments import (
    AttentionArgs,
    CombineArgs,
    EmbedArgs,
    NormArgs,
    OperandArgs,
    RopeArgs,
    RouterArgs,
)
from stage.backends.cuda.compile import SPECIFIC, Family
from stage.backends.cuda.kv_cache import CudaKvCache, head_stride
from stage.backends.cuda.launch import Kernels
from stage.backends.cuda.linear import MATMUL_ROWS, Epilogue, Linear, LinearOps, Norm, Operand, padded
from stage.backends.cuda.weights import DenseFfn, Embedding, Head, Layer, MoeFfn
from stage.model.spec import RopeKind

SMALLEST_CONTEXT = 512
TABLE_MARGIN = 7  # attention looks up whole groups of 64 keys: with blocks of 8, so many past a table's last
_ATTENTION_PARTIAL_BYTES = 32 << 20
_MAX_SPLITS = 64  # of a context, over blocks
_SHORT_CONTEXT = 1024
_GROUPS = 3  # warpgroups a block of prefill attention


def context_bucket(length: int) -> int:
    """512, 1024, 2048, ...: what a step is shaped for. The same in eager steps, so that both give the same
    bits."""
    return max(SMALLEST_CONTEXT, 1 << (length - 1).bit_length())


@dataclass
class Rows:
    """A batch on the device."""

    num_rows: int
    positions: torch.Tensor  # int32 [rows]
    block_tables: torch.Tensor  # int32 [tables, width]
    slots: torch.Tensor | None  # int64 [rows]; None: every row is a sequence, row i with table i
    context: int  # bucket of the longest context
    decode_tiles: torch.Tensor | None  # int32 [n, 4] (row, 1, table, 0); None: every row, in order
    num_decode: int
    prefill: list[tuple[int, int, int]] = field(default_factory=list)  # (first row, rows, table)
    _prefill_tiles: dict[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> Rows:
        width = max(len(sequence.block_table) for sequence in batch.sequences) + TABLE_MARGIN
        tables = np.zeros((len(batch.sequences), width), np.int32)
        decode: list[tuple[int, int, int, int]] = []
        prefill: list[tuple[int, int, int]] = []
        for index, sequence in enumerate(batch.sequences):
            tables[index, : len(sequence.block_table)] = sequence.block_table
            if sequence.num_rows == 1:
                decode.append((sequence.row_start, 1, index, 0))
            else:
                prefill.append((sequence.row_start, sequence.num_rows, index))
        return cls(
            num_rows=batch.num_rows,
            positions=_upload(batch.positions.astype(np.int32), device),
            block_tables=_upload(tables, device),
            slots=_upload(batch.slots.astype(np.int64), device),
            context=context_bucket(max(sequence.context_length for sequence in batch.sequences)),
            decode_tiles=_upload(np.asarray(decode, np.int32), device) if decode else None,
            num_decode=len(decode),
            prefill=prefill,
        )

    def prefill_tiles(self, tokens: int) -> torch.Tensor:
        """int32 [n, 4]: tiles of `tokens` consecutive rows of one sequence, for all prefill chunks."""
        if tokens not in self._prefill_tiles:
            tiles = [
                (first + at, min(tokens, rows - at), table, 0)
                for first, rows, table in self.prefill
                for at in range(0, rows, tokens)
            ]
            self._prefill_tiles[tokens] = _upload(np.asarray(tiles, np.int32), self.positions.device)
        return self._prefill_tiles[tokens]


def _upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


class Forward:
    """Layers on one device. Owns the f16 operands that products read, padded with zeros, at fixed
    addresses."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.linear = LinearOps(kernels)
        self.device = kernels.device
        self._buffers: dict[tuple[str, int, bool, int, int], torch.Tensor] = {}
        self._squares: dict[int, torch.Tensor] = {}
        floats = _ATTENTION_PARTIAL_BYTES // 4
        self._partial = torch.empty(floats, dtype=torch.float32, device=self.device)
        self._arrived = torch.zeros(65536, dtype=torch.int32, device=self.device)

    def embed(self, embedding: Embedding, tokens: torch.Tensor) -> torch.Tensor:
        """int32 [rows] -> f32 [rows, hidden_size]."""
        matrix = embedding.matrix
        out = torch.empty((len(tokens), matrix.columns), dtype=torch.float32, device=self.device)
        args = EmbedArgs(
            tiles=matrix.tiles.data_ptr(),
            tokens=tokens.data_ptr(),
            out=out.data_ptr(),
            exponent=matrix.exponent,
            scale=matrix.inverse * embedding.scale,
            column_tiles=matrix.column_tiles,
            columns=matrix.columns,
            vocabulary=matrix.rows,
        )
        expression = f"embed<{matrix.kernel_type}>"
        self.kernels.launch("dequantize.cu", expression, (len(tokens), 1, 1), 256, args)
        return out

    def layer(
        self,
        layer: Layer,
        kv: CudaKvCache,
        rows: Rows,
        hidden_states: torch.Tensor,
        operand: Operand | None = None,
        next_norm: Norm | None = None,
    ) -> Operand | None:
        """hidden_states: f32 [rows, hidden_size], changed in place; K and V of the rows go to `kv`.

        `operand`: what the layer before returned, if it was told this layer's norm as its `next_norm`;
        None: made here, to the same bits.
        """
        if isinstance(layer.ffn, DenseFfn):
            operand = self.attend(layer, kv, rows, hidden_states, operand, layer.ffn.norm)
            return self._dense(layer.ffn, hidden_states, operand, next_norm)
        self.attend(layer, kv, rows, hidden_states, operand)
        self.experts(layer.ffn, hidden_states)
        return None

    def attend(
        self,
        layer: Layer,
        kv: CudaKvCache,
        rows: Rows,
        hidden_states: torch.Tensor,
        operand: Operand | None = None,
        ffn_norm: Norm | None = None,
    ) -> Operand | None:
        """A layer up to its feed-forward; with that one's norm, returns what it begins with."""
        operand = operand or self._operand(layer.norm, hidden_states)
        attended = self._attention(layer, kv, rows, operand)
        return self._onto(layer.output, attended, layer.post_norm, hidden_states, ffn_norm)

    def logits(self, head: Head, hidden_states: torch.Tensor, operand: Operand | None = None) -> torch.Tensor:
        """f32 [n, hidden_size] -> f32 [n, vocab_size]."""
        num_rows = len(hidden_states)
        operand = operand or self._operand(head.norm, hidden_states)
        out = torch.empty((num_rows, head.output.out_features), dtype=torch.float32, device=self.device)
        self.linear.run(head.output, operand, num_rows, out, Epilogue.STORE)
        if head.logit_softcap:
            out = torch.tanh(out / head.logit_softcap) * head.logit_softcap
        return out

    # --- parts ----------------------------------------------------------------------------------------------

    def _buffer(self, name: str, num_rows: int, features: int, tiled: int = 0, each: int = 1) -> torch.Tensor:
        """An operand: f16 [>= num_rows * each, padded(features)], zero past `features`. Up to 64 rows it
        never moves, since graphs hold its address."""
        small = num_rows <= MATMUL_ROWS
        key = (name, features, small, tiled, each)
        buffer = self._buffers.get(key)
        if buffer is None or len(buffer) < num_rows * each:
            shape = ((MATMUL_ROWS if small else num_rows) * each, padded(features))
            buffer = self._buffers[key] = torch.zeros(shape, dtype=torch.float16, device=self.device)
        return buffer

    def _unfinished(self, norm: Norm, num_rows: int, size: int) -> Operand:
        """Where an operand whose norm is still to be divided by is put."""
        tiles = -(-size // 16)
        if size not in self._squares:
            shape = (MATMUL_ROWS, tiles)
            self._squares[size] = torch.zeros(shape, dtype=torch.float32, device=self.device)
        buffer = self._buffer("normed", num_rows, size, self.linear.tiled_rows(num_rows))
        return Operand(buffer, self._squares[size], norm)

    def _operand(self, norm: Norm, x: torch.Tensor) -> Operand:
        num_rows, size = x.shape
        if num_rows > MATMUL_ROWS:
            return Operand(self._normed(norm, x))
        operand = self._unfinished(norm, num_rows, size)
        args = OperandArgs(
            x=x.data_ptr(),
            weight=norm.scaled.data_ptr(),
            out=operand.x.data_ptr(),
            squares=self._squares[size].data_ptr(),
            size=size,
            out_stride=operand.x.stride(0),
            tiled=self.linear.tiled_rows(num_rows),
        )
        self.kernels.launch("norm.cu", "rms_operand", (num_rows, -(-size // 512), 1), 256, args)
        return operand

    def _normed(self, norm: Norm, x: torch.Tensor) -> torch.Tensor:
        num_rows, size = x.shape
        out = self._buffer("normed", num_rows, size)
        self._norm(norm, x, half_out=out)
        return out

    def _norm(
        self,
        norm: Norm,
        x: torch.Tensor,
        half_out: torch.Tensor | None = None,
        onto: torch.Tensor | None = None,
    ) -> None:
        num_rows, size = x.shape
        args = NormArgs(
            x=x.data_ptr(),
            weight=norm.weight.data_ptr(),
            half_out=half_out.data_ptr() if half_out is not None else None,
            residual=onto.data_ptr() if onto is not None else None,
            size=size,
            out_stride=half_out.stride(0) if half_out is not None else 0,
            eps=norm.eps,
        )
        threads = min(1024, -(-size // 128) * 32)
        self.kernels.launch("norm.cu", "rms_norm", (num_rows, 1, 1), threads, args)

    def _onto(
        self,
        linear: Linear,
        x: torch.Tensor,
        post_norm: Norm | None,
        hidden_states: torch.Tensor,
        next_norm: Norm | None,
    ) -> Operand | None:
        """hidden_states += the product; returns the next product's operand where that came with it."""
        num_rows, size = hidden_states.shape
        if post_norm is None:
            fused = next_norm is not None and num_rows <= MATMUL_ROWS
            leaves = self._unfinished(next_norm, num_rows, size) if next_norm and fused else None
            self.linear.run(linear, Operand(x), num_rows, hidden_states, Epilogue.RESIDUAL, leaves)
            return leaves
        y = torch.empty((num_rows, size), dtype=torch.float32, device=self.device)
        self.linear.run(linear, Operand(x), num_rows, y, Epilogue.STORE)
        self._norm(post_norm, y, onto=hidden_states)
        return None

    def _attention(self, layer: Layer, kv: CudaKvCache, rows: Rows, operand: Operand) -> torch.Tensor:
        spec = layer.spec.attention
        num_rows, stride = rows.num_rows, head_stride(spec.head_dim)
        qkv = torch.empty((num_rows, layer.qkv.out_features), dtype=torch.float32, device=self.device)
        self.linear.run(layer.qkv, operand, num_rows, qkv, Epilogue.STORE)
        q = torch.empty((num_rows, spec.num_heads, stride), dtype=torch.float16, device=self.device)
        keys, values = kv.keys[layer.spec.index], kv.values[layer.spec.index]
        rope = RopeArgs(
            qkv=qkv.data_ptr(),
            positions=rows.positions.data_ptr(),
            slots=rows.slots.data_ptr() if rows.slots is not None else None,
            block_tables=rows.block_tables.data_ptr(),
            table_stride=rows.block_tables.shape[1],
            inverse_frequencies=layer.inverse_frequencies.data_ptr(),
            q_norm=layer.q_norm.weight.data_ptr() if layer.q_norm else None,
            k_norm=layer.k_norm.weight.data_ptr() if layer.k_norm else None,
            q=q.data_ptr(),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            qkv_stride=qkv.shape[1],
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            head_stride=stride,
            rope_dim=spec.rope.dim,
            neox=spec.rope.kind == RopeKind.NEOX,
            magnitude=layer.magnitude,
            scale=spec.scale,
            norm_eps=layer.q_norm.eps if layer.q_norm else 0.0,
            block_shift=kv.block_shift,
        )
        tiled = self.linear.tiled_rows(num_rows)
        out = self._buffer("attended", num_rows, spec.num_heads * spec.head_dim, tiled)
        group = spec.num_heads // spec.num_kv_heads
        group_shift = (group - 1).bit_length()
        args = AttentionArgs(
            q=q.data_ptr(),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            positions=rows.positions.data_ptr(),
            block_tables=rows.block_tables.data_ptr(),
            out=out.data_ptr(),
            partial=self._partial.data_ptr(),
            arrived=self._arrived.data_ptr(),
            table_stride=rows.block_tables.shape[1],
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            group=group,
            group_shift=group_shift,
            head_dim=spec.head_dim,
            out_stride=out.stride(0),
            tiled=tiled,
            block_shift=kv.block_shift,
            window=spec.sliding_window or 0,
            softcap=spec.logit_softcap or 0.0,
        )
        if rows.prefill:
            self._prefill_attention(args, rope, rows)
        if rows.num_decode:
            self._decode_attention(args, rope, rows)
        return out

    def _prefill_attention(self, args: AttentionArgs, rope: RopeArgs, rows: Rows) -> None:
        self.kernels.launch("rope.cu", "rope", (rows.num_rows, 1, 1), 256, rope)
        stride = rope.head_stride
        if self.kernels.family == Family.FMA:
            tiles = rows.prefill_tiles(fma.prefill_tokens(args.group_shift))
            args.tiles, args.num_tiles = tiles.data_ptr(), len(tiles)
            fma.prefill_attention(self.kernels, args, stride)
            return
        warpgroups = self.kernels.arch in SPECIFIC.values() and stride <= 128
        tiles = rows.prefill_tiles((64 * _GROUPS if warpgroups else 16) >> args.group_shift)
        args.tiles = tiles.data_ptr()
        args.num_tiles = len(tiles)
        if warpgroups:
            shared = 2 * (stride // 8 * (64 * 16 + 16) + 8 * (stride * 16 + 16))  # two stages of 64 keys
            expression = f"attention_warpgroup<{stride}, {_GROUPS}>"
            grid = (len(tiles), args.num_kv_heads, 1)
            self.kernels.launch("attention_warpgroup.cu", expression, grid, 128 * _GROUPS, args, shared)
            return
        grid = (-(-len(tiles) // 4), args.num_kv_heads, 1)
        self.kernels.launch("attention.cu", f"attention_prefill<{stride}>", grid, 128, args)

    def _decode_attention(self, args: AttentionArgs, rope: RopeArgs, rows: Rows) -> None:
        pieces, stride = args.num_kv_heads * -(-args.group // 8), rope.head_stride
        blocks = rows.num_decode * pieces
        # A block of 8 warps fills a multiprocessor, of 4 warps half of one; no more blocks than run at once.
        lone = blocks < self.kernels.num_multiprocessors and rows.context <= _SHORT_CONTEXT
        warps = 8 if lone else 4
        room = self.kernels.num_multiprocessors * 8 // warps // blocks
        fit = _ATTENTION_PARTIAL_BYTES // (blocks * 8 * (stride + 4) * 4)
        splits = max(1, min(room, rows.context // (32 * warps), _MAX_SPLITS, fit))
        if blocks > self._arrived.numel() and splits > 1:
            raise PipeLLMError(f"{rows.num_decode} rows of decode attention at once are too many")
        args.tiles = rows.decode_tiles.data_ptr() if rows.decode_tiles is not None else None
        args.num_tiles = rows.num_decode
        if self.kernels.family == Family.FMA:
            fma.decode_attention(self.kernels, args, rope, rows.num_decode, splits)
            return
        # The parts of all warps; at first the heads they turn (f32) and the queries (f16).
        shared = max(warps * 8 * (stride + 4) * 4, (warps + 4) * stride * 4)
        grid = (pieces, rows.num_decode, splits)
        expression = f"attention_decode<{stride}, {warps}>"
        self.kernels.launch("attention.cu", expression, grid, 32 * warps, (args, rope), shared)

    def _dense(
        self,
        ffn: DenseFfn,
        hidden_states: torch.Tensor,
        operand: Operand | None,
        next_norm: Norm | None,
    ) -> Operand | None:
        num_rows = len(hidden_states)
        operand = operand or self._operand(ffn.norm, hidden_states)
        tiled = self.linear.tiled_rows(num_rows)
        inner = self._buffer("inner", num_rows, ffn.down.in_features, tiled)
        if ffn.gate_up.gated is not None:
            self.linear.run(ffn.gate_up, operand, num_rows, inner, Epilogue.GATED)
        else:
            width = ffn.gate_up.out_features
            both = torch.empty((num_rows, width), dtype=torch.float32, device=self.device)
            self.linear.run(ffn.gate_up, operand, num_rows, both, Epilogue.STORE)
            self.linear.gated(ffn.activation, both, inner, width // 2, width // 2, tiled=tiled)
        return self._onto(ffn.down, inner, ffn.post_norm, hidden_states, next_norm)

    def experts(self, ffn: MoeFfn, hidden_states: torch.Tensor) -> None:
        """A layer from its router on: all that it is told is the residual stream."""
        num_rows, size = hidden_states.shape
        used, num_experts = ffn.num_used, len(ffn.router)
        chosen = torch.empty((num_rows, used), dtype=torch.int32, device=self.device)
        shares = torch.empty((num_rows, used), dtype=torch.float32, device=self.device)
        args = RouterArgs(
            x=hidden_states.data_ptr(),
            norm_weight=ffn.norm.weight.data_ptr(),
            weight=ffn.router.data_ptr(),
            bias=ffn.router_bias.data_ptr() if ffn.router_bias is not None else None,
            chosen=chosen.data_ptr(),
            shares=shares.data_ptr(),
            size=size,
            num_experts=num_experts,
            num_used=used,
            eps=ffn.norm.eps,
        )
        self.kernels.launch("experts.cu", "router", (num_rows, 1, 1), 512, args, size * 4)
        x = self._normed(ffn.norm, hidden_states)
        tokens = num_rows * used
        inner = self._buffer("inner", num_rows, ffn.down.in_features, each=used)
        if ffn.gate_up.gated is not None:
            self.linear.run_experts(ffn.gate_up, x, chosen, used, inner, Epilogue.GATED)
        else:
            width = ffn.gate_up.out_features
            both = torch.empty((tokens, width), dtype=torch.float32, device=self.device)
            self.linear.run_experts(ffn.gate_up, x, chosen, used, both, Epilogue.STORE)
            self.linear.gated(ffn.activation, both, inner, width // 2, width // 2)
        y = torch.empty((tokens, size), dtype=torch.float32, device=self.device)
        self.linear.run_experts(ffn.down, inner, chosen, 1, y, Epilogue.STORE)
        summed = torch.empty_like(hidden_states) if ffn.post_norm else hidden_states
        combine = CombineArgs(
            y=y.data_ptr(),
            shares=shares.data_ptr(),
            out=summed.data_ptr(),
            size=size,
            num_used=used,
            add=ffn.post_norm is None,
        )
        self.kernels.launch("experts.cu", "combine", (num_rows, -(-size // 256), 1), 256, combine)
        if ffn.post_norm:
            self._norm(ffn.post_norm, summed, onto=hidden_states)
