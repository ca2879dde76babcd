"""`phi3`: Phi 3, 3.5 and 4. Q, K, V come fused, gate and up too; the 128k models rotate by LongRoPE."""

from __future__ import annotations

from stage.model.decoder import Decoder
from stage.model.spec import ModelSpec, RopeKind


def build(decoder: Decoder) -> ModelSpec:
    return decoder.model(decoder.alike_layers(RopeKind.NEOX, decoder.dense_ffn))
