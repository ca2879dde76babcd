"""Rates of steps as they went by, reported once."""

from __future__ import annotations

import pytest

from stage.backends.cuda.pace import Pace


def test_a_minute_of_steps_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    pace = Pace(lambda: now)
    for _ in range(200):
        pace.step(1)
        now += 0.02
    now += 30  # a pause is no step's time
    for _ in range(100):
        pace.step(8)
        now += 0.05
    assert pace.rates() == {1: 50.0, 8: 160.0}
    assert "placement_measured" not in capsys.readouterr().out
    now += 30
    pace.step(1)
    pace.step(1)
    assert capsys.readouterr().out.count("placement_measured") == 1
