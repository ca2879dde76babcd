"""Models split over several files: which files belong together, and whether they agree.

Every part states its number, the number of parts and the number of tensors in all; the names end in
-00001-of-00003.gguf. The first part alone holds the model's metadata.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from common.errors import CorruptDataError, UnknownModelError
from common.gguf.cursor import Value
from common.gguf.header import Header

_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def part_paths(path: Path, source: str, metadata: dict[str, Value]) -> tuple[Path, ...]:
    """The paths of all parts of the model that `path`, with this metadata, is a part of; in order.

    A model of one file is its own only part. Raises `CorruptDataError` when the name does not say what
    the metadata says, so that the other parts cannot be found, and `UnknownModelError` for missing parts.
    """
    count = _split_field(source, metadata, "split.count", default=1)
    if count <= 1:
        return (path,)
    number = _split_field(source, metadata, "split.no") + 1
    name = _NAME.fullmatch(path.name)
    if name is None or (int(name["number"]), int(name["count"])) != (number, count):
        raise CorruptDataError(
            f"{source}: is part {number} of {count} of a split model, but its name does not end in "
            f"-{number:05d}-of-{count:05d}.gguf, so that the other parts cannot be found: rename it"
        )
    paths = tuple(path.with_name(f"{name['stem']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1))
    missing = [part.name for part in paths if not part.exists()]
    if missing:
        raise UnknownModelError(
            f"{source}: {len(missing)} of the {count} parts of this model are missing beside it, "
            f"{missing[0]!r} first: put all parts into one folder"
        )
    return paths


def check_parts(sources: Sequence[str], headers: Sequence[Header]) -> None:
    """Refuse parts that are not of one model: numbers that disagree, tensors that are there twice."""
    seen: dict[str, str] = {}
    for number, (source, header) in enumerate(zip(sources, headers, strict=True)):
        expected = {"split.no": number, "split.count": len(headers)}
        for key, value in expected.items():
            if (stated := _split_field(source, header.metadata, key)) != value:
                raise CorruptDataError(
                    f"{source}: {key} is {stated}, but {value} is expected in part {number + 1} of "
                    f"{len(headers)}: the parts are not of one model"
                )
        for name in header.tensors:
            if name in seen:
                raise CorruptDataError(f"{source}: tensor {name!r} is in {seen[name]} already")
            seen[name] = source
    stated = _split_field(sources[0], headers[0].metadata, "split.tensors.count", default=len(seen))
    if stated != len(seen):
        raise CorruptDataError(
            f"{sources[0]}: split.tensors.count is {stated}, but the {len(headers)} parts hold {len(seen)} "
            "tensors: the parts are not of one model"
        )


def _split_field(source: str, metadata: dict[str, Value], key: str, default: int | None = None) -> int:
    value = metadata.get(key, default)
    if type(value) is not int:
        raise CorruptDataError(f"{source}: {key} is {value!r}, a whole number is expected")
    return value
