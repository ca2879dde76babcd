"""Which errors mean that a GPU can no longer be trusted, and which that there was no memory."""

from __future__ import annotations

import torch

from common.errors import DeviceLostError

# torch raises what its libraries answer as plain RuntimeErrors.
_MARKS = ("CUDA error", "CUBLAS_STATUS", "CUDNN_STATUS")


def device_fault(error: BaseException) -> DeviceLostError | None:
    """`error` as a DeviceLostError, if it comes from a GPU that failed under a running step."""
    if isinstance(error, DeviceLostError):
        return error
    known = isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError)
    if known or (isinstance(error, RuntimeError) and any(mark in str(error) for mark in _MARKS)):
        reason = str(error).partition("\n")[0]
        return DeviceLostError(f"the GPU failed in a step, this stage ends: {reason}")
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was missing, of the host or the GPU: itself, or what it was raised from. At load that is
    no fault of the GPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, DeviceLostError | torch.AcceleratorError) and "out of memory" in str(error):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)
