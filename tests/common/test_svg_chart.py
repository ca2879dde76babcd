"""Charts are well-formed, whatever stands in them, and bars are as long as their values."""

from __future__ import annotations

import math
from xml.etree import ElementTree

from common.svg_chart import Bar, bar_chart

SVG = "{http://www.w3.org/2000/svg}"


def bars_of(chart: str) -> list[float]:
    rects = ElementTree.fromstring(chart).iter(f"{SVG}rect")
    return [float(rect.get("width", "0")) for rect in rects if rect.get("height") == "14"]


def test_bars_are_as_long_as_their_values() -> None:
    chart = bar_chart("t", [("one", [Bar("a", 4.0), Bar("b", 1.0)]), ("two", [Bar("c", 500.0)])])
    a, b, c = bars_of(chart)
    assert a == 4 * b and c == a


def test_text_is_escaped_and_odd_values_draw_nothing() -> None:
    bars = [Bar("matvec<Q4_K, Q6_K> & 'x'", math.nan, "<0", "ours"), Bar("b", -1.0, series="theirs")]
    chart = bar_chart("a < b", [("g", bars)])
    texts = [element.text for element in ElementTree.fromstring(chart).iter(f"{SVG}text")]
    assert "a < b" in texts and "matvec<Q4_K, Q6_K> & 'x'" in texts and {"ours", "theirs"} <= set(texts)
    assert bars_of(chart) == [0.0, 0.0]


def test_an_empty_chart_is_one_too() -> None:
    assert bars_of(bar_chart("nothing", [])) == [] == bars_of(bar_chart("nothing", [("g", [])]))
