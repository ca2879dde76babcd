"""Bounded little-endian reading of a GGUF header: nothing is read or allocated past what the file holds.

Knows the GGUF value types and how they are stored, not what the values mean.
"""

from __future__ import annotations

import mmap
import struct

import numpy as np
from gguf import GGUFValueType

from common.errors import CorruptDataError, UnsupportedModelError

Value = bool | int | float | str | list[str] | list[bool] | np.ndarray
Buffer = bytes | mmap.mmap

# A bound on what a hostile or damaged header can cost in time and memory. The largest vocabularies in use
# (260,000 tokens, 500,000 merges) take about 15 MiB.
MAX_HEADER_BYTES = 64 << 20

# The letters mean the same to struct and to numpy.
_NUMBERS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.FLOAT64: "<d",
    GGUFValueType.BOOL: "<B",
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class Cursor:
    """A position in the header of one file, with a typed read for everything a header holds.

    Every read names the field it reads. A read past the end raises `CorruptDataError` with the file, the
    field and the byte offset.
    """

    def __init__(self, data: Buffer, source: str) -> None:
        self.source = source
        self.pos = 0
        self._data = data
        self._end = min(len(data), MAX_HEADER_BYTES)

    def error(self, field: str, offset: int, problem: str) -> CorruptDataError:
        """The exception for a field whose bytes, at `offset`, are wrong."""
        return CorruptDataError(f"{self.source}: {field} at byte {offset}: {problem}")

    def u32(self, field: str) -> int:
        return int(self._number(_U32, field))

    def u64(self, field: str) -> int:
        return int(self._number(_U64, field))

    def count(self, field: str, min_item_bytes: int) -> int:
        """A u64 number of items, refused when that many, of the least possible size, cannot follow."""
        offset = self.pos
        count = self.u64(field)
        if count * min_item_bytes > self._end - self.pos:
            what = f"{count} items of at least {min_item_bytes} bytes"
            raise self._too_long(field, offset, what, count * min_item_bytes)
        return count

    def text(self, field: str) -> str:
        """A string. Token pieces may be cut inside a character: bytes that are not UTF-8 become lone
        surrogates (PEP 383), and `text.encode("utf-8", "surrogateescape")` gives the bytes back."""
        return self._raw(field).decode("utf-8", "surrogateescape")

    def identifier(self, field: str, max_bytes: int) -> str:
        """A key or a tensor name: a string that is not empty, within `max_bytes`, and valid UTF-8."""
        offset = self.pos
        raw = self._raw(field)
        if not 0 < len(raw) <= max_bytes:
            raise self.error(field, offset, f"is {len(raw)} bytes long, allowed are 1 to {max_bytes}")
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(field, offset, f"{raw!r} is not UTF-8") from error

    def value(self, field: str) -> Value:
        """A value with its type before it: a Python scalar, a list (strings, bools) or a numpy array."""
        kind = self._value_type(field)
        if kind == GGUFValueType.STRING:
            return self.text(field)
        if kind == GGUFValueType.ARRAY:
            return self._array(field)
        number = self._number(struct.Struct(_NUMBERS[kind]), field)
        return bool(number) if kind == GGUFValueType.BOOL else number

    def _array(self, field: str) -> Value:
        offset = self.pos
        kind = self._value_type(field)
        if kind == GGUFValueType.ARRAY:
            raise UnsupportedModelError(
                f"{self.source}: {field} at byte {offset}: arrays of arrays are not supported"
            )
        if kind == GGUFValueType.STRING:
            return self._texts(self.count(f"{field}: length", _U64.size), field)
        dtype = np.dtype(_NUMBERS[kind])
        count = self.count(f"{field}: length", dtype.itemsize)
        if count == 0:
            return [] if kind == GGUFValueType.BOOL else np.empty(0, dtype)
        values = np.frombuffer(self._data, dtype, count, self.pos).copy()
        self.pos += values.nbytes
        if kind == GGUFValueType.BOOL:
            return values.astype(bool).tolist()
        values.flags.writeable = False
        return values

    def _texts(self, count: int, field: str) -> list[str]:
        # A vocabulary is some 300,000 strings here: local names, and no call per string but the needed ones.
        data, end, pos, length = self._data, self._end, self.pos, _U64.unpack_from
        texts: list[str] = []
        while len(texts) < count:
            start = pos + 8
            stop = start + length(data, pos)[0] if start <= end else end + 1
            if stop > end:
                self.pos = pos  # the checked read says what is wrong
                self._raw(f"{field}: string {len(texts)}")
            texts.append(data[start:stop].decode("utf-8", "surrogateescape"))
            pos = stop
        self.pos = pos
        return texts

    def _raw(self, field: str) -> bytes:
        length = self.count(f"{field}: length", 1)
        self.pos += length
        return self._data[self.pos - length : self.pos]

    def _value_type(self, field: str) -> GGUFValueType:
        offset = self.pos
        type_id = self.u32(f"{field}: type")
        try:
            return GGUFValueType(type_id)
        except ValueError:
            raise self.error(f"{field}: type", offset, f"no type has the number {type_id}") from None

    def _number(self, layout: struct.Struct, field: str) -> int | float:
        if layout.size > self._end - self.pos:
            raise self._too_long(field, self.pos, f"{layout.size} bytes", layout.size)
        number: int | float = layout.unpack_from(self._data, self.pos)[0]
        self.pos += layout.size
        return number

    def _too_long(self, field: str, offset: int, what: str, needed: int) -> CorruptDataError:
        if len(self._data) > self._end and needed <= len(self._data) - self.pos:
            problem = f"{what} would make the header larger than the {self._end} bytes this build reads"
        else:
            problem = (
                f"{what} cannot follow, the file ends at byte {len(self._data)} "
                "(damaged or incomplete: fetch it again)"
            )
        return self.error(field, offset, problem)
