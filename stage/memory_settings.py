"""What a stage was told of the memory it may use, and how that is written."""

from __future__ import annotations

import re
from dataclasses import dataclass

from common.errors import ConfigError
from stage.placement import Place

_NUMBER = r"\d{1,18}(?:\.\d{1,9})?"
_UNITS = {"": 1, "GiB": 1 << 30, "G": 1 << 30, "GB": 10**9, "MiB": 1 << 20, "M": 1 << 20, "MB": 10**6}
_LEAST_BYTES = 1 << 16


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
            check_amount(name, getattr(self, name))
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


def check_amount(name: str, text: str) -> None:
    """Raises ConfigError naming the setting, if `parse_amount` cannot read it."""
    try:
        parse_amount(text, 0)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def parse_amount(text: str, total_bytes: int) -> int | None:
    """Bytes ("12000000000", "12GB", "8GiB" or "8G", "512MiB" or "512M"), or a share of a total ("80%" or
    "0.8"); None for "auto".

    Raises ConfigError for anything else, and for an amount so small that a unit must have been forgotten."""
    stated = text.strip()
    if stated == "auto":
        return None
    share = float(stated) if re.fullmatch(r"[01]\.\d{1,9}", stated) else None
    if percent := re.fullmatch(rf"({_NUMBER})\s*%", stated):
        share = float(percent[1]) / 100
    if share is not None and share <= 1:
        return int(share * total_bytes)
    match = re.fullmatch(rf"({_NUMBER})\s*([A-Za-z]*)", stated)
    if match is None or match[2] not in _UNITS:
        raise ConfigError(
            f"{text!r} is no amount of memory: write auto, 8GB or 8GiB, 512MB or 512MiB, a number of bytes, "
            "or a share of all there is, 80% or 0.8"
        )
    amount = int(float(match[1]) * _UNITS[match[2]])
    if 0 < amount < _LEAST_BYTES:
        raise ConfigError(f"{text!r} holds no model: write {match[1]}GB, say, or a share such as 0.5")
    return amount
