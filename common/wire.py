"""Frames: what travels from stage to stage, laid out byte by byte and checked on arrival.

A frame is a fixed little-endian header and a payload of `rows` rows, each `row_bytes` long. The header names
the epoch, the step and its repeat, so that a late or foreign frame is recognised and dropped; a CRC-32 over
header and payload catches corruption. Nothing is pickled, nothing is trusted: every field is checked against
the bytes that are really there before anything is allocated.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from common.errors import CorruptDataError, UnsupportedVersionError

MAGIC = b"PLFR"
VERSION = 1

# magic, version, kind, dtype, window, rank, epoch, step_id, repeat, rows, row_bytes, sequence_number, crc
_HEADER = struct.Struct("<4sBBBxHHQQIIIQI")
HEADER_BYTES = _HEADER.size
_CRC_OFFSET = HEADER_BYTES - 4


class FrameKind(IntEnum):
    HIDDEN_STATES = 1  # rows of hidden states for the next window
    TOKENS = 2  # drawn tokens, from the last window to the first; one row a sampled position
    ECHO = 3  # self-test: the receiver sends it back unchanged


class FrameDType(IntEnum):
    FLOAT32 = 1
    INT32 = 2
    UINT8 = 3


_NUMPY = {FrameDType.FLOAT32: np.float32, FrameDType.INT32: np.int32, FrameDType.UINT8: np.uint8}
_DTYPES = {np.dtype(numpy): dtype for dtype, numpy in _NUMPY.items()}


@dataclass(frozen=True)
class Frame:
    """One message of a link; `payload` is [rows, columns]."""

    kind: FrameKind
    epoch: int
    step_id: int
    repeat: int
    payload: np.ndarray
    sequence_number: int = 0  # counts the frames of one link from 0
    window: int = 0  # the window this frame enters
    rank: int = 0  # the sender's shard within its window

    def encode(self) -> bytes:
        payload = np.ascontiguousarray(self.payload)
        rows = payload.shape[0]
        row_bytes = payload.nbytes // rows if rows else 0
        header = bytearray(HEADER_BYTES)
        _HEADER.pack_into(
            header, 0, MAGIC, VERSION, self.kind, _DTYPES[payload.dtype], self.window, self.rank,
            self.epoch, self.step_id, self.repeat, rows, row_bytes, self.sequence_number, 0,
        )  # fmt: skip
        data = payload.data.cast("B") if payload.nbytes else b""
        struct.pack_into("<I", header, _CRC_OFFSET, zlib.crc32(data, zlib.crc32(header)))
        return b"".join((header, data))

    @staticmethod
    def decode(data: bytes) -> Frame:
        """The frame in `data`; the payload is a read-only view of it.

        Raises CorruptDataError for bytes that are no frame, or not the whole of one, or damaged;
        UnsupportedVersionError for a frame of another version.
        """
        if len(data) < HEADER_BYTES or data[:4] != MAGIC:
            raise CorruptDataError(f"link: {len(data)} bytes that are no frame (magic {bytes(data[:4])!r})")
        if data[4] != VERSION:
            raise UnsupportedVersionError(f"link: frame version {data[4]}, this stage speaks {VERSION}")
        (_, _, kind, dtype, window, rank, epoch, step_id, repeat, rows, row_bytes, number, crc) = (
            _HEADER.unpack_from(data)
        )
        body = memoryview(data)[HEADER_BYTES:]
        where = f"link: frame {number} of step {step_id}"
        if rows * row_bytes != len(body):
            raise CorruptDataError(f"{where}: {rows} rows of {row_bytes} bytes, but {len(body)} bytes follow")
        header = bytearray(data[:HEADER_BYTES])
        header[_CRC_OFFSET:] = bytes(4)
        if zlib.crc32(body, zlib.crc32(header)) != crc:
            raise CorruptDataError(f"{where}: checksum differs, the frame was damaged on its way")
        try:
            numpy_dtype = np.dtype(_NUMPY[FrameDType(dtype)])
            frame_kind = FrameKind(kind)
        except ValueError as error:
            raise CorruptDataError(f"{where}: {error}") from None
        if row_bytes % numpy_dtype.itemsize:
            raise CorruptDataError(f"{where}: rows of {row_bytes} bytes hold no whole {numpy_dtype}")
        payload = np.frombuffer(body, dtype=numpy_dtype).reshape(rows, row_bytes // numpy_dtype.itemsize)
        return Frame(frame_kind, epoch, step_id, repeat, payload, number, window, rank)
