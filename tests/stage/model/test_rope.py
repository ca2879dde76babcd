"""The rotation's frequencies against the formulas as their papers state them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stage.model.rope import rope_table
from stage.model.spec import RopeKind, RopeSpec, YarnSpec


def spec(dim: int = 64, base: float = 10000.0, **changes: object) -> RopeSpec:
    return RopeSpec(RopeKind.NEOX, dim, base, **changes)  # type: ignore[arg-type]


def test_plain_and_linear() -> None:
    plain, magnitude = rope_table(spec())
    assert plain.dtype == np.float32 and plain.shape == (32,) and magnitude == 1
    assert plain[0] == 1 and plain[16] == pytest.approx(0.01)
    assert np.allclose(rope_table(spec(linear_factor=4.0))[0], plain / 4, rtol=1e-6)


def test_factors_divide_and_magnitude_is_handed_on() -> None:
    factors = np.linspace(1, 8, 32, dtype=np.float32)
    scaled, magnitude = rope_table(spec(magnitude=1.19), factors)
    assert np.allclose(scaled, rope_table(spec())[0] / factors, rtol=1e-6)
    assert magnitude == 1.19


def test_yarn_keeps_fast_pairs_and_compresses_slow_ones() -> None:
    yarn = YarnSpec(4.0, 4096, 32.0, 1.0, 1.0, 1.0)
    plain = rope_table(spec(128))[0]
    scaled, magnitude = rope_table(spec(128, yarn=yarn))
    turns = 4096 * plain / (2 * math.pi)
    # A margin of one pair either way: the ramp starts and ends at whole pairs.
    assert np.array_equal(scaled[turns > 40], plain[turns > 40])
    assert np.allclose(scaled[turns < 0.8], plain[turns < 0.8] / 4, rtol=1e-6)
    ratio = plain / scaled
    assert np.all(np.diff(ratio) >= -1e-5) and np.any((ratio > 1.5) & (ratio < 3.5))
    assert magnitude == pytest.approx(0.1 * math.log(4) + 1)


def test_yarn_without_extrapolation_interpolates_all() -> None:
    yarn = YarnSpec(4.0, 4096, 32.0, 1.0, 0.0, 0.9)
    scaled, magnitude = rope_table(spec(yarn=yarn, magnitude=2.0))
    assert np.allclose(scaled, rope_table(spec())[0] / 4, rtol=1e-6)
    assert magnitude == pytest.approx(1.8)
