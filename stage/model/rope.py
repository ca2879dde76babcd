"""Rotary position embedding reduced to numbers: inverse frequencies, and a magnitude for cos and sin.

Every kind of scaling (linear, YaRN, frequency factors, LongRoPE) ends in these, so that a backend only
turns pair i of a head at position p by the angle p * inverse_frequencies[i].

RoPE: arXiv 2104.09864. Linear scaling: arXiv 2306.15595. YaRN: arXiv 2309.00071, with the ramp between
whole dimensions as in the authors' code (https://github.com/jquesnelle/yarn). LongRoPE: arXiv 2402.13753.
"""

from __future__ import annotations

import math

import numpy as np

from stage.model.spec import RopeSpec, YarnSpec


def rope_table(spec: RopeSpec, factors: np.ndarray | None = None) -> tuple[np.ndarray, float]:
    """Inverse frequencies, float32 [dim / 2] in radians a position, and the magnitude of cos and sin.

    `factors`: the values of the tensor `spec.factors`, float32 [dim / 2]; None where the spec has none.
    """
    exponents = np.arange(0, spec.dim, 2, dtype=np.float64) / spec.dim
    frequencies = spec.freq_base**-exponents
    if factors is not None:
        frequencies = frequencies / factors.astype(np.float64)
    if spec.yarn is None:
        return (frequencies / spec.linear_factor).astype(np.float32), spec.magnitude
    kept = spec.yarn.ext_factor * _extrapolated(spec.yarn, spec.dim, spec.freq_base)
    interpolated = frequencies / spec.yarn.factor
    blended = interpolated * (1 - kept) + frequencies * kept
    return blended.astype(np.float32), spec.magnitude * _yarn_magnitude(spec.yarn)


def _extrapolated(yarn: YarnSpec, dim: int, freq_base: float) -> np.ndarray:
    """How far each pair keeps its frequency: 1 for those that turn often within the original context.

    float64 [dim / 2]. A pair turns `beta` times over the original context at the (fractional) index that
    `pair` gives; between the two betas the share falls linearly to 0.
    """

    def pair(beta: float) -> float:
        return dim * math.log(yarn.original_context_length / (beta * 2 * math.pi)) / (2 * math.log(freq_base))

    first = max(0, math.floor(pair(yarn.beta_fast)))
    last = min(dim - 1, math.ceil(pair(yarn.beta_slow)))
    ramp = (np.arange(dim // 2) - first) / max(0.001, last - first)
    return 1 - np.clip(ramp, 0, 1)


def _yarn_magnitude(yarn: YarnSpec) -> float:
    """The attention temperature of YaRN's section 3.4, applied to cos and sin (so twice in a score).

    Without extrapolation (`ext_factor` 0) the model's own `attn_factor` counts instead, as in llama.cpp.
    """
    if yarn.ext_factor == 0:
        return yarn.attn_factor
    return 0.1 * math.log(yarn.factor) + 1 if yarn.factor > 1 else 1.0
