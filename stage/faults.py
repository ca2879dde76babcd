"""Which errors mean that a GPU can no longer be trusted."""

from __future__ import annotations

import torch

from common.errors import DeviceLostError


def device_fault(error: BaseException) -> DeviceLostError | None:
    """`error` as a DeviceLostError, if it comes from a GPU that failed under a running step."""
    if isinstance(error, DeviceLostError):
        return error
    if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
        reason = str(error).partition("\n")[0]
        return DeviceLostError(f"the GPU failed in a step, this stage ends: {reason}")
    return None
