"""What a mesh says of itself: models, plan, stages, status, the progress of a load.

Frozen dataclasses whose fields are named as in the protobuf messages, and how they come out of them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message

from protos import coordinator_pb2 as pb
from protos import model_pb2

T = TypeVar("T")


@dataclass(frozen=True)
class Model:
    """A GGUF file below the coordinator's model directories; `problem` says why it cannot be served."""

    name: str
    path: str
    architecture: str
    title: str
    quantization: str
    file_bytes: int
    num_layers: int
    context_length: int
    vocab_size: int
    has_tokenizer: bool
    has_chat_template: bool
    loaded: bool
    problem: str


@dataclass(frozen=True)
class Device:
    """What a stage runs on."""

    kind: str
    name: str
    uuid: str
    memory_total_bytes: int
    memory_free_bytes: int
    backend: str
    hostname: str


@dataclass(frozen=True)
class Telemetry:
    """A GPU at this moment, other processes included; None where it does not tell. `utilization` is the share
    of time in which a kernel ran, `throttle_reasons` why clocks are held down, in words."""

    memory_total_bytes: int
    memory_used_bytes: int
    memory_free_bytes: int
    power_w: float | None
    power_limit_w: float | None
    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    temperature_c: int | None
    utilization: float | None
    throttle_reasons: tuple[str, ...]


@dataclass(frozen=True)
class Stage:
    """A registered stage; `state` is "idle", "loading", "serving" or "lost"."""

    stage_id: str
    address: str
    state: str
    device: Device
    layer_start: int
    layer_end: int
    weight_bytes: int
    kv_bytes: int
    resident_bytes: int
    page_cache_bytes: int
    layer_time_s: float
    busy_fraction: float
    detail: str
    kv_blocks_free: int
    telemetry: Telemetry | None  # of a GPU that answers


@dataclass(frozen=True)
class PlanWindow:
    """Layers [layer_start, layer_end) on one stage, and the link to the next window."""

    stage_id: str
    layer_start: int
    layer_end: int
    embedding: bool
    head: bool
    predicted_s: float
    carrier: str


@dataclass(frozen=True)
class Plan:
    """Which stage has which layers, in ring order."""

    epoch: int
    windows: tuple[PlanWindow, ...]
    num_kv_blocks: int
    kv_block_size: int


@dataclass(frozen=True)
class Status:
    """The state of the whole mesh; rates are over the last seconds."""

    version: str
    uptime_s: float
    state: str
    model: Model | None
    plan: Plan | None
    stages: tuple[Stage, ...]
    requests_running: int
    requests_waiting: int
    requests_finished: int
    tokens_generated: int
    kv_blocks_free: int
    kv_blocks_total: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


@dataclass(frozen=True)
class LoadProgress:
    """A step of loading; `phase` is "measure", "load", "link" or "check", bytes are over all stages."""

    phase: str
    bytes_done: int
    bytes_total: int


LoadEvent = LoadProgress | Plan | Model


def model_from_proto(message: Message) -> Model:
    return _copy(Model, message)


def plan_from_proto(message: pb.PlanStatus) -> Plan:
    windows = (_copy(PlanWindow, window, stage_id=window.members[0].stage_id) for window in message.windows)
    return _copy(Plan, message, windows=tuple(windows))


def status_from_proto(message: pb.GetStatusResponse) -> Status:
    return _copy(
        Status,
        message,
        model=model_from_proto(message.model) if message.HasField("model") else None,
        plan=plan_from_proto(message.plan) if message.HasField("plan") else None,
        stages=tuple(_stage_from_proto(stage) for stage in message.stages),
    )


def watched_status_from_proto(response: pb.WatchStatusResponse) -> Status:
    return status_from_proto(response.status)


def load_event_from_proto(response: pb.LoadModelResponse) -> LoadEvent | None:
    """The event a response carries; None for a kind that this client does not know."""
    match response.WhichOneof("event"):
        case "progress":
            return _copy(LoadProgress, response.progress)
        case "plan":
            return plan_from_proto(response.plan)
        case "loaded":
            return model_from_proto(response.loaded)
    return None


def _stage_from_proto(message: pb.StageStatus) -> Stage:
    state = _STATES.get(message.state, "unknown")
    telemetry = _telemetry_from_proto(message.telemetry) if message.HasField("telemetry") else None
    return _copy(Stage, message, state=state, device=_copy(Device, message.device), telemetry=telemetry)


def _telemetry_from_proto(message: model_pb2.GpuTelemetry) -> Telemetry:
    optional = (field.name for field in message.DESCRIPTOR.fields if field.has_presence)
    absent = {name: None for name in optional if not message.HasField(name)}
    return _copy(Telemetry, message, throttle_reasons=tuple(message.throttle_reasons), **absent)


_STATES = {
    pb.STAGE_STATE_IDLE: "idle",
    pb.STAGE_STATE_LOADING: "loading",
    pb.STAGE_STATE_SERVING: "serving",
    pb.STAGE_STATE_LOST: "lost",
}


def _copy(cls: type[T], message: Message, **given: Any) -> T:
    """An instance of `cls` from the fields of the same names; `given` holds those that are not plain."""
    names = (field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]
    return cls(**{name: given[name] if name in given else getattr(message, name) for name in names})
