"""Where the weights of a stage's layers lie, chosen from budgets and measured rates. Pure functions.

Resident layers stay in GPU memory; streamed ones come over the link into slots while others compute; host
ones are computed by the host's cores. At batch 1 a streamed layer costs its bytes over the link, a host
layer its bytes over the host's memory, both at the same time: what is not resident is divided so that both
end together. In prefill, host layers are streamed as well. A layer's experts may lie apart from the rest of
it, which then is resident: a row reads few of them, so that the host has little to do, and the link much.
Knows sizes and rates, nothing of devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from common.errors import OutOfCapacityError

RAW_SLOTS, TILE_SLOTS = 2, 2  # on the GPU, for streamed layers: as the file has them, and as tiles
RING_SLOTS = 3  # of pinned memory, for layers read from the file
PREFILL_TOKENS = 512  # the chunk that predictions of prefill speak of


class Place(Enum):
    RESIDENT = "resident"
    STREAMED = "streamed"
    HOST = "host"
    STREAMED_EXPERTS = "streamed-experts"  # the rest of the layer resident, its KV on the GPU
    HOST_EXPERTS = "host-experts"  # the same

    def __init__(self, value: str) -> None:
        self.on_host = value.startswith("host")  # in decode the host computes the layer, or its experts
        self.streamed = value.startswith("streamed")
        self.is_split = value.endswith("experts")

    @property
    def off_host(self) -> Place:
        """Streamed in place of being computed by the host."""
        return {Place.HOST: Place.STREAMED, Place.HOST_EXPERTS: Place.STREAMED_EXPERTS}.get(self, self)

    @property
    def split(self) -> Place:
        """The experts alone in place of the layer."""
        return {Place.STREAMED: Place.STREAMED_EXPERTS, Place.HOST: Place.HOST_EXPERTS}.get(self, self)


@dataclass(frozen=True)
class PartSize:
    """Of a layer, or a part of it."""

    packed_bytes: int = 0
    raw_bytes: int = 0
    active_share: float = 1.0  # that one row reads


_NOTHING = PartSize()


@dataclass(frozen=True)
class LayerSize:
    packed_bytes: int  # in GPU memory
    raw_bytes: int  # in the file: what crosses the link, or what the host reads
    kv_bytes: int  # of the whole cache
    active_share: float = 1.0  # of the weights that one row reads (experts)
    streamable: bool = True
    experts: PartSize = _NOTHING  # nothing: a layer without experts

    @cached_property
    def _whole(self) -> PartSize:
        return PartSize(self.packed_bytes, self.raw_bytes, self.active_share)

    def off_gpu(self, place: Place) -> PartSize:
        """What of the layer is streamed or computed by the host."""
        if place is Place.RESIDENT:
            return _NOTHING
        return self.experts if place.is_split else self._whole

    def on_gpu(self, place: Place) -> float:
        """Bytes that one row reads of what is resident, if anything is."""
        if place.is_split:
            return self.packed_bytes - self.experts.packed_bytes
        return self.packed_bytes * self.active_share


@dataclass(frozen=True)
class Budgets:
    gpu_bytes: int  # for layers, their KV and slots
    host_bytes: int  # for layers' weights and KV in host memory, pinned or not
    pinned_bytes: int


@dataclass(frozen=True)
class Rates:
    """Measured, bytes and tokens per second; where two run at the same time, each beside the other."""

    link: float
    link_beside_host: float
    host: float  # weights through the CPU engine, one row
    host_beside_link: float
    gpu: float  # weights through the decode kernels
    gpu_prefill: float  # tokens a second through one layer
    file: float  # reading from the file into memory
    other_s: float = 0.0  # of a decode step outside the layers: embedding, head, sampling
    crossing_s: float = 150e-6  # of a run of host layers: to the host and back
    host_batch_8: float = 2.0  # time of 8 rows over that of one on the host
    gpu_batch_8: float = 1.3


@dataclass(frozen=True)
class Prediction:
    """Tokens per second, of all sequences together."""

    batch_1: float
    batch_8: float
    prefill: float

    @property
    def both(self) -> float:
        """What placements are chosen by."""
        return self.batch_1 * self.batch_8


@dataclass(frozen=True)
class Placement:
    places: tuple[Place, ...]  # in steps of few rows
    batch_places: tuple[Place, ...]  # in larger ones, where fewer layers are worth computing on the host
    pinned: tuple[int, ...]  # offloaded layers that the pinned pool holds, by their place in `places`
    gpu_bytes: int
    host_bytes: int
    pinned_bytes: int
    prediction: Prediction

    def count(self, place: Place) -> int:
        return self.places.count(place)


def choose(layers: Sequence[LayerSize], budgets: Budgets, rates: Rates) -> Placement:
    """The placement within the budgets that decodes fastest, one sequence and eight counting the same; with
    larger budgets never a slower one.

    Raises OutOfCapacityError, with what would be enough, where none fits.
    """
    best: Placement | None = None
    for offloaded in range(len(layers) + 1):
        for places in _candidates(layers, offloaded):
            if best is not None and not _may_beat(layers, places, budgets, rates, best):
                continue
            for batch_places in (for_batches(layers, places, rates), places):
                found = _measured(layers, places, batch_places, budgets, rates)
                if found is None or _excess(found, budgets):
                    continue
                if best is None or found.prediction.both > best.prediction.both:
                    best = found
    if best is None:
        raise _too_little(layers, budgets, rates)
    return best


def measure(
    layers: Sequence[LayerSize], places: Sequence[Place], budgets: Budgets, rates: Rates
) -> Placement:
    """A given placement's sizes and prediction. Raises OutOfCapacityError where it exceeds a budget."""
    places = tuple(places)
    excess = ""
    for batch_places in (for_batches(layers, places, rates), places):
        found = _measured(layers, places, batch_places, budgets, rates)
        if found is None:
            raise _too_little(layers, budgets, rates)
        excess = _excess(found, budgets)
        if not excess:
            return found
    raise OutOfCapacityError(f"this placement needs {excess}")


def arrange(num_layers: int, streamed: int, host: int) -> tuple[Place, ...]:
    """So many layers of each place, spread so that link and cores work all the time.

    As many groups as both streamed and host layers can share; in each, streamed layers among resident ones,
    the first of them streamed, then the host layers in one run (hidden states cross to the host once a
    run).
    """
    resident = num_layers - streamed - host
    groups = min(streamed, host) if streamed and host else 1
    places: list[Place] = []
    for group in range(groups):
        places += _mixed(_share(streamed, group, groups), _share(resident, group, groups))
        places += [Place.HOST] * _share(host, group, groups)
    return tuple(places)


def split_experts(layers: Sequence[LayerSize], places: Sequence[Place]) -> tuple[Place, ...]:
    """The same with only the experts off the GPU, of layers that have some."""
    return tuple(
        place.split if layer.experts.raw_bytes else place for layer, place in zip(layers, places, strict=True)
    )


def for_batches(layers: Sequence[LayerSize], places: Sequence[Place], rates: Rates) -> tuple[Place, ...]:
    """The same for steps of 8 rows, but with those host layers streamed that the link brings sooner."""
    hosts = sum(place.on_host for place in places)

    def seconds(kept: int) -> float:
        everything = range(len(layers))
        kept_places = keep_hosts(places, kept)
        return _decode_s(layers, kept_places, everything, rates, rates.gpu_batch_8, rates.host_batch_8)

    # Fewer layers on the host take longer over the link, more of them longer there: one minimum.
    low, high = 0, hosts
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if seconds(middle) <= seconds(middle + 1) else (middle + 1, high)
    return keep_hosts(places, low)


def keep_hosts(places: Sequence[Place], kept: int) -> tuple[Place, ...]:
    """So many of the layers (or experts) on the host, evenly; the others streamed."""
    result = list(places)
    hosts = [i for i, place in enumerate(places) if place.on_host]
    for number, i in enumerate(hosts):
        if number * kept % len(hosts) >= kept:
            result[i] = places[i].off_host
    return tuple(result)


def pinned_layers(
    places: Sequence[Place], raw_bytes: Sequence[int], pinned_bytes: int
) -> tuple[tuple[int, ...], int]:
    """Which offloaded layers a pinned pool of at most this size holds, and the size it takes. raw_bytes: of
    what is offloaded of each.

    All of them, or as many as fit beside a ring of slots that the others are read into, streamed ones first.
    Raises OutOfCapacityError where the ring does not fit.
    """
    offloaded = [i for i, place in enumerate(places) if place != Place.RESIDENT]
    total = sum(raw_bytes[i] for i in offloaded)
    if total <= pinned_bytes:
        return tuple(offloaded), total
    used = RING_SLOTS * max(raw_bytes[i] for i in offloaded)
    if used > pinned_bytes:
        raise OutOfCapacityError(
            f"pinned_memory is {pinned_bytes} bytes; reading layers from the file takes {used} bytes of it, "
            f"holding all {len(offloaded)} layers {total}"
        )
    chosen = []
    for i in sorted(offloaded, key=lambda i: (not places[i].streamed, i)):
        if used + raw_bytes[i] > pinned_bytes:
            break
        used += raw_bytes[i]
        chosen.append(i)
    return tuple(chosen), used


# --- sizes and times ----------------------------------------------------------------------------------------


def _candidates(layers: Sequence[LayerSize], offloaded: int) -> Iterator[tuple[Place, ...]]:
    """With so many layers off the GPU: as wholes, and where there are any, their experts alone."""
    for host in range(offloaded + 1):
        places = arrange(len(layers), offloaded - host, host)
        yield places
        split = split_experts(layers, places)
        if split != places:
            yield split


def _off_gpu(layers: Sequence[LayerSize], places: Sequence[Place]) -> list[PartSize]:
    return [layer.off_gpu(place) for layer, place in zip(layers, places, strict=True)]


def _share(count: int, group: int, groups: int) -> int:
    return count * (group + 1) // groups - count * group // groups


def _mixed(streamed: int, resident: int) -> list[Place]:
    """Streamed layers evenly among resident ones, a streamed one first."""
    total = streamed + resident
    return [
        Place.STREAMED if streamed and i * streamed % total < streamed else Place.RESIDENT
        for i in range(total)
    ]


def _may_beat(
    layers: Sequence[LayerSize], places: Sequence[Place], budgets: Budgets, rates: Rates, best: Placement
) -> bool:
    """Eight sequences together are at most eight times as fast as one."""
    try:
        raw = [off.raw_bytes for off in _off_gpu(layers, places)]
        pinned, _ = pinned_layers(places, raw, budgets.pinned_bytes)
    except OutOfCapacityError:
        return False
    batch_1 = 1 / _decode_s(layers, places, pinned, rates, 1.0, 1.0)
    return 8 * batch_1**2 > best.prediction.both


def _excess(found: Placement, budgets: Budgets) -> str:
    """What a placement takes beyond a budget, for a message; empty where it stays within all."""
    for name, needed, allowed in (
        ("gpu_memory", found.gpu_bytes, budgets.gpu_bytes),
        ("host_memory", found.host_bytes, budgets.host_bytes),
    ):
        if needed > allowed:
            return f"{needed} bytes of {name}, {allowed} are allowed"
    return ""


def _measured(
    layers: Sequence[LayerSize],
    places: tuple[Place, ...],
    batch_places: tuple[Place, ...],
    budgets: Budgets,
    rates: Rates,
) -> Placement | None:
    """None where a layer that cannot leave the GPU would have to, or the pinned pool is too small."""
    off_gpu = _off_gpu(layers, places)
    offloaded = [i for i, place in enumerate(places) if place != Place.RESIDENT]
    if not all(layers[i].streamable for i in offloaded):
        return None
    try:
        raw = [off.raw_bytes for off in off_gpu]
        pinned, pinned_bytes = pinned_layers(places, raw, budgets.pinned_bytes)
    except OutOfCapacityError:
        return None
    gpu_bytes = host_bytes = room = 0
    for i, layer in enumerate(layers):
        gpu_bytes += layer.packed_bytes - off_gpu[i].packed_bytes
        if places[i].on_host:
            host_bytes += (layer.kv_bytes if places[i] == Place.HOST else 0) + (0 if i in pinned else raw[i])
        if batch_places[i] == Place.HOST:
            room = max(room, layer.kv_bytes)
        else:
            gpu_bytes += layer.kv_bytes
    gpu_bytes += room
    if offloaded:
        gpu_bytes += RAW_SLOTS * max(off_gpu[i].raw_bytes for i in offloaded)
        gpu_bytes += TILE_SLOTS * max(off_gpu[i].packed_bytes for i in offloaded)
    host_bytes += pinned_bytes
    prediction = predict(layers, places, batch_places, pinned, rates)
    return Placement(places, batch_places, pinned, gpu_bytes, host_bytes, pinned_bytes, prediction)


def predict(
    layers: Sequence[LayerSize],
    places: Sequence[Place],
    batch_places: Sequence[Place],
    pinned: Sequence[int],
    rates: Rates,
) -> Prediction:
    """What follows from the rates where link and cores never wait for one another."""
    return Prediction(
        batch_1=1 / _decode_s(layers, places, pinned, rates, 1.0, 1.0),
        batch_8=8 / _decode_s(layers, batch_places, pinned, rates, rates.gpu_batch_8, rates.host_batch_8),
        prefill=PREFILL_TOKENS / _prefill_s(layers, places, pinned, rates),
    )


def _decode_s(
    layers: Sequence[LayerSize],
    places: Sequence[Place],
    pinned: Sequence[int],
    rates: Rates,
    gpu_factor: float,
    host_factor: float,
) -> float:
    """The chain of GPU and host work, or the link's work where that is longer. While both link and host
    memory are busy each runs at its lower rate; what is left of one then runs alone, at the higher."""
    link = chain = host_bytes = 0.0
    runs = 0
    held = frozenset(pinned)
    for i, (layer, place) in enumerate(zip(layers, places, strict=True)):
        if place is Place.RESIDENT or place.is_split:
            chain += layer.on_gpu(place) / rates.gpu * gpu_factor
        off = layer.off_gpu(place)
        if place.on_host:
            host_bytes += off.raw_bytes * off.active_share * host_factor
            runs += place.is_split or i == 0 or not places[i - 1].on_host
        elif place.streamed:
            chain += off.packed_bytes * off.active_share / rates.gpu * gpu_factor
            link += off.raw_bytes * _link_slowdown(i in held, rates.link, rates.file)
    chain += rates.other_s + runs * rates.crossing_s
    both = min(link / rates.link_beside_host, host_bytes / rates.host_beside_link)
    link_s = both + (link - both * rates.link_beside_host) / rates.link
    host_s = both + (host_bytes - both * rates.host_beside_link) / rates.host
    return max(link_s, chain + host_s)


def _prefill_s(
    layers: Sequence[LayerSize], places: Sequence[Place], pinned: Sequence[int], rates: Rates
) -> float:
    link = sum(
        off.raw_bytes * _link_slowdown(i in pinned, rates.link, rates.file)
        for i, off in enumerate(_off_gpu(layers, places))
    )
    return max(link / rates.link, len(layers) * PREFILL_TOKENS / rates.gpu_prefill) + rates.other_s


def _link_slowdown(is_pinned: bool, link: float, file: float) -> float:
    """Times longer that a layer takes to come over the link, because it has to be read first."""
    return 1.0 if is_pinned else max(1.0, link / file)


def _too_little(layers: Sequence[LayerSize], budgets: Budgets, rates: Rates) -> OutOfCapacityError:
    fixed = [i for i, layer in enumerate(layers) if not layer.streamable]
    if fixed:
        return OutOfCapacityError(
            f"the layers do not fit into {budgets.gpu_bytes} bytes of GPU memory, and layer {fixed[0]} "
            "cannot be streamed (rows of each expert's matrix lie apart): give this stage fewer layers"
        )
    unlimited = Budgets(budgets.gpu_bytes, 1 << 62, 1 << 62)
    streamed = arrange(len(layers), len(layers), 0)
    least = _measured(layers, streamed, streamed, unlimited, rates)
    ring_bytes = RING_SLOTS * max(layer.raw_bytes for layer in layers)
    if least is None:  # cannot be: every layer is streamable and the pool has no bound
        return OutOfCapacityError("the layers fit into no placement")
    return OutOfCapacityError(
        f"the layers fit into no placement: streaming all of them takes {least.gpu_bytes} bytes of GPU "
        f"memory ({budgets.gpu_bytes} are allowed) and {ring_bytes} to {least.pinned_bytes} of pinned "
        f"host memory ({budgets.pinned_bytes} are allowed)"
    )


def describe(placement: Placement) -> str:
    """A line for people: "16 resident, 6 streamed, 10 on the host; ..." """
    counts = ", ".join(
        f"{placement.count(place)} {place.value}"
        for place in Place
        if placement.count(place) or not place.is_split
    )
    predicted = placement.prediction
    return (
        f"{counts}; GPU {placement.gpu_bytes / 1e9:.2f} GB, host {placement.host_bytes / 1e9:.2f} GB of "
        f"which pinned {placement.pinned_bytes / 1e9:.2f} GB; predicted tokens/s: "
        f"{predicted.batch_1:.1f} at batch 1, {predicted.batch_8:.1f} at batch 8, "
        f"{predicted.prefill:.0f} in prefill"
    )
