"""Streams, events and copies of a GPU that does at once what it is told, in the host's memory: what is put on
it in the right order by the host's program gives the right results. (Orders between streams are
test_streaming_order.py's matter.)"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from stage.backends.cuda import streaming, weights
from stage.backends.cuda.repacker import MatrixRecipe
from tests.stage.backends.cuda.host_kernels import HostUploader
from tests.stage.backends.cuda.host_repack import HostRepack


class Stream:
    cuda_stream = 0

    def __init__(self, device: object = None) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...


class Event:
    def __init__(self, **kwargs: object) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: object) -> float:
        return 10.0


def simulate(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Skips the test where CUDA's bindings are not installed, or no compiler is."""
    driver: Any = pytest.importorskip("cuda.bindings.driver")
    repack = HostRepack(folder)

    class Repacker:
        def __init__(self, kernels: object) -> None: ...

        def run(self, recipe: MatrixRecipe, blob: int, slot: int) -> None:
            repack.run(recipe, blob, slot)

    def copy(target: int, source: int, nbytes: int, stream: object) -> tuple[int]:
        ctypes.memmove(target, source, nbytes)
        return (0,)

    empty = torch.empty
    patch.setattr(driver, "cuMemHostRegister", lambda *args: (0,))
    patch.setattr(driver, "cuMemHostUnregister", lambda *args: (0,))
    patch.setattr(driver, "cuMemcpyHtoDAsync", copy)
    patch.setattr(torch.cuda, "Stream", Stream)
    patch.setattr(torch.cuda, "Event", Event)
    patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    patch.setattr(torch.cuda, "current_stream", Stream)
    for name in ("synchronize", "empty_cache"):
        patch.setattr(torch.cuda, name, lambda *args: None)
    patch.setattr(torch, "empty", lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs))
    patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    patch.setattr(streaming, "Repacker", Repacker)
    patch.setattr(weights, "Uploader", HostUploader)
