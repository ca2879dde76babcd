"""`qwen3moe`: Qwen 3 with experts in every layer; the chosen experts' weights are made to sum to one."""

from __future__ import annotations

from stage.model.decoder import Decoder
from stage.model.spec import ModelSpec, RopeKind


def build(decoder: Decoder) -> ModelSpec:
    return decoder.model(decoder.alike_layers(RopeKind.NEOX, decoder.moe_ffn, qk_norm=True))
