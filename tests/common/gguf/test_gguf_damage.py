"""Damaged and hostile files: every defect is an error that says where, and costs neither time nor memory."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType, GGUFValueType
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import CorruptDataError, PipeLLMError, UnsupportedModelError
from common.gguf.cursor import MAX_HEADER_BYTES
from common.gguf.reader import GGUFFile
from tests.common.gguf.open_all import open_all
from tests.common.gguf.raw_gguf import array, entry, gguf_bytes, tensor, text, u32_entry

F32, I8, Q8_0 = GGMLQuantizationType.F32, GGMLQuantizationType.I8, GGMLQuantizationType.Q8_0
HUGE = struct.pack("<Q", 2**63)

DEFECTS: dict[str, tuple[bytes, str]] = {
    "no room for the counts": (
        gguf_bytes()[:20],
        r"number of metadata entries at byte 16: 8 bytes cannot follow",
    ),
    "no version": (b"GGUF\3", "version at byte 4"),
    "an absurd version": (gguf_bytes(version=0x12345678), "version at byte 4: is 305419896"),
    "too many tensors": (
        gguf_bytes(tensor_count=2**64 - 1),
        "number of tensors at byte 8: 18446744073709551615",
    ),
    "more tensors than fit": (gguf_bytes(tensor_count=2), "number of tensors at byte 8: 2 items"),
    "too many entries": (
        gguf_bytes(entry_count=2**40),
        "number of metadata entries at byte 16: 1099511627776",
    ),
    "a key that does not end": (
        gguf_bytes([HUGE + b"key"], entry_count=1),
        "key of metadata entry 0: length at byte 24: 9223372036854775808 items",
    ),
    "an empty key": (
        gguf_bytes([entry("", 0, b"\1")]),
        "key of metadata entry 0 at byte 24: is 0 bytes long",
    ),
    "a long key": (gguf_bytes([entry("k" * 65536, 0, b"\1")]), "is 65536 bytes long, allowed are 1 to 65535"),
    "a key that is not UTF-8": (gguf_bytes([entry(b"k\xff", 0, b"\1")]), r"b'k\\xff' is not UTF-8"),
    "a key twice": (
        gguf_bytes([u32_entry("k", 1), u32_entry("k", 1)]),
        "entry 1 at byte 41: 'k' is there twice",
    ),
    "an unknown value type": (
        gguf_bytes([entry("k", 13, b"\0")]),
        "value of 'k': type at byte 33: .* number 13",
    ),
    "a number cut off": (
        gguf_bytes([u32_entry("k", 1)])[:39],
        "value of 'k' at byte 37: 4 bytes cannot follow",
    ),
    "a string too long": (
        gguf_bytes([entry("k", 8, HUGE)]),
        "value of 'k': length at byte 37: 9223372036854775808",
    ),
    "an array too long": (
        gguf_bytes([entry("k", 9, array(GGUFValueType.FLOAT64, 2**61 + 1, b""))]),
        "value of 'k': length at byte 41: 2305843009213693953 items of at least 8 bytes cannot follow",
    ),
    "too many strings": (
        gguf_bytes([entry("k", 9, array(GGUFValueType.STRING, 2**40, b""))]),
        "value of 'k': length at byte 41: 1099511627776 items",
    ),
    "a string in an array too long": (
        gguf_bytes([entry("k", 9, array(GGUFValueType.STRING, 2, text("a") + struct.pack("<Q", 99)))]),
        "value of 'k': string 1: length at byte 58: 99 items",
    ),
    "a string in an array cut off": (
        gguf_bytes([entry("k", 9, array(GGUFValueType.STRING, 2, text("abcdefgh")))])[:68],
        "value of 'k': string 1: length at byte 65: 8 bytes cannot follow",
    ),
    "an unknown element type": (
        gguf_bytes([entry("k", 9, array(77, 1, b"\0"))]),
        "type at byte 37: .* number 77",
    ),
    "an alignment of zero": (
        gguf_bytes([u32_entry("general.alignment", 0)]),
        "general.alignment at byte 24: 0",
    ),
    "an alignment of 24": (gguf_bytes([u32_entry("general.alignment", 24)]), "24 is not a power of two"),
    "an alignment in words": (
        gguf_bytes([entry("general.alignment", 8, text("32"))]),
        "'32' is not a power of two",
    ),
    "an alignment of true": (
        gguf_bytes([entry("general.alignment", 7, b"\1")]),
        "True is not a power of two",
    ),
    "a tensor without name": (
        gguf_bytes(tensors=[tensor("", [1], I8, 0)]),
        "name of tensor 0 at byte 24: is 0 bytes",
    ),
    "a long tensor name": (
        gguf_bytes(tensors=[tensor("n" * 65, [1], I8, 0)]),
        "65 bytes long, allowed are 1 to 64",
    ),
    "a tensor twice": (
        gguf_bytes(tensors=[tensor("t", [1], I8, 0), tensor("t", [1], I8, 32)], data=bytes(64)),
        "name of tensor 1 at byte 57: 't' is there twice",
    ),
    "five dimensions": (
        gguf_bytes(tensors=[tensor("t", [1] * 5, I8, 0)]),
        "'t': number of dimensions at byte 33: is 5, allowed are up to 4",
    ),
    "2**32 - 1 dimensions": (
        gguf_bytes(tensors=[text("t") + struct.pack("<IIQ", 2**32 - 1, 0, 0)]),
        "number of dimensions at byte 33: is 4294967295",
    ),
    "a negative dimension": (
        gguf_bytes(tensors=[tensor("t", [2**64 - 1, 0], I8, 0)]),
        "more elements than a file",
    ),
    "dimensions that overflow": (
        gguf_bytes(tensors=[tensor("t", [2**32, 2**32], I8, 0)]),
        "more elements than a file",
    ),
    "bytes that overflow": (
        gguf_bytes(tensors=[tensor("t", [2**62], F32, 0)]),
        "more bytes than a file can hold",
    ),
    "a row of half a block": (
        gguf_bytes(tensors=[tensor("t", [48, 2], Q8_0, 0)], data=bytes(128)),
        "48 columns are no multiple of the 32 of a Q8_0 block",
    ),
    "a scalar of a block type": (
        gguf_bytes(tensors=[tensor("t", [], Q8_0, 0)]),
        "1 columns are no multiple of the 32",
    ),
    "a crooked offset": (
        gguf_bytes(tensors=[tensor("t", [8], F32, 16)], data=bytes(64)),
        "'t': offset at byte 49: 16 is no multiple of the alignment 32",
    ),
    "an offset past the end": (
        gguf_bytes(tensors=[tensor("t", [8], F32, 2**63)], data=bytes(64)),
        "'t' at byte 9223372036854775872 needs a file of 9223372036854775904 bytes, this one has 128",
    ),
    "tensors that overlap": (
        gguf_bytes(tensors=[tensor("b", [8], F32, 32), tensor("a", [9], F32, 0)], data=bytes(64)),
        "tensor 'b' starts at byte 128, inside tensor 'a', which ends at byte 132",
    ),
    "tensors in one place": (
        gguf_bytes(tensors=[tensor("a", [8], F32, 0), tensor("b", [8], F32, 0)], data=bytes(32)),
        "tensor 'b' starts at byte 96, inside tensor 'a'",
    ),
    "no data": (gguf_bytes(tensors=[tensor("t", [8], F32, 0)]), "needs a file of 96 bytes, this one has 64"),
    "data one byte short": (
        gguf_bytes(tensors=[tensor("t", [8], F32, 0)], data=bytes(31)),
        "tensor 't' at byte 64 needs a file of 96 bytes, this one has 95",
    ),
    "the last padding missing": (
        gguf_bytes(tensors=[tensor("t", [7], F32, 0)], data=bytes(28)),
        "needs a file of 96 bytes, this one has 92",
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_every_defect_says_where_it_is(tmp_path: Path, defect: str) -> None:
    content, message = DEFECTS[defect]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    with pytest.raises(CorruptDataError, match=message) as caught:
        GGUFFile.open(path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            gguf_bytes(tensors=[tensor("t", [1], 9999, 0)]),
            "tensor 't': type at byte 45: tensor type 9999 is not known",
        ),
        (gguf_bytes(tensors=[tensor("t", [1], 4, 0)]), "tensor type 4 is not known"),
        (gguf_bytes([entry("k", 9, array(GGUFValueType.ARRAY, 1, b""))]), "'k' at byte 37: arrays of arrays"),
    ],
)
def test_what_a_newer_file_may_hold_is_unsupported(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "newer.gguf"
    path.write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=message):
        GGUFFile.open(path)


VALID = gguf_bytes(
    [
        u32_entry("general.alignment", 32),
        entry("pieces", 9, array(GGUFValueType.STRING, 3, text("▁a") + text("") + text("bc"))),
        entry("scores", 9, array(GGUFValueType.FLOAT32, 3, bytes(12))),
        entry("flags", 9, array(GGUFValueType.BOOL, 2, b"\0\1")),
        entry("name", 8, text("model")),
        entry("eps", 6, bytes(4)),
    ],
    [tensor("a", [32, 2], Q8_0, 0), tensor("b", [3], F32, 96), tensor("c", [2, 2, 2], I8, 128)],
    bytes(160),
)


def _check_opens_or_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        with GGUFFile.open(path) as model:
            for name, info in model.tensors.items():
                assert model.tensor_bytes(name).size == info.nbytes
    except PipeLLMError as error:
        assert type(error) is not PipeLLMError
        assert str(error).startswith(f"{path}: ")
        str(error).encode("utf-8")


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(VALID)
    GGUFFile.open(path).close()
    for length in range(len(VALID)):
        path.write_bytes(VALID[:length])
        with pytest.raises(CorruptDataError):
            GGUFFile.open(path)


def test_every_changed_byte_opens_or_is_refused(tmp_path: Path) -> None:
    for position in range(len(VALID) - 160):
        for value in (1, 0xFF):
            content = VALID[:position] + bytes([value]) + VALID[position + 1 :]
            _check_opens_or_is_refused(tmp_path / "changed.gguf", content)


_POSITION = st.integers(0, len(VALID))
_NUMBER = st.sampled_from([0, 1, 2**16, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1])
_PIECE = st.one_of(st.binary(max_size=12), _NUMBER.map(lambda n: struct.pack("<Q", n)), st.just(VALID[24:90]))


@settings(max_examples=300, deadline=None)
@given(edits=st.lists(st.tuples(_POSITION, st.integers(0, 40), _PIECE), min_size=1, max_size=4))
def test_edited_files_open_or_are_refused(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, int, bytes]]
) -> None:
    content = VALID
    for position, removed, inserted in edits:
        content = content[:position] + inserted + content[position + removed :]
    _check_opens_or_is_refused(tmp_path_factory.getbasetemp() / "edited.gguf", content)


@settings(max_examples=200, deadline=None)
@given(rest=st.binary(max_size=200), counts=st.tuples(st.integers(0, 4), st.integers(0, 4)))
def test_noise_after_the_magic_is_refused(
    tmp_path_factory: pytest.TempPathFactory, rest: bytes, counts: tuple[int, int]
) -> None:
    content = b"GGUF" + struct.pack("<IQQ", 3, *counts) + rest
    _check_opens_or_is_refused(tmp_path_factory.getbasetemp() / "noise.gguf", content)


def test_hostile_counts_cost_neither_time_nor_memory(tmp_path: Path) -> None:
    paths = []
    for number, (content, _) in enumerate(DEFECTS.values()):
        paths.append(tmp_path / f"{number}.gguf")
        paths[-1].write_bytes(content)
    # Sparse files of 100 GB, whose size alone would allow the counts.
    for kind, count in (
        (GGUFValueType.STRING, 2**33),
        (GGUFValueType.UINT8, 2**36),
        (GGUFValueType.BOOL, 2**36),
    ):
        paths.append(tmp_path / f"sparse_{kind.name}.gguf")
        paths[-1].write_bytes(gguf_bytes([entry("k", 9, array(kind, count, b""))]))
        with paths[-1].open("r+b") as file:
            file.truncate(100 << 30)
    paths.append(tmp_path / "sparse_tensors.gguf")
    paths[-1].write_bytes(gguf_bytes(tensor_count=2**31))
    with paths[-1].open("r+b") as file:
        file.truncate(100 << 30)
    result = open_all(paths)
    for path in paths:
        path.unlink()
    assert result.refused == len(paths)
    assert result.mib < 200
    assert result.slowest_s < 2


def test_a_header_over_the_limit_says_so(tmp_path: Path) -> None:
    path = tmp_path / "sparse.gguf"
    path.write_bytes(gguf_bytes([entry("k", 9, array(GGUFValueType.UINT8, MAX_HEADER_BYTES, b""))]))
    with path.open("r+b") as file:
        file.truncate(2 * MAX_HEADER_BYTES)
    with pytest.raises(
        CorruptDataError, match=f"header larger than the {MAX_HEADER_BYTES} bytes this build reads"
    ):
        GGUFFile.open(path)
