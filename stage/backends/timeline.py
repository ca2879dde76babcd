"""What was at work when, over one token of a model whose weights are streamed: who waited, and for what.

Pure functions on activities by their times, wherever these were taken; they know no clock and no device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from common.svg_timeline import Block

COPY, REPACK, COMPUTE, HOST = "link", "repacking", "GPU", "host"
LANES = (COPY, REPACK, COMPUTE, HOST)
LAUNCHING = "launching"  # everything was there, and it had not begun


@dataclass(frozen=True)
class Activity:
    """Work on one lane; a lane does one thing at a time. Seconds of one clock.

    `waits`: what had to be before it began, as chains of (cause, when it was there), each in the order in
    which its links follow one another.
    """

    lane: str
    name: str
    start_s: float
    end_s: float
    waits: tuple[tuple[tuple[str, float], ...], ...] = ()
    nbytes: int = 0  # that a copy carries


@dataclass(frozen=True)
class Report:
    """Of a window of time, normally one token's."""

    start_s: float
    seconds: float
    activities: tuple[Activity, ...]  # those that touch the window
    busy_s: dict[str, float]  # by lane
    stalls_s: dict[str, dict[str, float]]  # by lane, by cause
    bytes_copied: float
    link_bytes_per_s: float  # over the whole window
    copy_bytes_per_s: float  # while a copy was under way
    max_link_bytes_per_s: float  # as measured, with nothing else to do
    overlap: float  # share of the copies' time in which the GPU or the host computed

    @property
    def link_share(self) -> float:
        """Of the link's measured maximum, over the whole window."""
        return self.link_bytes_per_s / self.max_link_bytes_per_s if self.max_link_bytes_per_s else 0.0


def analyse(
    activities: Iterable[Activity], start_s: float, end_s: float, max_link_bytes_per_s: float
) -> Report:
    """What follows for [start_s, end_s): activities and stalls that reach over its ends count by their part
    within."""
    by_lane: dict[str, list[Activity]] = {lane: [] for lane in LANES}
    for activity in sorted(activities, key=lambda one: one.start_s):
        by_lane[activity.lane].append(activity)
    window = (start_s, end_s)
    stalls = {lane: _stalls(ones, window) for lane, ones in by_lane.items()}
    within = {
        lane: [one for one in ones if _common((one.start_s, one.end_s), window) > 0]
        for lane, ones in by_lane.items()
    }
    busy = {lane: _union_s(ones, window) for lane, ones in within.items()}
    copied = sum(
        one.nbytes * _common((one.start_s, one.end_s), window) / (one.end_s - one.start_s)
        for one in within[COPY]
    )
    computing = [*within[COMPUTE], *within[HOST]]
    hidden_s = busy[COPY] + _union_s(computing, window) - _union_s([*within[COPY], *computing], window)
    seconds = end_s - start_s
    return Report(
        start_s=start_s,
        seconds=seconds,
        activities=tuple(one for lane in LANES for one in within[lane]),
        busy_s=busy,
        stalls_s=stalls,
        bytes_copied=copied,
        link_bytes_per_s=copied / seconds if seconds > 0 else 0.0,
        copy_bytes_per_s=copied / busy[COPY] if busy[COPY] else 0.0,
        max_link_bytes_per_s=max_link_bytes_per_s,
        overlap=max(0.0, hidden_s) / busy[COPY] if busy[COPY] else 0.0,
    )


def stall_parts(activity: Activity, idle_since_s: float) -> list[tuple[str, float, float]]:
    """(cause, from, to) of the time between the lane's last work and this one: along the chain of waits that
    was through last, because nothing else would have made it begin earlier."""
    decisive = max(activity.waits, key=lambda chain: chain[-1][1] if chain else idle_since_s, default=())
    parts, now = [], idle_since_s
    for cause, there_s in (*decisive, (LAUNCHING, activity.start_s)):
        until = min(there_s, activity.start_s)
        if until > now:
            parts.append((cause, now, until))
            now = until
    return parts


def _stalls(lane: Sequence[Activity], window: tuple[float, float]) -> dict[str, float]:
    """What came before the lane's first activity is not known."""
    seconds: dict[str, float] = {}
    for before, activity in itertools.pairwise(lane):
        for cause, start, end in stall_parts(activity, before.end_s):
            common = _common((start, end), window)
            if common > 0:
                seconds[cause] = seconds.get(cause, 0.0) + common
    return seconds


def _common(one: tuple[float, float], other: tuple[float, float]) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


def _union_s(activities: Sequence[Activity], window: tuple[float, float]) -> float:
    total, reached = 0.0, window[0]
    for one in sorted(activities, key=lambda one: one.start_s):
        start, end = max(one.start_s, reached), min(one.end_s, window[1])
        if end > start:
            total += end - start
            reached = end
    return total


# --- for people and for viewers -----------------------------------------------------------------------------


def lines(report: Report) -> list[str]:
    """The report for people."""
    found = [
        f"one token in {report.seconds * 1e3:.2f} ms ({1 / report.seconds:.1f} tokens/s)",
        f"  link: {report.bytes_copied / 1e6:.0f} MB, {report.link_bytes_per_s / 1e9:.1f} GB/s, "
        f"{report.link_share:.0%} of the {report.max_link_bytes_per_s / 1e9:.1f} GB/s measured alone; "
        f"{report.copy_bytes_per_s / 1e9:.1f} GB/s while copying, "
        f"{report.overlap:.0%} of that time behind computation",
    ]
    for lane in LANES:
        if not any(one.lane == lane for one in report.activities):
            continue
        busy_s, stalls = report.busy_s[lane], report.stalls_s[lane]
        causes = ", ".join(
            f"{cause} {seconds * 1e3:.2f} ms"
            for cause, seconds in sorted(stalls.items(), key=lambda one: -one[1])
        )
        found.append(
            f"  {lane:<10} busy {busy_s * 1e3:8.2f} ms ({busy_s / report.seconds:.0%})"
            + (f"; waited for: {causes}" if causes else "")
        )
    return found


def as_dict(report: Report) -> dict[str, Any]:
    """The figures without the activities, for JSON."""
    return {
        "seconds": report.seconds,
        "bytes_copied": round(report.bytes_copied),
        "link_bytes_per_s": report.link_bytes_per_s,
        "copy_bytes_per_s": report.copy_bytes_per_s,
        "max_link_bytes_per_s": report.max_link_bytes_per_s,
        "link_share": report.link_share,
        "overlap": report.overlap,
        "busy_s": report.busy_s,
        "stalls_s": report.stalls_s,
    }


def blocks(report: Report) -> list[Block]:
    """The window as blocks of a chart, in milliseconds from its start."""
    end_s = report.start_s + report.seconds
    return [
        Block(
            one.lane,
            one.name,
            (max(one.start_s, report.start_s) - report.start_s) * 1e3,
            (min(one.end_s, end_s) - report.start_s) * 1e3,
        )
        for one in report.activities
    ]


def chrome_trace(report: Report) -> dict[str, Any]:
    """As chrome://tracing and Perfetto read it (Trace Event Format): a thread a lane, complete events in
    microseconds."""
    threads = {lane: number for number, lane in enumerate(LANES)}
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": lane}}
        for lane, number in threads.items()
    ]
    for one in report.activities:
        arguments: dict[str, Any] = {"bytes": one.nbytes} if one.nbytes else {}
        for chain in one.waits:
            for cause, there_s in chain:
                arguments[f"{cause} there at (us)"] = round((there_s - report.start_s) * 1e6, 1)
        events.append(
            {
                "name": one.name,
                "cat": one.lane,
                "ph": "X",
                "pid": 0,
                "tid": threads[one.lane],
                "ts": round((one.start_s - report.start_s) * 1e6, 3),
                "dur": round((one.end_s - one.start_s) * 1e6, 3),
                "args": arguments,
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
