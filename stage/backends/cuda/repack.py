"""Rearranges weights as the kernels read them: tiles of 16 rows by 256 columns, losslessly.

The planes of a tile are described in kernels/types.cuh; this file writes them, with torch on whatever device
the raw bytes are. Rows and columns are padded with zero blocks, which mean zero in every type. F32 and BF16
matrices become f16 after multiplication by a power of two: that is what an f16 operand makes of them anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as GGMLType

from common.errors import UnsupportedModelError

TILE_ROWS, TILE_COLUMNS = 16, 256

TILE_BYTES = {
    GGMLType.Q4_0: 2304,
    GGMLType.Q4_1: 2560,
    GGMLType.Q5_0: 2816,
    GGMLType.Q5_1: 3072,
    GGMLType.Q8_0: 4352,
    GGMLType.Q2_K: 1344,
    GGMLType.Q3_K: 1824,
    GGMLType.Q4_K: 2304,
    GGMLType.Q5_K: 2816,
    GGMLType.Q6_K: 3360,
    GGMLType.IQ4_NL: 2304,
    GGMLType.IQ4_XS: 2208,
    GGMLType.MXFP4: 2176,
    GGMLType.F16: 8192,
    GGMLType.BF16: 8192,
    GGMLType.F32: 8192,
}

CONVERTED_TYPES = frozenset({GGMLType.F32, GGMLType.BF16})  # of the other types, bits are moved
_PLAIN_TYPES = CONVERTED_TYPES | {GGMLType.F16}

PIECE_ELEMENTS = 1 << 25  # rearranged at once; bounds the temporaries


@dataclass(frozen=True)
class PackedMatrix:
    """A weight [rows, columns] in tiles: uint8 [row_tiles, column_tiles, tile bytes], or a stack of such.

    Sums of the kernels are multiplied by `inverse`; `exponent` is what the kernels scale by (types.cuh).
    """

    tiles: torch.Tensor
    kernel_type: str  # as types.cuh names it
    exponent: int
    inverse: float
    rows: int
    columns: int

    @property
    def row_tiles(self) -> int:
        return self.tiles.shape[-3]

    @property
    def column_tiles(self) -> int:
        return self.tiles.shape[-2]

    @property
    def nbytes(self) -> int:
        return self.tiles.numel()


def packed_bytes(ggml_type: GGMLType, rows: int, columns: int) -> int:
    """Bytes a matrix takes once packed. Raises UnsupportedModelError for a type without kernels."""
    _check_type(ggml_type)
    return -(-rows // TILE_ROWS) * -(-columns // TILE_COLUMNS) * TILE_BYTES[ggml_type]


def pack(raw: torch.Tensor, ggml_type: GGMLType, columns: int) -> PackedMatrix:
    """raw: uint8 [rows, row_bytes] as the file stores them, on any device. The result is on the same
    device."""
    _check(ggml_type, columns)
    rows = raw.shape[0]
    row_tiles, column_tiles = -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS)
    tiles = torch.empty(
        (row_tiles, column_tiles, TILE_BYTES[ggml_type]), dtype=torch.uint8, device=raw.device
    )
    step = max(1, PIECE_ELEMENTS // (column_tiles * TILE_COLUMNS * TILE_ROWS)) * TILE_ROWS
    largest = 0.0
    plain = ggml_type in _PLAIN_TYPES
    power = _plain_power(raw.split(step), ggml_type) if plain else 0
    for start in range(0, rows, step):
        blocks = _whole_tiles(raw[start : start + step], ggml_type, columns)
        out = tiles[start // TILE_ROWS : start // TILE_ROWS + len(blocks) // TILE_ROWS]
        if plain:
            out.copy_(_plain(blocks, ggml_type, power))
            continue
        planes, scale = _PACKERS[ggml_type](blocks)
        torch.cat([plane.reshape(*out.shape[:2], -1) for plane in planes], dim=-1, out=out)
        largest = max(largest, scale)
    return _packed(tiles, ggml_type, power, largest, rows, columns)


def describe(pieces: Iterable[torch.Tensor], ggml_type: GGMLType, shape: tuple[int, ...]) -> PackedMatrix:
    """What `pack` makes of a matrix, or a stack of them, but for the tiles, which have a shape and no memory.

    pieces: uint8 [n, row_bytes], together all rows of the stack, in any order, on any device; shape:
    [..., rows, columns].
    """
    *stack, rows, columns = shape
    _check(ggml_type, columns)
    power, largest = 0, 0.0
    if ggml_type in _PLAIN_TYPES:
        power = _plain_power(pieces, ggml_type)
    else:
        for piece in pieces:
            largest = max(largest, _PACKERS[ggml_type](_whole_tiles(piece, ggml_type, columns))[1])
    tiles_shape = (*stack, -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS), TILE_BYTES[ggml_type])
    tiles = torch.empty(tiles_shape, dtype=torch.uint8, device="meta")
    return _packed(tiles, ggml_type, power, largest, rows, columns)


def _check_type(ggml_type: GGMLType) -> None:
    if ggml_type not in TILE_BYTES:
        raise UnsupportedModelError(f"the CUDA backend has no kernels for tensors of type {ggml_type.name}")


def _check(ggml_type: GGMLType, columns: int) -> None:
    _check_type(ggml_type)
    if columns % 4:
        raise UnsupportedModelError(f"the CUDA backend needs rows of a multiple of 4 elements, not {columns}")


def _whole_tiles(raw: torch.Tensor, ggml_type: GGMLType, columns: int) -> torch.Tensor:
    """Rows, padded with zeros to whole tiles: uint8 [rows, blocks, block_bytes]."""
    block_elements, block_bytes = GGML_QUANT_SIZES[ggml_type]
    row_bytes = -(-columns // TILE_COLUMNS) * TILE_COLUMNS // block_elements * block_bytes
    missing = -len(raw) % TILE_ROWS
    if missing or raw.shape[1] != row_bytes:
        raw = torch.nn.functional.pad(raw, (0, row_bytes - raw.shape[1], 0, missing))
    return raw.reshape(len(raw), -1, block_bytes)


def _packed(
    tiles: torch.Tensor, ggml_type: GGMLType, power: int, largest: float, rows: int, columns: int
) -> PackedMatrix:
    if ggml_type in _PLAIN_TYPES:
        return PackedMatrix(tiles, "F16", 0, 2.0**-power, rows, columns)
    # The largest scale lands in [2^14, 2^15). A quant is read as q 2^-24, or q 2^-20 where no nibbles lie
    # below.
    exponent = 0 if largest == 0 else min(max(15 - math.frexp(largest)[1], 0), 30)
    start_bit = 4 if ggml_type in (GGMLType.Q2_K, GGMLType.Q3_K) else 0
    return PackedMatrix(tiles, ggml_type.name, exponent, 2.0 ** (24 - start_bit - exponent), rows, columns)


# --- plain numbers ------------------------------------------------------------------------------------------


def _floats(raw: torch.Tensor, ggml_type: GGMLType) -> torch.Tensor:
    dtype = {GGMLType.F16: torch.float16, GGMLType.BF16: torch.bfloat16, GGMLType.F32: torch.float32}
    return raw.contiguous().view(dtype[ggml_type])


def _plain_power(pieces: Iterable[torch.Tensor], ggml_type: GGMLType) -> int:
    """The power of two that brings the largest value of a BF16 or F32 matrix under 1; f16 stays as it is."""
    if ggml_type == GGMLType.F16:
        return 0
    largest = float(torch.stack([_floats(piece, ggml_type).abs().amax() for piece in pieces]).amax())
    return 0 if largest == 0 or not math.isfinite(largest) else -math.frexp(largest)[1]


def _plain(blocks: torch.Tensor, ggml_type: GGMLType, power: int) -> torch.Tensor:
    values = _floats(blocks.reshape(len(blocks), -1), ggml_type)
    if ggml_type != GGMLType.F16:
        values = (values.float() * 2.0**power).half()
    # [j][upper][g][t][c]
    lanes = values.view(-1, 2, 8, values.shape[1] // TILE_COLUMNS, 8, 4, 8).permute(0, 3, 4, 1, 2, 5, 6)
    return lanes.reshape(lanes.shape[0], lanes.shape[1], -1).view(torch.uint8)


# --- planes: quants uint8 [rows, columns] to bytes [row_tiles, column_tiles, ...] -------------------------


def _lanes(quants: torch.Tensor) -> torch.Tensor:
    """[row_tile, upper, g, column_tile, i, parity, t, step, p, e]: row 16 row_tile + 8 upper + g, column
    256 column_tile + 64 i + 32 parity + 8 t + 4 step + 2 p + e."""
    return quants.reshape(-1, 2, 8, quants.shape[1] // TILE_COLUMNS, 4, 2, 4, 2, 2, 2)


def _nibble_plane(quants: torch.Tensor) -> torch.Tensor:
    lanes = _lanes(quants & 15)
    both = lanes[:, :, :, :, :, 0] | lanes[:, :, :, :, :, 1] << 4  # [rt, upper, g, ct, i, t, step, p, e]
    return both.permute(0, 3, 4, 2, 5, 6, 1, 8, 7).contiguous()


def _words(lanes: torch.Tensor, bit: Callable[[int, int, int], int], merge_upper: bool) -> torch.Tensor:
    """Fields of a lane, gathered into little-endian 32-bit words; `bit(upper, n, parity)` + 16 e is a
    field's place.

    Returns int32 [rt, ct, i, g, t] where both rows share a word (`merge_upper`), else [rt, ct, i, upper, g,
    t].
    """
    lanes = lanes.int()
    words: list[torch.Tensor] = []
    for upper in range(2):
        word = torch.zeros_like(lanes[:, 0, :, :, :, 0, :, 0, 0, 0])  # [rt, g, ct, i, t]
        for parity in range(2):
            for step in range(2):
                for p in range(2):
                    for e in range(2):
                        field = lanes[:, upper, :, :, :, parity, :, step, p, e]
                        word |= field << (bit(upper, 2 * step + p, parity) + 16 * e)
        words.append(word.permute(0, 2, 3, 1, 4))
    return words[0] | words[1] if merge_upper else torch.stack(words, dim=3)


def _pair_plane(pairs: torch.Tensor) -> torch.Tensor:
    words = _words(_lanes(pairs), lambda _upper, n, parity: (0, 2, 8, 10)[n] + 4 * parity, merge_upper=False)
    rt, ct, _, _, g, t = words.shape
    # [i / 2][g][t][i % 2][upper]
    return words.view(rt, ct, 2, 2, 2, g, t).permute(0, 1, 2, 5, 6, 3, 4).contiguous().view(torch.uint8)


def _single_plane(singles: torch.Tensor) -> torch.Tensor:
    words = _words(
        _lanes(singles),
        lambda upper, n, parity: (0, 1, 2, 3, 8, 9, 10, 11)[4 * upper + n] + 4 * parity,
        merge_upper=True,
    )
    return words.permute(0, 1, 3, 4, 2).contiguous().view(torch.uint8)  # [g][t][i]


def _byte_plane(quants: torch.Tensor) -> torch.Tensor:
    # [i][parity][g][t][step][upper][e][p]
    return _lanes(quants).permute(0, 3, 4, 5, 2, 6, 7, 1, 9, 8).contiguous()


def _index_plane(quants: torch.Tensor) -> torch.Tensor:
    lanes = _lanes(quants)
    both = lanes[..., 0, :] | lanes[..., 1, :] << 4  # [rt, upper, g, ct, i, parity, t, step, e]
    return both.permute(0, 3, 4, 2, 6, 7, 1, 5, 8).contiguous()


# --- planes of scales -------------------------------------------------------------------------------------


def _by_row(values: torch.Tensor, per_tile: int) -> torch.Tensor:
    """[rows, groups] -> [row_tile, upper, g, column_tile, per_tile]."""
    return values.reshape(-1, 2, 8, values.shape[1] // per_tile, per_tile)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


def _block_scales(d: torch.Tensor) -> torch.Tensor:
    return _bytes(_by_row(d, 8).permute(0, 3, 1, 2, 4))


def _block_scales_offsets(d: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    both = torch.stack((_by_row(d, 8), _by_row(m, 8)), dim=-1)  # [rt, upper, g, ct, 8, 2]
    halves = both.view(*both.shape[:4], 2, 4, 2)
    return _bytes(halves.permute(0, 3, 4, 1, 2, 5, 6))


def _super_d(*values: torch.Tensor) -> torch.Tensor:
    """f16 [rows, blocks] each -> [rt, ct, g, upper, values]."""
    both = torch.stack([_by_row(value, 1)[..., 0] for value in values], dim=-1)
    return _bytes(both.permute(0, 3, 2, 1, 4))


def _super_scales_offsets(sc: torch.Tensor, m: torch.Tensor) -> list[torch.Tensor]:
    """6-bit sc and m uint8 [rows, blocks * 8]."""
    sc, m = (_by_row(v, 8).int() for v in (sc, m))
    sc, m = (v.view(*v.shape[:4], 4, 2) for v in (sc, m))  # [rt, upper, g, ct, t, parity]
    low = torch.zeros_like(sc[:, 0, :, :, :, 0])
    high = torch.zeros_like(low)
    for upper in range(2):
        for parity in range(2):
            k = 2 * upper + parity
            one, other = sc[:, upper, :, :, :, parity], m[:, upper, :, :, :, parity]
            low |= (one & 15) << (4 * k) | (other & 15) << (16 + 4 * k)
            high |= (one >> 4) << (2 * k) | (other >> 4) << (8 + 2 * k)
    low, high = (v.permute(0, 2, 1, 3) for v in (low, high))  # [rt, ct, g, t]
    return [_bytes(low), _bytes(high.short())]


def _super_scales16(sc: torch.Tensor) -> torch.Tensor:
    """int8 or uint8 [rows, blocks * 16] -> [g][t / 2][upper][8 sub-blocks]."""
    groups = _by_row(sc, 16)
    groups = groups.view(*groups.shape[:4], 8, 2)
    return _bytes(groups.permute(0, 3, 2, 5, 1, 4))


def _super_scales32(sc: torch.Tensor) -> torch.Tensor:
    return _bytes(_by_row(sc, 8).permute(0, 3, 2, 1, 4))  # [g][upper][8 sub-blocks]


# --- types: blocks uint8 [rows, blocks, block_bytes] to planes and the largest scale ----------------------

Packer = Callable[[torch.Tensor], tuple[list[torch.Tensor], float]]


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0]


def _unpack(packed: torch.Tensor, bits: int, run: int) -> torch.Tensor:
    """[..., bytes] holding fields of `bits` bits -> [..., bytes * 8 / bits]: of each run of bytes first the
    lowest fields, then the next."""
    runs = packed.reshape(*packed.shape[:-1], -1, 1, run)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)[:, None]
    fields = (runs >> shifts) & ((1 << bits) - 1)
    return fields.reshape(*packed.shape[:-1], -1)


def _flat(quants: torch.Tensor) -> torch.Tensor:
    return quants.reshape(len(quants), -1)


def _largest(scales: torch.Tensor) -> float:
    return float(scales.float().abs().amax())


def _q4_0(b: torch.Tensor) -> tuple[list[torch.Tensor], float]:
    d = _half(b, 0)
    return [_nibble_plane(_flat(_unpack(b[..., 2:], 4, 16))), _block_scales(d)], _largest(d)


def _q4_1(b: torch.Tensor) -> tuple[list[torch.Tensor], float]:
    d, m = _half(b, 0), _half(b, 2)
    return [_nibble_plane(_flat(_unpack(b[..., 4:], 4, 16))), _block_scales_offsets(d, m)], _largest(d)


def _q5_0(b: torch.Tensor) -> tuple[list[torch.Tensor], float]:
    d = _half(b, 0)
    low, high = _unpack(b[..., 6:], 4, 16), _single_bits(b[..., 2:6])
    return [_nibble_plane(_flat(low)), _single_plane(_flat(high)), _block_scales(d)], _largest(d)


def _q5_1(b: torch.Tensor) -> tuple[list[torch.Tensor], float]:
    d, m = _half(b, 0), _half(b, 2)
    low, high = _unpack(b[..., 8:], 4, 16), _single_bits(b[..., 4:8])
    return [_nibble_plane(_flat(low)), _single_plane(_flat(high)), _block_scales_offsets(d, m)], _largest(d)


def _single_bits(packed: torch.Tensor) -> torch.Tensor:
    """[..., 4]: bit i of the little-endian word -> [..., 32]."""
    return _unpack(packed, 1, 1)


def _q8_0(b: torch.Tensor) -> tuple[list[torch.Tensor], float]:
    d = _half(b, 0)
    return [_byte_plane(_flat(b[..., 2:] ^ 0x80)), _block_scales(d)], _largest(d)


def _q2_k(b: torch.Tensor) -> tuple[list[torch.Tensor], float]:
    scales, d, dmin = b[..., :16], _half(b, 80), _half(b, 82)
    quants = _flat(_unpack(b[..., 16:80], 2, 32))
    planes = [_pair_plane(quants), _super_scales16(_flat(scales)), _super_d(d, dmin)]
    return planes, _largest(d.float()[..., None] * (scales & 15))


def _q3_k(b: torch.Tensor) -> tuple[list[torch.Tensor], float]:
    low, high = _unpack(b[..., 32:96], 2, 32), _unpack(b[..., :32], 1, 32)
    sc = _unpack(b[..., 96:104], 4, 8) | _unpack(b[..., 104:108], 2, 4) << 4
    sc = (sc.to(torch.int16) - 32).to(torch.int8)
    d = _half(b, 108)
    planes = [_pair_plane(_flat(low)), _single_plane(_flat(high)), _super_scales16(_flat(sc)), _super_d(d)]
    return planes, _largest(d.float()[..., None] * sc)


def _six_bit_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The 12 bytes of Q4_K and Q5_K: 6-bit scales and offsets, uint8 [..., 8] each."""
    a, b, c = packed[..., :4], packed[..., 4:8], packed[..., 8:12]
    scales = torch.cat((a & 63, (c & 15) | (a >> 6) << 4), dim=-1)
    offsets = torch.cat((b & 63, (c >> 4) | (b >> 6) << 4), dim=-1)
    return scales, offsets


def _q4_k(b: torch.Tensor) -> tuple[list[torch.Tensor], float]:
    d, dmin = _half(b, 0), _half(b, 2)
    sc, m = _six_bit_scales(b[..., 4:16])
    quants = _nibble_plane(_flat(_unpack(b[..., 16:], 4, 32)))
    planes = [quants, *_super_scales_offsets(_flat(sc), _flat(m)), _super_d(d, dmin)]
    return planes, _largest(d.float()[..., None] * sc)


def _q5_k(b: torch.Tensor) -> tuple[list[torch.Tensor], float]:
    d, dmin = _half(b, 0), _half(b, 2)
    sc, m = _six_bit_scales(b[..., 4:16])
    low, high = _unpack(b[..., 48:], 4, 32), _unpack(b[..., 16:48], 1, 32)
    quants = [_nibble_plane(_flat(low)), _single_plane(_flat(high))]
    planes = [*quants, *_super_scales_offsets(_flat(sc), _flat(m)), _super_d(d, dmin)]
    return planes, _largest(d.float()[..., None] * sc)


def _q6_k(b: torch.Tensor) -> tuple[list[torch.Tensor], float]:
    low, high = _unpack(b[..., :128], 4, 64), _unpack(b[..., 128:192], 2, 32)
    sc, d = b[..., 192:208].contiguous().view(torch.int8), _half(b, 208)
    planes = [_nibble_plane(_flat(low)), _pair_plane(_flat(high)), _super_scales16(_flat(sc)), _super_d(d)]
    return planes, _largest(d.float()[..., None] * sc)


def _iq4_nl(b: torch.Tensor) -> tuple[list[torch.Tensor], float]:
    d = _half(b, 0)
    return [_index_plane(_flat(_unpack(b[..., 2:], 4, 16))), _block_scales(d)], _largest(d)


def _iq4_xs(b: torch.Tensor) -> tuple[list[torch.Tensor], float]:
    d = _half(b, 0)
    sc = _unpack(b[..., 4:8], 4, 1) | _unpack(b[..., 2:4], 2, 1) << 4
    sc = (sc.to(torch.int16) - 32).to(torch.int8)
    planes = [_index_plane(_flat(_unpack(b[..., 8:], 4, 16))), _super_scales32(_flat(sc)), _super_d(d)]
    return planes, _largest(d.float()[..., None] * sc)


def _mxfp4(b: torch.Tensor) -> tuple[list[torch.Tensor], float]:
    e = b[..., 0]
    planes = [_index_plane(_flat(_unpack(b[..., 1:], 4, 16))), _super_scales32(e)]
    return planes, 2.0 ** (int(e.amax()) - 128)


_PACKERS: dict[GGMLType, Packer] = {
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
