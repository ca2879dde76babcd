"""Settings of a stage daemon."""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace

from common import log, rpc
from common.errors import ConfigError
from common.settings import check_ranges, setting
from stage.memory_settings import MemorySettings, check_amount

BACKENDS = ("auto", "reference", "cpu", "cuda")
CARRIERS = ("auto", "shm", "grpc")
ACCURACIES = ("fast", "exact")
KV_DTYPES = ("f16", "q8_0")
_RANGES = {"threads": (0, 4096)}


@dataclass(frozen=True)
class StageConfig:
    listen: str = setting("127.0.0.1:0", "host:port or unix:/path to serve on", "ADDRESS")
    advertise: str = setting("", "address the others dial, where it differs from --listen", "ADDRESS")
    coordinator: str = setting("127.0.0.1:7070", "the coordinator to register with", "ADDRESS")
    stage_id: str = setting("auto", "name of this stage; auto: host and device", "NAME")
    model_dir: tuple[str, ...] = setting(
        (), "where this stage's model files lie; none: at the coordinator's paths", "DIR"
    )
    backend: str = setting("auto", "reference, cpu, cuda, or auto", "NAME")
    device: str = setting("auto", "cpu, cuda:N, or auto", "DEVICE")
    threads: int = setting(0, "computing threads on a CPU; 0: all cores, shared by the host's stages")
    memory: str = setting("auto", "CPU stage: for weights and KV cache, as 8GB, 8GiB or 80%", "AMOUNT")
    gpu_memory: str = setting(
        "auto", "of the GPU, all in all: auto (what is free), 12GB, 12GiB or 50%", "AMOUNT"
    )
    host_memory: str = setting(
        "auto", "GPU stage: host memory for layers that do not fit on the GPU", "AMOUNT"
    )
    pinned_memory: str = setting(
        "auto", "of host_memory, pinned; what is beyond it is read from the file", "AMOUNT"
    )
    placement: str = setting(
        "auto", "GPU stage: auto, or where layers lie: 16:24=streamed,24:32=host", "LAYERS"
    )
    accuracy: str = setting(
        "fast", "CPU: fast (8-bit activations in prefill and for K-quants) or exact (16-bit)", "NAME"
    )
    kv_dtype: str = setting("f16", "CPU: KV cache in f16 or q8_0", "TYPE")
    graphs: bool = setting(True, "GPU: replay decode steps as CUDA graphs")
    carrier: str = setting("auto", "link to the next stage: shm (one host), grpc, or auto (the best)", "NAME")
    log_level: str = setting("info", "debug, info, warning or error", "LEVEL")

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
