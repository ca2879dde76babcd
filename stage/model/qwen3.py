"""`qwen3`: Qwen 3, dense. Queries and keys are normed per head; the head size is the file's own."""

from __future__ import annotations

from stage.model.decoder import Decoder
from stage.model.spec import ModelSpec, RopeKind


def build(decoder: Decoder) -> ModelSpec:
    return decoder.model(decoder.alike_layers(RopeKind.NEOX, decoder.dense_ffn, qk_norm=True))
