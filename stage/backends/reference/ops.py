"""The small operations that layers are made of. All tensors are float32 unless said otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from stage.model.spec import Activation, RopeKind

ACTIVATIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True)
class Linear:
    """y = W x + b. x: [..., in]; weight: [out, in]; bias: [out]; y: [..., out]."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467). weight: [size]."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True)
class Rope:
    """Rotary embedding (arXiv 2104.09864): each pair of dimensions, as a complex number, is turned."""

    kind: RopeKind
    inverse_frequencies: torch.Tensor  # [dim / 2], radians a position
    magnitude: torch.Tensor  # []

    def turns(self, positions: torch.Tensor) -> torch.Tensor:
        """What each row's pairs are multiplied with: int [rows] -> complex64 [rows, 1, dim / 2]."""
        return torch.polar(self.magnitude, positions[:, None, None] * self.inverse_frequencies)

    def __call__(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """x: [rows, heads, head_dim] -> the same shape; dimensions from dim on stay as they are."""
        half = turns.shape[-1]
        rotated, rest = x.split((2 * half, x.shape[-1] - 2 * half), -1)
        if self.kind is RopeKind.NORM:
            pairs = torch.view_as_complex(rotated.unflatten(-1, (half, 2)))
            rotated = torch.view_as_real(pairs * turns).flatten(-2)
        else:
            pairs = torch.complex(rotated[..., :half], rotated[..., half:]) * turns
            rotated = torch.cat((pairs.real, pairs.imag), -1)
        return torch.cat((rotated, rest), -1) if rest.shape[-1] else rotated


def softcap(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    """cap * tanh(x / cap): keeps x within (-cap, cap); None leaves it."""
    return x if cap is None else cap * torch.tanh(x / cap)
