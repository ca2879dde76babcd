"""`llama`: Llama 2 and 3, Mistral, SmolLM2 and many others; with experts, Mixtral.

GGUF's converter reorders the rows of Q and K of these models so that neighbouring dimensions are rotated
together. Llama 3.1's frequency scaling comes as the tensor `rope_freqs`.
"""

from __future__ import annotations

from stage.model.decoder import Decoder
from stage.model.spec import ModelSpec, RopeKind


def build(decoder: Decoder) -> ModelSpec:
    ffn = decoder.moe_ffn if decoder.has_experts else decoder.dense_ffn
    return decoder.model(decoder.alike_layers(RopeKind.NORM, ffn))
