"""`qwen2`: Qwen 2 and 2.5, QwQ, DeepSeek R1's Qwen distillations. Q, K and V have biases."""

from __future__ import annotations

from stage.model.decoder import Decoder
from stage.model.spec import ModelSpec, RopeKind


def build(decoder: Decoder) -> ModelSpec:
    return decoder.model(decoder.alike_layers(RopeKind.NEOX, decoder.dense_ffn))
