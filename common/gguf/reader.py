"""A GGUF model on disk, of one file or several: metadata, tensor table and the mapped tensor bytes.

Knows where bytes are and that they are all there; not what a tensor is for, nor how its type is decoded.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TypeVar

import numpy as np

from common.errors import CorruptDataError, PipeLLMError, UnknownModelError
from common.gguf.cursor import Value
from common.gguf.header import Header, TensorInfo, align_up, parse_header
from common.gguf.split import check_parts, part_paths

__all__ = ["GGUFFile", "TensorInfo", "Value"]

T = TypeVar("T")


@dataclass(frozen=True)
class _Part:
    path: Path
    source: str  # the path for messages
    data: mmap.mmap
    header: Header


class GGUFFile:
    """An open GGUF model; a context manager. Made by `GGUFFile.open`.

    `metadata` (of the first part) has Python scalars, lists of str or bool, and read-only numpy arrays of
    numbers; strings that are not UTF-8 carry lone surrogates (PEP 383). `fingerprint` is a sha256 in hex
    over the metadata and tensor tables of all parts as they stand in the files: equal for equal models
    wherever they lie. `file_bytes` counts all parts. The files must not shrink while they are mapped.
    """

    def __init__(self, parts: tuple[_Part, ...]) -> None:
        self.paths = tuple(part.path for part in parts)
        self.version = parts[0].header.version
        self.metadata: Mapping[str, Value] = MappingProxyType(parts[0].header.metadata)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {name: tensor for part in parts for name, tensor in part.header.tensors.items()}
        )
        self.fingerprint = _fingerprint(parts)
        self.file_bytes = sum(len(part.data) for part in parts)
        self._source = parts[0].source
        self._data = tuple(np.frombuffer(part.data, np.uint8) for part in parts)

    @classmethod
    def open(cls, path: str | Path) -> GGUFFile:
        """Map the model at `path`; any part of a split model stands for all of it.

        Raises `UnknownModelError` when a file is not there or cannot be read, `CorruptDataError` when it is
        not GGUF, damaged or incomplete (tensor data included), `UnsupportedVersionError` for a version or
        byte order that is not read, `UnsupportedModelError` for an unknown tensor type.
        """
        named = _load(Path(path), number=0)
        paths = part_paths(named.path, named.source, named.header.metadata)
        parts = tuple(
            named if part_path == named.path and number == 0 else _load(part_path, number)
            for number, part_path in enumerate(paths)
        )
        if len(parts) > 1:
            check_parts([part.source for part in parts], [part.header for part in parts])
        for part in parts:
            _check_data_is_there(part)
        return cls(parts)

    def tensor_bytes(self, name: str) -> np.ndarray:
        """The bytes of a tensor as stored: uint8 [nbytes], read-only, in the mapped file (no copy)."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise CorruptDataError(f"{self._source}: has no tensor {name!r}")
        if not self._data:
            raise PipeLLMError(f"{self._source}: tensor {name!r} was asked for after the file was closed")
        return self._data[tensor.part][tensor.offset : tensor.offset + tensor.nbytes]

    def require(self, key: str, kind: type[T]) -> T:
        """The metadata value of `key`; `CorruptDataError` when it is missing or not a `kind`.

        `kind` is bool, int, float (whole numbers are taken too), str, list or np.ndarray.
        """
        if key not in self.metadata:
            raise CorruptDataError(f"{self._source}: metadata has no {key!r}, which this model needs")
        return self._typed(key, kind)

    def get(self, key: str, kind: type[T], default: T) -> T:
        """Like `require`, with `default` for a key that is missing."""
        return self._typed(key, kind) if key in self.metadata else default

    def close(self) -> None:
        """Let go of the files. Bytes handed out stay valid; a file is unmapped with the last of them."""
        self._data = ()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _typed(self, key: str, kind: type[T]) -> T:
        value: object = self.metadata[key]
        if kind is float and type(value) is int:
            value = float(value)
        # bool is a subclass of int, but a flag is no number.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise CorruptDataError(
                f"{self._source}: metadata {key!r} is a {type(value).__name__}, expected is {kind.__name__}"
            )
        return value


def _load(path: Path, number: int) -> _Part:
    # A message has to be valid UTF-8 to travel; a path need not be.
    source = os.fsencode(path).decode("utf-8", "backslashreplace")
    data = _map(path, source)
    return _Part(path, source, data, parse_header(data, source, number))


def _map(path: Path, source: str) -> mmap.mmap:
    """The file's bytes, read-only. A file that is empty, which cannot be mapped, is refused here."""
    try:
        # Looked at first, because opening a named pipe would wait for a writer.
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise UnknownModelError(f"{source}: is a directory, name the .gguf file in it")
        if not stat.S_ISREG(status.st_mode):
            raise UnknownModelError(f"{source}: is not a regular file")
        if not status.st_size:
            raise CorruptDataError(f"{source}: is empty")
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise UnknownModelError(f"{source}: there is no such file") from None
    except OSError as error:
        raise UnknownModelError(f"{source}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UnknownModelError(f"{source}: is no path: {error}") from error


def _check_data_is_there(part: _Part) -> None:
    stored = [tensor for tensor in part.header.tensors.values() if tensor.nbytes]
    if not stored:
        return
    last = max(stored, key=lambda tensor: tensor.offset)
    # The format pads every tensor, the last one too.
    needed = align_up(last.offset + last.nbytes, part.header.alignment)
    if needed > len(part.data):
        raise CorruptDataError(
            f"{part.source}: tensor data is cut off: tensor {last.name!r} at byte {last.offset} needs a file "
            f"of {needed} bytes, this one has {len(part.data)} (incomplete: fetch it again)"
        )


def _fingerprint(parts: tuple[_Part, ...]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.header.table_end.to_bytes(8, "little"))
        digest.update(part.data[: part.header.table_end])
    return digest.hexdigest()
