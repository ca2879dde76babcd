"""Timelines as SVG text: blocks of work on lanes, one under the other. No script, no font but the
viewer's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _LABEL_WIDTH, _MARGIN = 1200, 90, 14
_LANE, _BLOCK, _TOP = 40, 28, 44
_CHARACTER_WIDTH = 6.2  # of the small font, on average: what is longer than its block is left out
_COLOURS = ("#2563eb", "#059669", "#d97706", "#9333ea", "#64748b")


@dataclass(frozen=True)
class Block:
    """`start`, `end`: in the unit of the axis."""

    lane: str
    name: str
    start: float
    end: float


def timeline(
    title: str, lanes: Sequence[str], blocks: Sequence[Block], length: float, unit: str, notes: Sequence[str]
) -> str:
    """Blocks within [0, length] by lane, an axis with round marks, and lines of text below. A block's name
    and times stand in its tooltip."""
    room = _WIDTH - _LABEL_WIDTH - _MARGIN
    scale = room / length if length > 0 and math.isfinite(length) else 0.0
    parts = [_text(10, 24, title, "font-size='16' font-weight='bold'")]
    for number, lane in enumerate(lanes):
        top = _TOP + number * _LANE
        parts.append(_text(10, top + 18, lane, "font-weight='bold'"))
        parts.append(_rect(_LABEL_WIDTH, top, room, _BLOCK, "#f1f5f9"))
        for block in (one for one in blocks if one.lane == lane):
            start, end = max(0.0, block.start), min(length, block.end)
            if not end > start:
                continue
            x, width = _LABEL_WIDTH + start * scale, (end - start) * scale
            tooltip = f"{block.name}: {block.start:.3f} to {block.end:.3f} {unit}"
            parts.append(
                f"<g><title>{escape(tooltip)}</title>"
                + _rect(
                    x, top, width, _BLOCK, _COLOURS[number % len(_COLOURS)], "class='block' stroke='#ffffff'"
                )
                + (_label(x, top, block.name) if len(block.name) * _CHARACTER_WIDTH < width - 4 else "")
                + "</g>"
            )
    bottom = _TOP + len(lanes) * _LANE
    for mark in _marks(length) if scale else []:
        x = _LABEL_WIDTH + mark * scale
        parts.append(_rect(x, _TOP, 0.5, bottom - _TOP, "#94a3b8"))
        parts.append(_text(x, bottom + 14, f"{mark:g} {unit}", "text-anchor='middle' font-size='10'"))
    for number, note in enumerate(notes):
        parts.append(_text(10, bottom + 40 + 18 * number, note))
    height = bottom + 44 + 18 * len(notes)
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {height}' width='{_WIDTH}' "
            f"height='{height}' font-family='sans-serif' font-size='12' fill='#111827'>",
            f"<rect width='{_WIDTH}' height='{height}' fill='#ffffff'/>",
            *parts,
            "</svg>",
            "",
        ]
    )


def _marks(length: float) -> list[float]:
    """About ten round values from 0 to at most `length`."""
    rough = length / 10
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [number * step for number in range(int(length / step + 1e-9) + 1)]


def _label(x: float, top: float, text: str) -> str:
    return _text(x + 3, top + 18, text, "font-size='10' fill='#ffffff'")


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' {attributes}>{escape(text)}</text>"


def _rect(x: float, y: float, width: float, height: float, colour: str, attributes: str = "") -> str:
    return (
        f"<rect x='{x:.2f}' y='{y:.1f}' width='{width:.2f}' height='{height}' fill='{colour}' {attributes}/>"
    )
