"""The feed-forward half of a layer: dense, or a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from stage.backends.reference.ops import Linear, RmsNorm


@dataclass(frozen=True)
class DenseFfn:
    """down(activation(gate(x)) * up(x)) of the normed input; [rows, hidden_size] -> the same shape."""

    norm: RmsNorm
    gate: Linear
    up: Linear
    down: Linear
    activation: Callable[[torch.Tensor], torch.Tensor]
    post_norm: RmsNorm | None

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = self.norm(hidden_states)
        out = self.down(self.activation(self.gate(x)) * self.up(x))
        return out if self.post_norm is None else self.post_norm(out)


@dataclass(frozen=True)
class MoeFfn:
    """Each row goes through the experts its router prefers, weighted; [rows, hidden_size] -> the same shape.

    The softmax is taken over all experts and the chosen ones' weights are then made to sum to one
    (Mixtral, arXiv 2401.04088, takes it over the chosen ones, which is the same).
    gate, up, down: weights [num_experts, out, in], biases [num_experts, out].
    """

    norm: RmsNorm
    router: Linear
    gate: Linear
    up: Linear
    down: Linear
    activation: Callable[[torch.Tensor], torch.Tensor]
    num_experts_used: int
    post_norm: RmsNorm | None

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = self.norm(hidden_states)
        probabilities = torch.softmax(self.router(x), -1)
        weights, experts = probabilities.topk(self.num_experts_used, -1)  # both [rows, num_experts_used]
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for expert in experts.unique().tolist():
            rows, choice = (experts == expert).nonzero(as_tuple=True)
            chosen = x[rows]
            inner = self.activation(_expert(self.gate, expert, chosen)) * _expert(self.up, expert, chosen)
            weighted = _expert(self.down, expert, inner) * weights[rows, choice, None]
            out.index_add_(0, rows, weighted)
        return out if self.post_norm is None else self.post_norm(out)


def _expert(stack: Linear, expert: int, x: torch.Tensor) -> torch.Tensor:
    bias = None if stack.bias is None else stack.bias[expert]
    return F.linear(x, stack.weight[expert], bias)
