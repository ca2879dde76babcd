"""Settings of a stage daemon."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field, replace

from common import log, rpc
from common.errors import ConfigError
from common.settings import check_ranges
from stage.memory_settings import MemorySettings, check_amount

BACKENDS = ("auto", "reference", "cpu", "cuda")
CARRIERS = ("auto", "shm", "grpc")
ACCURACIES = ("fast", "exact")
KV_DTYPES = ("f16", "q8_0")
_RANGES = {"threads": (0, 4096)}


@dataclass(frozen=True)
class StageConfig:
    listen: str = field(default="127.0.0.1:0", metadata={"help": "host:port or unix:/path to serve on"})
    advertise: str = field(
        default="", metadata={"help": "address the others dial, where it differs from --listen"}
    )
    coordinator: str = field(default="127.0.0.1:7070", metadata={"help": "the coordinator to register with"})
    stage_id: str = field(default="auto", metadata={"help": "name of this stage; auto: host and device"})
    model_dir: tuple[str, ...] = field(
        default=(), metadata={"help": "where this stage's model files lie; none: at the coordinator's paths"}
    )
    backend: str = field(default="auto", metadata={"help": "reference, cpu, cuda, or auto"})
    device: str = field(default="auto", metadata={"help": "cpu, cuda:N, or auto"})
    threads: int = field(default=0, metadata={"help": "computing threads on a CPU; 0: all cores"})
    memory: str = field(
        default="auto", metadata={"help": "CPU stage: for weights and KV cache, as 8GB, 8GiB or 80%"}
    )
    gpu_memory: str = field(
        default="auto", metadata={"help": "of the GPU, all in all: auto (what is free), 12GB, 12GiB or 50%"}
    )
    host_memory: str = field(
        default="auto", metadata={"help": "GPU stage: host memory for layers that do not fit on the GPU"}
    )
    pinned_memory: str = field(
        default="auto", metadata={"help": "of host_memory, pinned; what is beyond it is read from the file"}
    )
    placement: str = field(
        default="auto", metadata={"help": "GPU stage: auto, or where layers lie: 16:24=streamed,24:32=host"}
    )
    accuracy: str = field(
        default="fast", metadata={"help": "CPU: fast (8-bit activations in prefill) or exact (16-bit)"}
    )
    kv_dtype: str = field(default="f16", metadata={"help": "CPU: KV cache in f16 or q8_0"})
    graphs: bool = field(default=True, metadata={"help": "GPU: replay decode steps as CUDA graphs"})
    carrier: str = field(
        default="auto", metadata={"help": "link to the next stage: shm (one host), grpc, or auto (the best)"}
    )
    log_level: str = field(default="info", metadata={"help": "debug, info, warning or error"})

    def checked(self) -> StageConfig:
        """The same, if it can be used. Raises ConfigError naming the setting."""
        rpc.check_address(self.listen)
        rpc.check_address(self.coordinator)
        if self.advertise:
            rpc.check_address(self.advertise)
        elif self.listen.startswith(("0.0.0.0:", "[::]:")):
            raise ConfigError(f"listen is {self.listen}: say with --advertise where others dial this stage")
        for name, known in (
            ("backend", BACKENDS), ("accuracy", ACCURACIES), ("kv_dtype", KV_DTYPES),
            ("carrier", CARRIERS), ("log_level", log.LEVELS),
        ):  # fmt: skip
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(known)}")
        check_ranges(self, _RANGES)
        check_amount("memory", self.memory)
        self.memory_settings.check()
        if not self.stage_id:
            raise ConfigError("stage_id is empty; leave it out for a name made of host and device")
        return self

    @property
    def memory_settings(self) -> MemorySettings:
        return MemorySettings(self.gpu_memory, self.host_memory, self.pinned_memory, self.placement)

    def named(self, device: str, address: str) -> StageConfig:
        """The same with a stage_id: host and GPU, or host and where a CPU stage listens."""
        if self.stage_id != "auto":
            return self
        where = address.rpartition("/")[2].removesuffix(".sock").rpartition(":")[2]
        unique = device.replace(":", "") if device.startswith("cuda") else f"{device}-{where}"
        return replace(self, stage_id=f"{socket.gethostname()}-{unique}")
