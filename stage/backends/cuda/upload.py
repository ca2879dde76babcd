"""Raw tensors to the GPU, through pinned memory: the file is read while the last piece is copied."""

from __future__ import annotations

import numpy as np
import torch

from stage.weights.quants import RawTensor

_STAGING_BYTES = 32 << 20


class Uploader:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._staging = [torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)]
        self._turn = 0

    def bytes(self, raw: RawTensor) -> torch.Tensor:
        """uint8 [..., rows, row_bytes] on the device, as the file stores it."""
        source = np.ascontiguousarray(raw.data).reshape(-1)
        out = torch.empty(source.size, dtype=torch.uint8, device=self._device)
        for start in range(0, source.size, _STAGING_BYTES):
            piece = source[start : start + _STAGING_BYTES]
            staging, copied = self._staging[self._turn], self._copied[self._turn]
            self._turn = 1 - self._turn
            copied.synchronize()
            np.copyto(staging.numpy()[: piece.size], piece)
            out[start : start + piece.size].copy_(staging[: piece.size], non_blocking=True)
            copied.record()
        return out.view(raw.data.shape)
