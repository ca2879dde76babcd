"""How fast the native engine's threads read memory: the limit of every product with one row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stage.backends.cpu import abi
from stage.backends.cpu.backend import CpuBackend


def read_bytes_per_s(backend: CpuBackend, arrays: Sequence[np.ndarray], repeats: int = 5) -> float:
    """Bytes a second over contiguous arrays, the fastest of `repeats` passes."""
    flat = [array.reshape(-1) for array in arrays]

    def pass_s() -> float:
        return sum(
            backend._library.pipellm_read_seconds(backend._engine, abi.address(data), data.nbytes)
            for data in flat
        )

    pass_s()
    return sum(data.nbytes for data in flat) / min(pass_s() for _ in range(repeats))
