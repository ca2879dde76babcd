"""The reader against the folder of test cases: real, valid but unusual, damaged and fuzzed files."""

from __future__ import annotations

import csv
import struct
import time
from pathlib import Path

import pytest

from common.errors import CorruptDataError, PipeLLMError, UnsupportedModelError, UnsupportedVersionError
from common.gguf.header import parse_header
from common.gguf.reader import GGUFFile
from tests.common.gguf.open_all import open_all

# Valid files that hold a tensor type (42) which the gguf package does not know, nor do we.
NEWER_TYPE = {
    "TENSORS_ZERO_DIM",
    "TENSORS_SUCCESS",
    "TENSORS_CUSTOM_ALIGN",
    "DATA_SUCCESS",
    "DATA_CUSTOM_ALIGN",
    "DATA_NOT_ENOUGH_DATA",
}


@pytest.fixture(scope="module")
def corner(cases: Path) -> Path:
    return cases / "gguf" / "corner"


def _expected(folder: Path) -> dict[Path, str]:
    with (folder / "EXPECTED.tsv").open() as file:
        rows = [row for row in csv.reader(file, delimiter="\t") if row[0] != "file"]
    return {folder / (row[0].removesuffix(".gguf") + ".gguf"): row[-1] for row in rows}


def _known_type(content: bytes) -> bytes:
    """The file with its tensors of type 42 (64 elements in 18 bytes) told as int8 of as many bytes."""
    start = 0
    while (start := content.find(b"my_tensor_", start)) >= 0:
        start += struct.unpack_from("<Q", content, start - 8)[0]
        (dims,) = struct.unpack_from("<I", content, start)
        columns, kind_at = struct.unpack_from("<Q", content, start + 4)[0], start + 4 + 8 * dims
        if content[kind_at : kind_at + 4] == struct.pack("<I", 42):
            content = (
                content[: start + 4]
                + struct.pack("<Q", columns // 64 * 18)
                + content[start + 12 : kind_at]
                + struct.pack("<I", 24)
                + content[kind_at + 4 :]
            )
    return content


def test_corner_files_are_taken_and_refused_as_expected(corner: Path, tmp_path: Path) -> None:
    expected = _expected(corner) | _expected(corner / "handcrafted")
    assert len(expected) > 40
    for path, verdict in expected.items():
        content = path.read_bytes()
        if path.stem in NEWER_TYPE:
            with pytest.raises(UnsupportedModelError, match="tensor type 42 is not known"):
                GGUFFile.open(path)
            content = _known_type(content)
            path = tmp_path / path.name
            path.write_bytes(content)
        # The verdict is on the header, and on the tensor data for DATA_*.
        refused = verdict == "reject"
        try:
            header = parse_header(content, str(path))
            if path.stem.startswith("DATA_"):
                GGUFFile.open(path).close()
            assert not refused, path
            assert header.version in (2, 3)
        except PipeLLMError as error:
            assert refused, error
            assert str(error).startswith(f"{path}: ")


def test_missing_tensor_data_is_an_error_with_both_numbers(corner: Path) -> None:
    cut = {
        "real-7b-header-truncated-deepseek-r1-qwen": (4683073248, 6291456),
        "trunc-in-data": (1054496, 527248),
    }
    for name, (needed, present) in cut.items():
        message = f"{name}.gguf: tensor data is cut off.* {needed} bytes, this one has {present} "
        with pytest.raises(CorruptDataError, match=message):
            GGUFFile.open(corner / f"{name}.gguf")


def test_versions_and_byte_order(corner: Path) -> None:
    for name in ("v1", "bigendian"):
        with pytest.raises(UnsupportedVersionError):
            GGUFFile.open(corner / f"stories260K-f32-{name}.gguf")
    whole = corner.parent / "stories260K" / "stories260K-f32.gguf"
    split = corner / "split" / "stories260K-f32-00002-of-00003.gguf"
    with GGUFFile.open(whole) as model:
        for path in (corner / "stories260K-f32-v2.gguf", split):
            with GGUFFile.open(path) as other:
                assert set(other.tensors) == set(model.tensors)
                for name in model.tensors:
                    assert other.tensor_bytes(name).tobytes() == model.tensor_bytes(name).tobytes()


def test_a_real_header_is_read_in_half_a_second(corner: Path) -> None:
    content = (corner / "real-7b-header-truncated-deepseek-r1-qwen.gguf").read_bytes()
    seconds = []
    for _ in range(3):
        start = time.process_time()
        header = parse_header(content, "real")
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.5
    assert len(header.tensors) == 339
    tokens = header.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list) and len(tokens) == 152064
    assert tokens[:3] == ["!", '"', "#"]


def test_fuzzed_and_damaged_files_cost_neither_time_nor_memory(cases: Path, corner: Path) -> None:
    fuzz = sorted((cases / "gguf" / "fuzz").iterdir())
    assert len(fuzz) == 112
    # A few fuzzed files are sound, and hold nothing.
    assert len(fuzz) - 10 <= open_all(fuzz).refused < len(fuzz)
    cost = open_all([*fuzz, *sorted(corner.rglob("*.gguf"))])
    assert cost.mib < 200
    assert cost.slowest_s < 2


def test_fuzzed_files_say_where_they_are_wrong(cases: Path) -> None:
    for path in (cases / "gguf" / "fuzz").iterdir():
        try:
            with GGUFFile.open(path) as model:
                assert not model.tensors
        except (CorruptDataError, UnsupportedVersionError, UnsupportedModelError) as error:
            assert str(error).startswith(f"{path}: ")


def test_every_architecture_opens(cases: Path) -> None:
    for path in (cases / "gguf" / "architectures").glob("*.gguf"):
        with GGUFFile.open(path) as model:
            assert path.name.startswith(model.require("general.architecture", str))
            assert sum(info.nbytes for info in model.tensors.values()) <= model.file_bytes
