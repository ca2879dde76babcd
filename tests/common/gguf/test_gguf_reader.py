from __future__ import annotations

import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from common.errors import CorruptDataError, PipeLLMError, UnknownModelError, UnsupportedVersionError
from common.gguf.reader import GGUFFile
from tests.common.gguf.raw_gguf import array, entry, gguf_bytes, tensor, text, u32_entry
from tests.gguf_files import write_gguf, write_tiny_llama

Write = Callable[[bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(content: bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        return path

    return write


def test_agrees_with_the_gguf_packages_reader(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", quantization=GGMLQuantizationType.Q8_0)
    reference = gguf.GGUFReader(path)
    with GGUFFile.open(path) as model:
        fields = {k: v for k, v in reference.fields.items() if not k.startswith("GGUF.")}
        assert list(model.metadata) == list(fields)
        for key, field in fields.items():
            value = model.metadata[key]
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents(), key
        assert list(model.tensors) == [t.name for t in reference.tensors]
        for expected in reference.tensors:
            info = model.tensors[expected.name]
            assert info.shape == tuple(expected.shape)
            assert info.ggml_type == expected.tensor_type
            assert (info.part, info.offset, info.nbytes) == (0, expected.data_offset, expected.n_bytes)
            assert np.array_equal(model.tensor_bytes(info.name), expected.data.view(np.uint8).reshape(-1))
        assert (model.paths, model.version, model.file_bytes) == ((path,), 3, path.stat().st_size)


def test_shape_starts_with_the_contiguous_dimension(tmp_path: Path) -> None:
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    with GGUFFile.open(write_gguf(tmp_path / "m.gguf", {}, {"w": rows})) as model:
        assert model.tensors["w"].shape == (4, 3)
        assert np.array_equal(model.tensor_bytes("w").view(np.float32).reshape(3, 4), rows)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q8_0"])
def test_quantised_bytes_dequantise(tmp_path: Path, kind: str) -> None:
    rows = np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64)
    quantization = GGMLQuantizationType[kind]
    path = write_gguf(tmp_path / "m.gguf", {}, {"w": rows}, quantization={"w": quantization})
    with GGUFFile.open(path) as model:
        raw = model.tensor_bytes("w").reshape(2, -1)
        assert np.abs(dequantize(raw, quantization) - rows).max() < 0.2


def test_tensor_bytes_are_read_only_and_not_copied(tmp_path: Path) -> None:
    with GGUFFile.open(write_tiny_llama(tmp_path / "tiny.gguf")) as model:
        first, second = (model.tensor_bytes("token_embd.weight") for _ in range(2))
        assert np.shares_memory(first, second)
        assert first.dtype == np.uint8
        with pytest.raises(ValueError, match="read-only"):
            first[0] = 1


NUMBERS = [
    (GGUFValueType.UINT8, "<B", 255, np.uint8),
    (GGUFValueType.INT8, "<b", -128, np.int8),
    (GGUFValueType.UINT16, "<H", 65535, np.uint16),
    (GGUFValueType.INT16, "<h", -32768, np.int16),
    (GGUFValueType.UINT32, "<I", 2**32 - 1, np.uint32),
    (GGUFValueType.INT32, "<i", -(2**31), np.int32),
    (GGUFValueType.UINT64, "<Q", 2**64 - 1, np.uint64),
    (GGUFValueType.INT64, "<q", -(2**63), np.int64),
    (GGUFValueType.FLOAT32, "<f", 0.15625, np.float32),
    (GGUFValueType.FLOAT64, "<d", 0.1, np.float64),
]


@pytest.mark.parametrize(("kind", "layout", "number", "dtype"), NUMBERS)
def test_numbers_and_arrays_of_them(
    write: Write, kind: GGUFValueType, layout: str, number: float, dtype: type
) -> None:
    raw = struct.pack(layout, number)
    entries = [
        entry("one", kind, raw),
        entry("many", GGUFValueType.ARRAY, array(kind, 3, raw * 3)),
        entry("none", GGUFValueType.ARRAY, array(kind, 0, b"")),
        u32_entry("after", 7),
    ]
    with GGUFFile.open(write(gguf_bytes(entries))) as model:
        one, many, none = (model.metadata[key] for key in ("one", "many", "none"))
        assert one == number
        assert type(one) is type(number)
        assert isinstance(many, np.ndarray) and many.dtype == dtype and many.tolist() == [number] * 3
        assert not many.flags.writeable
        assert isinstance(none, np.ndarray) and none.dtype == dtype and none.size == 0
        assert model.metadata["after"] == 7


def test_strings_and_flags(write: Write) -> None:
    entries = [
        entry("empty", GGUFValueType.STRING, text("")),
        entry("name", GGUFValueType.STRING, text("größe ▁")),
        entry("cut", GGUFValueType.STRING, text(b"ab\xe2\x96")),
        entry(
            "pieces",
            GGUFValueType.ARRAY,
            array(GGUFValueType.STRING, 3, text("▁a") + text("") + text(b"\xff")),
        ),
        entry("no_pieces", GGUFValueType.ARRAY, array(GGUFValueType.STRING, 0, b"")),
        entry("yes", GGUFValueType.BOOL, b"\x01"),
        entry("no", GGUFValueType.BOOL, b"\x00"),
        entry("other", GGUFValueType.BOOL, b"\x80"),
        entry("flags", GGUFValueType.ARRAY, array(GGUFValueType.BOOL, 3, b"\x00\x01\x02")),
        entry("no_flags", GGUFValueType.ARRAY, array(GGUFValueType.BOOL, 0, b"")),
    ]
    with GGUFFile.open(write(gguf_bytes(entries))) as model:
        cut = model.require("cut", str)
        assert cut.encode("utf-8", "surrogateescape") == b"ab\xe2\x96"
        pieces = model.require("pieces", list)
        assert [piece.encode("utf-8", "surrogateescape") for piece in pieces] == ["▁a".encode(), b"", b"\xff"]
        rest = {key: model.metadata[key] for key in model.metadata if key not in ("cut", "pieces")}
        assert rest == {
            "empty": "",
            "name": "größe ▁",
            "no_pieces": [],
            "yes": True,
            "no": False,
            "other": True,
            "flags": [False, True, True],
            "no_flags": [],
        }
        assert type(model.metadata["yes"]) is bool


@pytest.mark.parametrize("alignment", [1, 2, 8, 32, 64, 4096])
def test_any_power_of_two_alignment(tmp_path: Path, alignment: int) -> None:
    tensors = {f"t{i}": np.full(i + 1, i, np.int8) for i in range(5)}
    path = write_gguf(tmp_path / "m.gguf", {"general.alignment": alignment}, tensors)
    with GGUFFile.open(path) as model:
        for name, expected in tensors.items():
            assert model.tensors[name].offset % alignment == 0
            assert np.array_equal(model.tensor_bytes(name).view(np.int8), expected)


def test_unusual_but_valid_tensors(write: Write) -> None:
    f32, i8 = GGMLQuantizationType.F32, GGMLQuantizationType.I8
    table = [
        tensor("later", [2], i8, 96),
        tensor("scalar", [], f32, 0),
        tensor("no_rows", [7, 0], f32, 0),
        tensor("no_columns", [0, 5], GGMLQuantizationType.Q8_0, 2**20),
        tensor("four", [2, 1, 2, 1], i8, 32),
    ]
    data = (
        struct.pack("<f", 2.5).ljust(32, b"\0")
        + bytes([1, 2, 3, 4]).ljust(64, b"\0")
        + b"\x05\x06"
        + bytes(30)
    )
    with GGUFFile.open(write(gguf_bytes(tensors=table, data=data))) as model:
        assert model.tensors["scalar"].shape == ()
        assert model.tensor_bytes("scalar").view(np.float32).tolist() == [2.5]
        assert model.tensor_bytes("no_rows").size == model.tensor_bytes("no_columns").size == 0
        assert model.tensor_bytes("four").tolist() == [1, 2, 3, 4]
        assert model.tensor_bytes("later").tolist() == [5, 6]


def test_a_file_of_nothing_opens(write: Write) -> None:
    with GGUFFile.open(write(gguf_bytes()[:24])) as model:
        assert not model.metadata
        assert not model.tensors


def test_version_2_reads_like_version_3(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf")
    old = tmp_path / "old.gguf"
    content = path.read_bytes()
    old.write_bytes(content[:4] + struct.pack("<I", 2) + content[8:])
    with GGUFFile.open(path) as new_model, GGUFFile.open(old) as old_model:
        assert (old_model.version, new_model.version) == (2, 3)
        assert old_model.tensors == new_model.tensors
        assert list(old_model.metadata) == list(new_model.metadata)


def test_require_and_get(write: Write) -> None:
    entries = [
        u32_entry("count", 4),
        entry("flag", GGUFValueType.BOOL, b"\x01"),
        entry("scale", GGUFValueType.FLOAT32, struct.pack("<f", 0.5)),
        entry("name", GGUFValueType.STRING, text("x")),
        entry("list", GGUFValueType.ARRAY, array(GGUFValueType.STRING, 1, text("x"))),
        entry("array", GGUFValueType.ARRAY, array(GGUFValueType.UINT8, 2, b"\x01\x02")),
    ]
    path = write(gguf_bytes(entries))
    with GGUFFile.open(path) as model:
        assert model.require("count", int) == 4
        assert type(model.require("count", float)) is float
        assert model.require("flag", bool) is True
        assert model.require("scale", float) == model.get("scale", float, 1.0) == 0.5
        assert model.require("list", list) == ["x"]
        assert model.require("array", np.ndarray).tolist() == [1, 2]
        assert model.get("absent", int, 7) == 7
        wrong = [
            ("flag", int),
            ("flag", float),
            ("count", bool),
            ("scale", int),
            ("name", int),
            ("count", str),
        ]
        for key, kind in [*wrong, ("array", list), ("list", np.ndarray), ("array", int)]:
            with pytest.raises(
                CorruptDataError, match=f"'{key}' is a .*, expected is {kind.__name__}"
            ) as caught:
                model.require(key, kind)
            assert str(path) in str(caught.value)
        with pytest.raises(CorruptDataError, match="'name' is a str, expected is int"):
            model.get("name", int, 1)
        with pytest.raises(CorruptDataError, match=f"{path}: metadata has no 'absent'"):
            model.require("absent", int)
        with pytest.raises(CorruptDataError, match=f"{path}: has no tensor 'blk"):
            model.tensor_bytes("blk.0.attn_q.weight")


def test_fingerprint_follows_the_header_and_not_the_path(tmp_path: Path) -> None:
    def fingerprint(path: Path) -> str:
        with GGUFFile.open(path) as model:
            return model.fingerprint

    path = write_tiny_llama(tmp_path / "a.gguf")
    (tmp_path / "elsewhere").mkdir()
    copy = Path(shutil.copy(path, tmp_path / "elsewhere" / "b.gguf"))
    renamed = write_tiny_llama(tmp_path / "c.gguf", extra_metadata={"general.name": "Tiny Llamb"})
    deeper = write_tiny_llama(tmp_path / "d.gguf", layers=5)
    assert fingerprint(path) == fingerprint(copy)
    assert len({fingerprint(path), fingerprint(renamed), fingerprint(deeper)}) == 3
    assert len(fingerprint(path)) == 64
    assert int(fingerprint(path), 16)


def test_close_is_idempotent_and_leaves_bytes_valid(tmp_path: Path) -> None:
    model = GGUFFile.open(write_tiny_llama(tmp_path / "tiny.gguf"))
    kept = model.tensor_bytes("output_norm.weight")
    before = kept.tobytes()
    model.close()
    model.close()
    assert kept.tobytes() == before
    with pytest.raises(PipeLLMError, match="after the file was closed"):
        model.tensor_bytes("output_norm.weight")
    assert model.require("llama.block_count", int) == 4


def _open_files_below(folder: Path) -> int:
    mapped = Path("/proc/self/maps").read_text().count(str(folder))
    return mapped + sum(
        os.path.realpath(fd).startswith(str(folder)) for fd in Path("/proc/self/fd").iterdir()
    )


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_nothing_stays_open(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf")
    with GGUFFile.open(path):
        assert _open_files_below(tmp_path) > 0
    assert _open_files_below(tmp_path) == 0
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(CorruptDataError):
        GGUFFile.open(path)
    assert _open_files_below(tmp_path) == 0


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    wrong = {
        tmp_path / "absent.gguf": "there is no such file",
        tmp_path: "is a directory",
        tmp_path / "pipe": "is not a regular file",
        tmp_path / ("x" * 300): "cannot be read: File name too long",
        tmp_path / "nul\0.gguf": "is no path",
        tmp_path / "tiny.gguf" / "below": "cannot be read: Not a directory",
    }
    write_tiny_llama(tmp_path / "tiny.gguf")
    for path, message in wrong.items():
        with pytest.raises(UnknownModelError, match=message):
            GGUFFile.open(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf")
    path.chmod(0)
    with pytest.raises(UnknownModelError, match="cannot be read: Permission denied"):
        GGUFFile.open(path)


def test_a_path_that_is_not_utf8_can_be_named_in_a_message(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"m\xff.gguf")
    with pytest.raises(UnknownModelError) as caught:
        GGUFFile.open(path)
    str(caught.value).encode("utf-8")
    write_tiny_llama(path)
    with GGUFFile.open(str(path)) as model:
        assert model.paths == (path,)


FOREIGN = {
    "a PNG image": b"\x89PNG\r\n\x1a\n" + bytes(50),
    "a zip archive": b"PK\x03\x04" + bytes(50),
    "a safetensors file": struct.pack("<Q", 60) + b'{"__metadata__":{}}',
    "a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00",
    "a web page": b"\n<!DOCTYPE html><html>",
    "the format before GGUF": b"tjgg" + bytes(50),
    "a JSON file": b'{"error": "not found"}',
    "begins with zeros": bytes(100),
    r"it starts with b'GGU'": b"GGU",
    r"it starts with b'hello wo'": b"hello world",
}


@pytest.mark.parametrize("looks_like", FOREIGN)
def test_says_what_another_kind_of_file_looks_like(write: Write, looks_like: str) -> None:
    with pytest.raises(CorruptDataError, match=f"is not a GGUF file, it looks like .*{looks_like}"):
        GGUFFile.open(write(FOREIGN[looks_like]))


def test_an_empty_file(write: Write) -> None:
    with pytest.raises(CorruptDataError, match=r"model\.gguf: is empty"):
        GGUFFile.open(write(b""))


@pytest.mark.parametrize(
    ("version", "message"),
    [(1, "GGUF version 1; versions 2 and 3"), (4, "GGUF version 4;.*newer"), (0x03000000, "big-endian")],
)
def test_versions_and_byte_orders_that_are_not_read(write: Write, version: int, message: str) -> None:
    with pytest.raises(UnsupportedVersionError, match=message):
        GGUFFile.open(write(gguf_bytes(version=version)))


def test_a_header_of_150_000_tokens_is_read_in_half_a_second(tmp_path: Path) -> None:
    count = 152_064
    pieces = [f"▁piece{i:x}" for i in range(count)]
    strings = array(GGUFValueType.STRING, count, b"".join(map(text, pieces)))
    merges = array(GGUFValueType.STRING, count, b"".join(text(f"Ġmer ge{i:x}") for i in range(count)))
    floats = array(GGUFValueType.FLOAT32, count, np.arange(count, dtype="<f4").tobytes())
    types = array(GGUFValueType.INT32, count, np.ones(count, "<i4").tobytes())
    arrays = {"tokens": strings, "merges": merges, "scores": floats, "token_type": types}
    entries = [entry(f"tokenizer.ggml.{key}", GGUFValueType.ARRAY, value) for key, value in arrays.items()]
    path = tmp_path / "large.gguf"
    path.write_bytes(gguf_bytes(entries))
    seconds = []
    for _ in range(3):
        start = time.process_time()
        with GGUFFile.open(path) as model:
            seconds.append(time.process_time() - start)
            assert model.require("tokenizer.ggml.tokens", list) == pieces
    # The best of three: other processes may hold the cores, the reader must not need the time.
    assert min(seconds) < 0.5
