"""`gemma3`: Gemma 3, its language model.

Layers with a sliding window and one with full attention alternate, five to one. The local ones rotate by a
base of their own and without scaling. Norms stand before and after both halves of a layer, queries and keys
are normed per head, and embeddings are scaled by sqrt(hidden_size).
The Gemma 3 report: arXiv 2503.19786; constants: https://github.com/google/gemma_pytorch.
"""

from __future__ import annotations

import math

from stage.model.decoder import Decoder
from stage.model.spec import Activation, LayerSpec, ModelSpec, RopeKind, RopeSpec

_PATTERN = "attention.sliding_window_pattern"
_DEFAULT_PERIOD = 6
_NUM_LAYERS_27B = 62


def build(decoder: Decoder) -> ModelSpec:
    window = decoder.sliding_window()
    global_rope = decoder.rope(RopeKind.NEOX)
    local_base = decoder.hyperparameters.positive("rope.freq_base_swa", 10000.0)
    local_rope = RopeSpec(RopeKind.NEOX, global_rope.dim, local_base)
    is_local = _local_layers(decoder)
    layers = []
    for index in range(decoder.num_layers):
        local = window is not None and is_local[index]
        attention = decoder.attention(
            index,
            local_rope if local else global_rope,
            window=window if local else None,
            scale=_scale(decoder),
            qk_norm=True,
            post_norm=True,
        )
        ffn = decoder.dense_ffn(index, Activation.GELU_TANH, post_norm=True)
        layers.append(LayerSpec(index, attention, ffn))
    return decoder.model(layers, embedding_scale=math.sqrt(decoder.hidden_size))


def _local_layers(decoder: Decoder) -> list[bool]:
    """Which layers have the window: a flag each in the file, or all but the last of every period."""
    if decoder.hyperparameters.is_array(_PATTERN):
        return [bool(flag) for flag in decoder.hyperparameters.array(_PATTERN, decoder.num_layers)]
    period = decoder.hyperparameters.count(_PATTERN, _DEFAULT_PERIOD)
    return [index % period < period - 1 for index in range(decoder.num_layers)]


def _scale(decoder: Decoder) -> float:
    """The 27B model, alone, scales by what its heads would measure if they divided the hidden size."""
    if decoder.num_layers == _NUM_LAYERS_27B:
        return (decoder.hidden_size / decoder.num_heads[0]) ** -0.5
    return decoder.head_dim**-0.5
