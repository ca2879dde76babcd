"""GGUF files built byte by byte, for what a well-behaved writer never writes."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from gguf import GGUFValueType


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str | bytes, kind: GGUFValueType | int, value: bytes) -> bytes:
    """A metadata entry; `value` is the value's bytes as stored."""
    return text(key) + struct.pack("<I", kind) + value


def array(kind: GGUFValueType | int, count: int, items: bytes) -> bytes:
    """The bytes of an array value."""
    return struct.pack("<IQ", kind, count) + items


def u32_entry(key: str, value: int) -> bytes:
    return entry(key, GGUFValueType.UINT32, struct.pack("<I", value))


def tensor(name: str | bytes, dims: Sequence[int], kind: int, offset: int) -> bytes:
    """An entry of the tensor table."""
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def gguf_bytes(
    entries: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    entry_count: int | None = None,
    tensor_count: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A whole file; the counts are those of what is given, unless told otherwise."""
    head = b"GGUF" + struct.pack(
        "<IQQ",
        version,
        len(tensors) if tensor_count is None else tensor_count,
        len(entries) if entry_count is None else entry_count,
    )
    head += b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data
