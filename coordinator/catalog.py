"""The models there are: GGUF files below the configured directories, and nothing else.

A model's name is its path below its directory, without `.gguf` and without a split suffix.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf

from common.errors import CorruptDataError, InvalidRequestError, PipeLLMError, UnknownModelError
from common.gguf.reader import GGUFFile
from common.gguf.tokenizer import Tokenizer
from protos import model_pb2

_NAMED = 20  # names in an error message
_MAX_COUNT = 2**31 - 1

_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})$")


@dataclass(frozen=True)
class CatalogEntry:
    name: str
    path: Path  # of the first part
    file: str  # path below its model directory, for stages that have their own


class Catalog:
    def __init__(self, directories: Sequence[str]) -> None:
        self._directories = tuple(directories)
        self._infos: dict[tuple[str, int, int], model_pb2.ModelInfo] = {}  # by path, size and time of change

    def entries(self) -> list[CatalogEntry]:
        """All models, in order of name; one found in two directories counts for the first."""
        found: dict[str, CatalogEntry] = {}
        for directory in self._directories:
            for path in _gguf_files(directory):
                entry = _entry(directory, path)
                if entry is not None:
                    found.setdefault(entry.name, entry)
        return [found[name] for name in sorted(found)]

    def find(self, model: str) -> CatalogEntry:
        """The model of this name or path. Raises UnknownModelError, or InvalidRequestError for a path that
        leads outside the model directories."""
        if not self._directories:
            raise UnknownModelError("this coordinator has no model directory; start it with --model-dir DIR")
        entries = self.entries()
        for entry in entries:
            if model in (entry.name, entry.file, f"{entry.name}.gguf"):
                return entry
        wanted = os.path.abspath(model) if os.path.isabs(model) else None
        if wanted is None and (os.sep in model or model.startswith(".")):
            wanted = os.path.abspath(os.path.join(self._directories[0], model))
        if wanted is not None:
            if not any(wanted.startswith(os.path.join(directory, "")) for directory in self._directories):
                raise InvalidRequestError(
                    f"model path {model!r} is outside the model directories ({', '.join(self._directories)})"
                )
            for entry in entries:
                if _SPLIT.sub("", os.path.splitext(wanted)[0]) == _SPLIT.sub("", str(entry.path)[:-5]):
                    return entry
        names = ", ".join(entry.name for entry in entries[:_NAMED]) or "none"
        more = f" and {len(entries) - _NAMED} more" if len(entries) > _NAMED else ""
        raise UnknownModelError(f"no model {model[:200]!r}; there are: {names}{more}")

    def info(self, entry: CatalogEntry) -> model_pb2.ModelInfo:
        """What the header says; `problem` says why a file cannot be served. Cached by size and time."""
        try:
            stat = entry.path.stat()
            key = (str(entry.path), stat.st_size, stat.st_mtime_ns)
            if key not in self._infos:
                with GGUFFile.open(entry.path) as file:
                    self._infos[key] = model_info(entry, file)
            return self._infos[key]
        except (PipeLLMError, OSError) as error:
            return model_pb2.ModelInfo(
                name=_text(entry.name), path=_text(str(entry.path)), problem=_text(str(error))
            )


def model_info(entry: CatalogEntry, file: GGUFFile) -> model_pb2.ModelInfo:
    architecture = _text(file.require("general.architecture", str))
    file_type = file.get("general.file_type", int, -1)
    tokens = file.get("tokenizer.ggml.tokens", list, [])
    return model_pb2.ModelInfo(
        name=_text(entry.name),
        path=_text(str(entry.path)),
        architecture=architecture,
        title=_text(file.get("general.name", str, "")),
        quantization=_quantization(file_type),
        file_bytes=file.file_bytes,
        num_layers=_count(file, f"{architecture}.block_count"),
        context_length=_count(file, f"{architecture}.context_length"),
        vocab_size=len(tokens) or _count(file, f"{architecture}.vocab_size"),
        has_tokenizer=Tokenizer.present(file.metadata),
        has_chat_template="tokenizer.chat_template" in file.metadata,
    )


def _count(file: GGUFFile, key: str) -> int:
    value = file.get(key, int, 0)
    if not 0 <= value <= _MAX_COUNT:
        raise CorruptDataError(f"{file.paths[0]}: key {key!r} is {value}, no plausible number")
    return value


def _text(value: str) -> str:
    """A string of the file as a message can carry it: bytes that are not UTF-8 become escapes."""
    return value.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _quantization(file_type: int) -> str:
    try:
        return gguf.LlamaFileType(file_type).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        return ""


def _gguf_files(directory: str) -> Iterator[Path]:
    for folder, _, names in os.walk(directory, followlinks=False):
        for name in sorted(names):
            if name.endswith(".gguf"):
                yield Path(folder, name)


def _entry(directory: str, path: Path) -> CatalogEntry | None:
    """None for the later parts of a split model."""
    file = path.relative_to(directory).as_posix()
    name = file.removesuffix(".gguf")
    split = _SPLIT.search(name)
    if split:
        if int(split[1]) != 1:
            return None
        name = name[: split.start()]
    return CatalogEntry(name, path, file)
