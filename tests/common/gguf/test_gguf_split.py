from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFValueType

from common.errors import CorruptDataError, UnknownModelError
from common.gguf.reader import GGUFFile
from tests.common.gguf.raw_gguf import entry, gguf_bytes, tensor, u32_entry
from tests.gguf_files import write_tiny_llama


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """A model of 39 tensors in four files."""
    write_tiny_llama(tmp_path / "tiny.gguf", max_tensors_per_file=10)
    return sorted(tmp_path.glob("tiny-*.gguf"))


def test_any_part_opens_the_whole_model(tmp_path: Path, parts: list[Path]) -> None:
    whole = write_tiny_llama(tmp_path / "whole.gguf")
    assert [path.name for path in parts] == [f"tiny-{i:05d}-of-00004.gguf" for i in (1, 2, 3, 4)]
    fingerprints = set()
    with GGUFFile.open(whole) as one_file:
        for named in parts:
            with GGUFFile.open(named) as model:
                assert model.paths == tuple(parts)
                assert model.file_bytes == sum(path.stat().st_size for path in parts)
                assert model.require("llama.block_count", int) == 4
                assert model.metadata["split.no"] == 0
                assert set(model.metadata) - set(one_file.metadata) == {
                    "split.no",
                    "split.count",
                    "split.tensors.count",
                }
                assert list(model.tensors) == list(one_file.tensors)
                assert {info.part for info in model.tensors.values()} == {0, 1, 2, 3}
                for name in model.tensors:
                    assert np.array_equal(model.tensor_bytes(name), one_file.tensor_bytes(name))
                fingerprints.add(model.fingerprint)
    assert len(fingerprints) == 1


def test_fingerprint_covers_every_part(tmp_path: Path, parts: list[Path]) -> None:
    def fingerprint() -> str:
        with GGUFFile.open(parts[0]) as model:
            return model.fingerprint

    before = fingerprint()
    content = parts[3].read_bytes()
    parts[3].write_bytes(content.replace(b"output.weight", b"outpux.weight"))
    assert fingerprint() != before


def test_missing_parts_are_named(parts: list[Path]) -> None:
    parts[1].unlink()
    parts[3].unlink()
    with pytest.raises(UnknownModelError, match=f"{parts[2]}: 2 of the 4 parts .*'{parts[1].name}' first"):
        GGUFFile.open(parts[2])


def test_a_renamed_part_says_so(parts: list[Path]) -> None:
    renamed = parts[1].rename(parts[1].with_name("second.gguf"))
    with pytest.raises(CorruptDataError, match=r"is part 2 of 4 .* does not end in -00002-of-00004\.gguf"):
        GGUFFile.open(renamed)


def test_parts_under_each_others_name(parts: list[Path]) -> None:
    first, second = parts[1].read_bytes(), parts[2].read_bytes()
    parts[1].write_bytes(second)
    parts[2].write_bytes(first)
    with pytest.raises(CorruptDataError, match=r"00002-of-00004\.gguf: split.no is 2, but 1 is expected"):
        GGUFFile.open(parts[0])


def test_a_truncated_part(parts: list[Path]) -> None:
    content = parts[2].read_bytes()
    parts[2].write_bytes(content[:-1])
    with pytest.raises(CorruptDataError) as caught:
        GGUFFile.open(parts[0])
    message = str(caught.value)
    assert message.startswith(f"{parts[2]}: tensor data is cut off")
    assert f"needs a file of {len(content)} bytes, this one has {len(content) - 1}" in message


def _write_parts(
    folder: Path, *tensors: tuple[str, ...], total: int, kind: int = GGUFValueType.UINT32
) -> Path:
    count = len(tensors)
    for number, names in enumerate(tensors):
        entries = [
            entry("split.no", kind, struct.pack("<I", number)),
            u32_entry("split.count", count),
            u32_entry("split.tensors.count", total),
        ]
        table = [tensor(name, [8], GGMLQuantizationType.F32, 32 * i) for i, name in enumerate(names)]
        path = folder / f"m-{number + 1:05d}-of-{count:05d}.gguf"
        path.write_bytes(gguf_bytes(entries, table, bytes(32 * len(names))))
    return folder / f"m-00001-of-{count:05d}.gguf"


def test_parts_that_do_not_agree(tmp_path: Path) -> None:
    with GGUFFile.open(_write_parts(tmp_path, ("a",), ("b", "c"), total=3)) as model:
        assert list(model.tensors) == ["a", "b", "c"]
    with pytest.raises(CorruptDataError, match=r"tensor 'a' is in .*m-00001-of-00002\.gguf already"):
        GGUFFile.open(_write_parts(tmp_path, ("a",), ("b", "a"), total=3))
    with pytest.raises(CorruptDataError, match=r"split.tensors.count is 5, but the 2 parts hold 3 tensors"):
        GGUFFile.open(_write_parts(tmp_path, ("a",), ("b", "c"), total=5))
    with pytest.raises(CorruptDataError, match=r"split.no is 0.0, a whole number is expected"):
        GGUFFile.open(_write_parts(tmp_path, ("a",), ("b",), total=2, kind=GGUFValueType.FLOAT32))


def test_a_part_without_split_metadata(tmp_path: Path) -> None:
    first = _write_parts(tmp_path, ("a",), ("b",), total=2)
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(gguf_bytes())
    with pytest.raises(CorruptDataError, match=r"00002-of-00002\.gguf: split.no is None"):
        GGUFFile.open(first)


def test_a_count_of_one_is_a_single_file(tmp_path: Path) -> None:
    path = tmp_path / "any_name.gguf"
    path.write_bytes(gguf_bytes([u32_entry("split.no", 0), u32_entry("split.count", 1)]))
    with GGUFFile.open(path) as model:
        assert model.paths == (path,)


def test_an_absurd_number_of_parts(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00002.gguf"
    count = entry("split.count", GGUFValueType.UINT64, struct.pack("<Q", 2**60))
    path.write_bytes(gguf_bytes([u32_entry("split.no", 0), count]))
    with pytest.raises(CorruptDataError, match="is part 1 of 1152921504606846976"):
        GGUFFile.open(path)
