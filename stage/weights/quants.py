"""How GGUF stores weights: the block layout of each tensor type, raw tensors, and their float32 meaning.

Every quantised type cuts a row into blocks of a fixed number of elements; a block holds packed integers
and the scales to read them with. `BLOCK_LAYOUTS` is the table of these blocks, field by field, as
ggml-common.h declares them (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h) and gguf-py's
`gguf.quants` reads them. `dequantize` gives bit for bit the float32 values that `gguf.quants.dequantize`
gives, several times faster. What a tensor is for is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as GGMLType

from common.errors import UnsupportedModelError

# d, dmin, m: float16 scales and offsets of a whole block; scales: of groups within it; qs: the low bits of
# each element, qh and hmask: its high bits; e: an exponent.
BLOCK_LAYOUTS: Mapping[GGMLType, np.dtype] = {
    GGMLType.F32: np.dtype([("x", "<f4")]),
    GGMLType.F16: np.dtype([("x", "<f2")]),
    GGMLType.BF16: np.dtype([("x", "<i2")]),
    GGMLType.Q4_0: np.dtype([("d", "<f2"), ("qs", "u1", 16)]),
    GGMLType.Q4_1: np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)]),
    GGMLType.Q5_0: np.dtype([("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)]),
    GGMLType.Q5_1: np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)]),
    GGMLType.Q8_0: np.dtype([("d", "<f2"), ("qs", "i1", 32)]),
    GGMLType.Q2_K: np.dtype([("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2"), ("dmin", "<f2")]),
    GGMLType.Q3_K: np.dtype([("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2")]),
    GGMLType.Q4_K: np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)]),
    GGMLType.Q5_K: np.dtype(
        [("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)]
    ),
    GGMLType.Q6_K: np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")]),
    GGMLType.IQ4_NL: np.dtype([("d", "<f2"), ("qs", "u1", 16)]),
    GGMLType.IQ4_XS: np.dtype(
        [("d", "<f2"), ("scales_h", "u1", 2), ("scales_l", "u1", 4), ("qs", "u1", 128)]
    ),
    GGMLType.MXFP4: np.dtype([("e", "u1"), ("qs", "u1", 16)]),
}

# What a 4-bit index stands for in IQ4_NL and IQ4_XS, and in MXFP4 (twice the E2M1 value).
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

# Elements decoded at once: enough to keep the cores busy, few enough that temporaries stay in cache.
_CHUNK_ELEMENTS = 1 << 19

# Matrix products are faster on whole cache lines, and sum in the same order wherever a tensor lies.
_ALIGNMENT = 64


@dataclass(frozen=True)
class RawTensor:
    """A tensor as the file stores it.

    `data`: uint8 [..., rows, row_bytes], read-only, a view of the mapped file; `shape`: [..., rows, cols],
    in elements. A vector has shape [cols] and data [row_bytes].
    """

    data: np.ndarray
    ggml_type: GGMLType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)

    def rows(self, start: int, end: int) -> RawTensor:
        """Rows [start, end) of each matrix, or elements [start, end) of a vector; no copy."""
        if len(self.shape) > 1:
            data = self.data[..., start:end, :]
            return RawTensor(data, self.ggml_type, (*self.shape[:-2], end - start, self.shape[-1]))
        block_elements, block_bytes = GGML_QUANT_SIZES[self.ggml_type]
        if start % block_elements or end % block_elements:
            raise UnsupportedModelError(
                f"elements {start} to {end} of a vector do not start and end on {self.ggml_type.name} "
                f"blocks of {block_elements}"
            )
        data = self.data[start // block_elements * block_bytes : end // block_elements * block_bytes]
        return RawTensor(data, self.ggml_type, (end - start,))

    def __getitem__(self, index: int | np.ndarray) -> RawTensor:
        """One matrix of a stack, or the rows an integer array [n] names (those are copied)."""
        data = self.data[index]
        return RawTensor(data, self.ggml_type, (*data.shape[:-1], self.shape[-1]))


def dequantize(raw: RawTensor) -> torch.Tensor:
    """The float32 values of a tensor, shape `raw.shape`, in memory of its own.

    Raises `UnsupportedModelError` for a type that is not in `BLOCK_LAYOUTS`.
    """
    layout = BLOCK_LAYOUTS.get(raw.ggml_type)
    if layout is None:
        raise UnsupportedModelError(f"tensor type {raw.ggml_type.name} cannot be dequantised")
    block_elements, _ = GGML_QUANT_SIZES[raw.ggml_type]
    blocks = raw.data.reshape(-1).view(layout)
    values = _empty(len(blocks), block_elements)
    decode = _DECODERS[raw.ggml_type]
    step = _CHUNK_ELEMENTS // block_elements
    for start in range(0, len(blocks), step):
        chunk = blocks[start : start + step]
        # Copied, because torch takes no read-only arrays, and an aligned field decodes faster.
        fields = {name: torch.from_numpy(chunk[name].copy()) for name in layout.names or ()}
        decode(fields, values[start : start + step])
    return values.reshape(raw.shape)


def _empty(rows: int, cols: int) -> torch.Tensor:
    """Memory for float32 [rows, cols], on a cache line's border.

    It is numpy's, which asks for huge pages: the first touch of large memory is several times faster so.
    """
    nbytes = rows * cols * 4
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[start : start + nbytes].view(np.float32).reshape(rows, cols))


# A decoder writes float32 [n, block_elements], from the fields of n blocks: [n] or [n, bytes].
Fields = Mapping[str, torch.Tensor]
Decoder = Callable[[Fields, torch.Tensor], None]


def _scaled(out: torch.Tensor, quants: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """out [n, elements] = quants * scales, in as many equal groups as there are scales in a block.

    quants: [n, elements]; scales: float32 [n] or [n, groups]. Returns a view of out: [n, groups, elements
    of a group]. What is added to it afterwards is rounded a second time, as in gguf-py.
    """
    out.copy_(quants)
    scales = scales.view(len(out), -1, 1)
    return out.view(len(out), scales.shape[1], -1).mul_(scales)


def _unpack(packed: torch.Tensor, bits: int, run: int) -> torch.Tensor:
    """uint8 [n, bytes] holding fields of `bits` bits -> uint8 [n, bytes * 8 / bits].

    Each run of `run` bytes gives first its lowest field of every byte, then the next field of every byte.
    """
    runs = packed.view(len(packed), -1, run)
    fields = torch.empty((len(packed), runs.shape[1], 8 // bits, run), dtype=torch.uint8)
    for i in range(8 // bits):
        torch.bitwise_right_shift(runs, bits * i, out=fields[:, :, i])
    return fields.bitwise_and_((1 << bits) - 1).view(len(packed), -1)


def _signed(quants: torch.Tensor, zero: int) -> torch.Tensor:
    """Unsigned quants, shifted so that `zero` means 0: int8."""
    return quants.view(torch.int8).sub_(zero)


def _looked_up(values: tuple[int, ...], indices: torch.Tensor) -> torch.Tensor:
    # Faster than indexing.
    return torch.tensor(values, dtype=torch.float32).index_select(0, indices.view(-1).int()).view_as(indices)


def _f32(fields: Fields, out: torch.Tensor) -> None:
    out[:, 0] = fields["x"]


def _f16(fields: Fields, out: torch.Tensor) -> None:
    out[:, 0] = fields["x"]
    if out.isnan().any():
        # torch makes every NaN a quiet one; numpy, and so gguf-py, keeps its bits.
        np.copyto(out[:, 0].numpy(), fields["x"].numpy())


def _bf16(fields: Fields, out: torch.Tensor) -> None:
    # The upper half of a float32, bit by bit (a NaN keeps its payload).
    out.view(torch.int32)[:, 0] = fields["x"].int() << 16


def _q4_0(fields: Fields, out: torch.Tensor) -> None:
    _scaled(out, _signed(_unpack(fields["qs"], 4, 16), 8), fields["d"].float())


def _q4_1(fields: Fields, out: torch.Tensor) -> None:
    _scaled(out, _unpack(fields["qs"], 4, 16), fields["d"].float()).add_(fields["m"].view(-1, 1, 1))


def _five_bits(fields: Fields) -> torch.Tensor:
    return _unpack(fields["qs"], 4, 16).bitwise_or_(_unpack(fields["qh"], 1, 1).bitwise_left_shift_(4))


def _q5_0(fields: Fields, out: torch.Tensor) -> None:
    _scaled(out, _signed(_five_bits(fields), 16), fields["d"].float())


def _q5_1(fields: Fields, out: torch.Tensor) -> None:
    _scaled(out, _five_bits(fields), fields["d"].float()).add_(fields["m"].view(-1, 1, 1))


def _q8_0(fields: Fields, out: torch.Tensor) -> None:
    _scaled(out, fields["qs"], fields["d"].float())


def _q2_k(fields: Fields, out: torch.Tensor) -> None:
    scales = fields["d"].float()[:, None] * (fields["scales"] & 15)
    mins = fields["dmin"].float()[:, None] * (fields["scales"] >> 4)
    _scaled(out, _unpack(fields["qs"], 2, 32), scales).sub_(mins[:, :, None])


def _q3_k(fields: Fields, out: torch.Tensor) -> None:
    packed = fields["scales"]
    scales = _unpack(packed[:, :8], 4, 8) | (_unpack(packed[:, 8:], 2, 4) << 4)
    scales = fields["d"].float()[:, None] * _signed(scales, 32)
    # The high bit counts the other way round: without it the element is 4 less.
    quants = _unpack(fields["qs"], 2, 32) | (_unpack(fields["hmask"], 1, 32) << 2)
    _scaled(out, _signed(quants, 4), scales)


def _k_scales(fields: Fields) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima, float32 [n, 8], of Q4_K and Q5_K; twelve bytes hold sixteen numbers of 6 bits."""
    first, second, rest = fields["scales"].view(-1, 3, 4).unbind(1)
    scales = torch.cat([first & 63, (rest & 15) | ((first >> 2) & 48)], 1)
    mins = torch.cat([second & 63, (rest >> 4) | ((second >> 2) & 48)], 1)
    return fields["d"].float()[:, None] * scales, fields["dmin"].float()[:, None] * mins


def _q4_k(fields: Fields, out: torch.Tensor) -> None:
    scales, mins = _k_scales(fields)
    _scaled(out, _unpack(fields["qs"], 4, 32), scales).sub_(mins[:, :, None])


def _q5_k(fields: Fields, out: torch.Tensor) -> None:
    quants = _unpack(fields["qs"], 4, 32).bitwise_or_(_unpack(fields["qh"], 1, 32).bitwise_left_shift_(4))
    scales, mins = _k_scales(fields)
    _scaled(out, quants, scales).sub_(mins[:, :, None])


def _q6_k(fields: Fields, out: torch.Tensor) -> None:
    quants = _unpack(fields["ql"], 4, 64).bitwise_or_(_unpack(fields["qh"], 2, 32).bitwise_left_shift_(4))
    _scaled(out, _signed(quants, 32), fields["d"].float()[:, None] * fields["scales"])


def _iq4_nl(fields: Fields, out: torch.Tensor) -> None:
    _scaled(out, _looked_up(IQ4_VALUES, _unpack(fields["qs"], 4, 16)), fields["d"].float())


def _iq4_xs(fields: Fields, out: torch.Tensor) -> None:
    scales = _unpack(fields["scales_l"], 4, 1) | (_unpack(fields["scales_h"], 2, 1) << 4)
    scales = fields["d"].float()[:, None] * _signed(scales, 32)
    _scaled(out, _looked_up(IQ4_VALUES, _unpack(fields["qs"], 4, 16)), scales)


def _mxfp4(fields: Fields, out: torch.Tensor) -> None:
    # E8M0 with a bias of 127, and a half because the table holds doubled values.
    scales = torch.tensor([math.ldexp(1.0, e - 128) for e in range(256)])[fields["e"].int()]
    _scaled(out, _looked_up(MXFP4_VALUES, _unpack(fields["qs"], 4, 16)), scales)


_DECODERS: Mapping[GGMLType, Decoder] = {
    GGMLType.F32: _f32,
    GGMLType.F16: _f16,
    GGMLType.BF16: _bf16,
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q5_1: _q5_1,
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q2_K: _q2_k,
    GGMLType.Q3_K: _q3_k,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q5_K: _q5_k,
    GGMLType.Q6_K: _q6_k,
    GGMLType.IQ4_NL: _iq4_nl,
    GGMLType.IQ4_XS: _iq4_xs,
    GGMLType.MXFP4: _mxfp4,
}
