"""Horizontal bar charts as SVG text, for what a command measured. No plotting library, no script, no font but
the viewer's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _LABEL_WIDTH, _NOTE_WIDTH = 1080, 390, 250
_ROW, _BAR, _HEADING = 20, 14, 30
_COLOURS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#64748b")


@dataclass(frozen=True)
class Bar:
    """`value`: its length, at least 0; `note`: what stands behind it; `series`: bars of one series share a
    colour, and a legend names it."""

    label: str
    value: float
    note: str = ""
    series: str = ""


def bar_chart(title: str, groups: Sequence[tuple[str, Sequence[Bar]]]) -> str:
    """Groups of bars under headings, all to one scale per group. Values that are not finite become 0."""
    series = list(dict.fromkeys(bar.series for _, bars in groups for bar in bars))
    lines = [_text(10, 24, title, "font-size='16' font-weight='bold'")]
    top = 44
    if any(series):
        for index, name in enumerate(series):
            x = 10 + 200 * index
            lines.append(_rect(x, top - 10, 12, 12, _colour(index)))
            lines.append(_text(x + 18, top, name or "other"))
        top += 14
    room = _WIDTH - _LABEL_WIDTH - _NOTE_WIDTH
    for heading, bars in groups:
        top += _HEADING
        lines.append(_text(10, top - 8, heading, "font-weight='bold'"))
        longest = max((_length(bar) for bar in bars), default=0.0) or 1.0
        for bar in bars:
            width = room * _length(bar) / longest
            baseline = top + _BAR - 2
            lines.append(_text(_LABEL_WIDTH - 8, baseline, bar.label, "text-anchor='end'"))
            lines.append(_rect(_LABEL_WIDTH, top, width, _BAR, _colour(series.index(bar.series))))
            lines.append(_text(_LABEL_WIDTH + width + 6, baseline, bar.note))
            top += _ROW
    height = top + 12
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {height}' width='{_WIDTH}' "
            f"height='{height}' font-family='sans-serif' font-size='12' fill='#111827'>",
            f"<rect width='{_WIDTH}' height='{height}' fill='#ffffff'/>",
            *lines,
            "</svg>",
            "",
        ]
    )


def _length(bar: Bar) -> float:
    return max(0.0, bar.value) if math.isfinite(bar.value) else 0.0


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' {attributes}>{escape(text)}</text>"


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height}' fill='{colour}'/>"
