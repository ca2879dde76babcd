"""What is taken for a GPU that failed, and what for memory that was missing."""

from __future__ import annotations

import pytest
import torch

from common.errors import DeviceLostError, OutOfCapacityError, PipeLLMError
from stage.faults import device_fault, is_out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        DeviceLostError("CUDA error while launching matvec"),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"),
    ],
)
def test_errors_of_a_gpu(error: Exception) -> None:
    assert isinstance(device_fault(error), DeviceLostError)


@pytest.mark.parametrize("error", [ValueError("CUDA"), RuntimeError("shapes differ"), PipeLLMError("no")])
def test_other_errors(error: Exception) -> None:
    assert device_fault(error) is None
    assert not is_out_of_memory(error)


def test_missing_memory_is_seen_behind_what_was_made_of_it() -> None:
    made = OutOfCapacityError("the KV cache needs 12 GiB")
    made.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    assert is_out_of_memory(made)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(DeviceLostError("CUDA_ERROR_OUT_OF_MEMORY: out of memory"))
    assert not is_out_of_memory(DeviceLostError("an illegal memory access"))
    assert not is_out_of_memory(OutOfCapacityError("layers need 12 GiB, 8 are free"))
