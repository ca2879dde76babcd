"""What a GPU stage was told of the memory it may use, and how that is written."""

from __future__ import annotations

import re
from dataclasses import dataclass

from common.errors import ConfigError
from stage.placement import Place


@dataclass(frozen=True)
class MemorySettings:
    """What a GPU stage was told of the memory it may use; each "auto", or as `parse_amount` and
    `parse_places` read it."""

    gpu_memory: str = "auto"  # of the GPU, everything included
    host_memory: str = "auto"  # of the host, for layers that are not resident
    pinned_memory: str = "auto"  # of that, pinned
    placement: str = "auto"

    def check(self) -> None:
        """Raises ConfigError naming the setting that cannot be read."""
        for name in ("gpu_memory", "host_memory", "pinned_memory"):
            try:
                parse_amount(getattr(self, name), 0)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from error
        if self.placement != "auto":
            parse_places(self.placement)


def parse_places(text: str) -> dict[int, Place]:
    """ "16:24=streamed,24:32=host,5=host-experts": half-open ranges of layers, or single ones, by their
    number in the model. What is not named is resident. Raises ConfigError naming the part that is wrong."""
    known = {place.value: place for place in Place}
    places: dict[int, Place] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?::(\d{1,5}))?\s*=\s*([\w-]+)\s*", part)
        if match is None or match[3] not in known:
            raise ConfigError(
                f"placement: {part.strip()!r} is not of the form 0:16=resident or 5=host ({', '.join(known)})"
            )
        start = int(match[1])
        end = int(match[2]) if match[2] else start + 1
        if end <= start:
            raise ConfigError(f"placement: {part.strip()!r} names no layer")
        for layer in range(start, end):
            if layer in places:
                raise ConfigError(f"placement: layer {layer} is named twice")
            places[layer] = known[match[3]]
    return places


def parse_amount(text: str, total_bytes: int) -> int | None:
    """Bytes ("12000000000", "12GB", "8GiB"), or a fraction of a total ("0.5"); None for "auto".

    Raises ConfigError for anything else."""
    if text == "auto":
        return None
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?)\s*(GiB|GB|MiB|MB)?", text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is neither auto, nor bytes, nor a fraction of at most 1")
    units = {"GiB": 1 << 30, "GB": 10**9, "MiB": 1 << 20, "MB": 10**6}
    value = float(match[1])
    if match[2]:
        return int(value * units[match[2]])
    if value <= 1 and "." in match[1]:
        return int(value * total_bytes)
    if 0 < value < 1 << 20:
        raise ConfigError(
            f"{text!r} would be so many bytes: write {text.strip()}GB, or a fraction such as 0.5"
        )
    return int(value)
