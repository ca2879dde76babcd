"""The header of one GGUF file: magic and version, metadata, tensor table, each checked as it is read.

Knows bytes, not files: what is mapped, which parts make a model and whether the tensor data is all there
is the reader's business. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType

from common.errors import CorruptDataError, UnsupportedModelError, UnsupportedVersionError
from common.gguf.cursor import Buffer, Cursor, Value
from common.gguf.foreign import describe

VERSIONS = (2, 3)
MAX_KEY_BYTES = 65535
MAX_TENSOR_NAME_BYTES = 64
MAX_DIMS = 4
_MAX_INT64 = 2**63 - 1

# The least an entry takes: an empty string's length, a type, a value of a byte; and for a tensor its
# name's length, number of dimensions, type and offset.
_MIN_METADATA_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies and what its bytes are.

    `shape` is in GGUF order: shape[0] is the contiguous dimension (columns, in_features). `part` says
    which file of a split model, `offset` is counted in bytes from the start of that file.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: GGMLQuantizationType
    part: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """What one file says before its tensor data. `table_end` is the byte after the tensor table."""

    version: int
    metadata: dict[str, Value]
    tensors: dict[str, TensorInfo]
    alignment: int
    table_end: int


def parse_header(data: Buffer, source: str, part: int = 0) -> Header:
    """Read the header at the start of `data`.

    `source` names the file in errors, `part` is its number in a split model. Raises `CorruptDataError` for
    another kind of file and for bytes that contradict themselves, `UnsupportedVersionError` for a version
    or byte order that is not read, and `UnsupportedModelError` for a tensor type this build does not know.
    Does not look at the tensor data, nor whether it is there.
    """
    cursor = Cursor(data, source)
    version = _version(cursor, data)
    tensor_count = cursor.count("number of tensors", _MIN_TENSOR_BYTES)
    metadata_count = cursor.count("number of metadata entries", _MIN_METADATA_BYTES)
    metadata: dict[str, Value] = {}
    alignment = GGUF_DEFAULT_ALIGNMENT
    for index in range(metadata_count):
        offset = cursor.pos
        key = cursor.identifier(f"key of metadata entry {index}", MAX_KEY_BYTES)
        if key in metadata:
            raise cursor.error(f"key of metadata entry {index}", offset, f"{key!r} is there twice")
        metadata[key] = cursor.value(f"value of {key!r}")
        if key == "general.alignment":
            alignment = _alignment(cursor, offset, metadata[key])

    tensors: dict[str, tuple[tuple[int, ...], GGMLQuantizationType, int, int]] = {}
    for index in range(tensor_count):
        offset = cursor.pos
        name = cursor.identifier(f"name of tensor {index}", MAX_TENSOR_NAME_BYTES)
        if name in tensors:
            raise cursor.error(f"name of tensor {index}", offset, f"{name!r} is there twice")
        tensors[name] = _tensor(cursor, f"tensor {name!r}", alignment)
    data_start = align_up(cursor.pos, alignment)
    placed = {
        name: TensorInfo(name, shape, ggml_type, part, data_start + relative, nbytes)
        for name, (shape, ggml_type, relative, nbytes) in tensors.items()
    }
    _check_overlap(source, placed)
    return Header(version, metadata, placed, alignment, cursor.pos)


def align_up(offset: int, alignment: int) -> int:
    """The first multiple of `alignment` at or after `offset`."""
    return -(-offset // alignment) * alignment


def _version(cursor: Cursor, data: Buffer) -> int:
    if data[:4] != b"GGUF":
        raise CorruptDataError(f"{cursor.source}: is not a GGUF file, it looks like {describe(data[:64])}")
    cursor.u32("magic")
    version = cursor.u32("version")
    if version in VERSIONS:
        return version
    if version == 0 or (version > 0xFFFF and version & 0xFFFF):
        raise cursor.error("version", 4, f"is {version}, which no GGUF file has")
    if version & 0xFFFF == 0:
        problem = "is a big-endian GGUF file; only little-endian ones are read (convert it)"
    elif version < VERSIONS[0]:
        problem = f"is GGUF version {version}; versions 2 and 3 are read (convert the model anew)"
    else:
        problem = f"is GGUF version {version}; versions 2 and 3 are read (a newer PipeLLM may read it)"
    raise UnsupportedVersionError(f"{cursor.source}: {problem}")


def _alignment(cursor: Cursor, offset: int, value: Value) -> int:
    if type(value) is not int or value <= 0 or value & (value - 1):
        raise cursor.error("general.alignment", offset, f"{value!r} is not a power of two")
    return value


def _tensor(
    cursor: Cursor, field: str, alignment: int
) -> tuple[tuple[int, ...], GGMLQuantizationType, int, int]:
    """One entry of the table after its name: shape, type, offset from the start of the data, bytes."""
    dims_at = cursor.pos
    dims = cursor.u32(f"{field}: number of dimensions")
    if dims > MAX_DIMS:
        problem = f"is {dims}, allowed are up to {MAX_DIMS}"
        raise cursor.error(f"{field}: number of dimensions", dims_at, problem)
    shape = tuple(cursor.u64(f"{field}: dimension {i}") for i in range(dims))
    elements = math.prod(shape)
    if max(elements, *shape, 0) > _MAX_INT64:
        problem = f"{shape} are more elements than a file can hold"
        raise cursor.error(f"{field}: dimensions", dims_at, problem)

    type_at = cursor.pos
    type_id = cursor.u32(f"{field}: type")
    if type_id not in GGML_QUANT_SIZES:
        raise UnsupportedModelError(
            f"{cursor.source}: {field}: type at byte {type_at}: tensor type {type_id} is not known "
            "(newer than this build, withdrawn, or a damaged file)"
        )
    ggml_type = GGMLQuantizationType(type_id)
    block_elements, block_bytes = GGML_QUANT_SIZES[ggml_type]
    columns = shape[0] if shape else 1
    if columns % block_elements:
        problem = f"{columns} columns are no multiple of the {block_elements} of a {ggml_type.name} block"
        raise cursor.error(f"{field}: dimensions", dims_at, problem)
    nbytes = elements // block_elements * block_bytes
    if nbytes > _MAX_INT64:
        problem = f"{shape} are more bytes than a file can hold"
        raise cursor.error(f"{field}: dimensions", dims_at, problem)

    offset_at = cursor.pos
    offset = cursor.u64(f"{field}: offset")
    if offset % alignment:
        problem = f"{offset} is no multiple of the alignment {alignment}"
        raise cursor.error(f"{field}: offset", offset_at, problem)
    return shape, ggml_type, offset, nbytes


def _check_overlap(source: str, tensors: dict[str, TensorInfo]) -> None:
    ordered = sorted((tensor for tensor in tensors.values() if tensor.nbytes), key=lambda t: t.offset)
    for before, after in pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            raise CorruptDataError(
                f"{source}: tensor {after.name!r} starts at byte {after.offset}, inside tensor "
                f"{before.name!r}, which ends at byte {before.offset + before.nbytes}"
            )
