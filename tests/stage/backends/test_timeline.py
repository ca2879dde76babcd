"""What is said of a token follows from the times of its activities."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.svg_timeline import timeline
from stage.backends.timeline import (
    COMPUTE,
    COPY,
    HOST,
    LANES,
    LAUNCHING,
    REPACK,
    Activity,
    analyse,
    blocks,
    chrome_trace,
    lines,
    stall_parts,
)

GB = 1e9


def test_a_link_that_never_idles_is_wholly_used() -> None:
    copies = [Activity(COPY, f"layer {i}", i * 2.0, i * 2.0 + 2.0, nbytes=100) for i in range(5)]
    work = [Activity(COMPUTE, "p", i * 2.0, i * 2.0 + 1.0) for i in range(5)]
    report = analyse([*work, *copies], 2.0, 8.0, 50.0)
    assert report.bytes_copied == 300 and report.link_share == 1.0 and report.copy_bytes_per_s == 50.0
    assert report.busy_s == {COPY: 6.0, REPACK: 0.0, COMPUTE: 3.0, HOST: 0.0}
    assert report.overlap == 0.5
    assert report.stalls_s[COPY] == {} and report.stalls_s[COMPUTE] == {LAUNCHING: 3.0}


def test_what_reaches_over_the_window_counts_by_its_part() -> None:
    waits = ((("a copy", 4.0),),)
    ones = [
        Activity(COPY, "before", -2.0, 2.0, nbytes=40),
        Activity(COPY, "after", 9.0, 13.0, nbytes=40),
        Activity(COMPUTE, "a", -1.0, -0.5),
        Activity(COMPUTE, "b", 4.0, 11.0, waits),
    ]
    report = analyse(ones, 0.0, 10.0, 10.0)
    assert report.bytes_copied == pytest.approx(20 + 10)
    assert report.busy_s[COPY] == 3.0 and report.busy_s[COMPUTE] == 6.0
    assert report.stalls_s[COMPUTE] == {"a copy": 4.0}  # what lies before the window does not count
    assert [one.name for one in report.activities] == ["before", "after", "b"]


def test_a_stall_is_blamed_on_what_came_last_along_its_chain() -> None:
    chains = ((("issuing", 1.0),), (("a copy", 5.0), ("the repacking", 7.0)), (("a slot", 2.0),))
    parts = stall_parts(Activity(COMPUTE, "layer 3", 7.5, 9.0, chains), 4.0)
    assert parts == [("a copy", 4.0, 5.0), ("the repacking", 5.0, 7.0), (LAUNCHING, 7.0, 7.5)]
    # Nothing that was there before the lane was free is to blame.
    assert stall_parts(Activity(COMPUTE, "x", 8.0, 9.0, chains), 8.0) == []
    assert stall_parts(Activity(COMPUTE, "x", 8.0, 9.0, chains), 7.0) == [(LAUNCHING, 7.0, 8.0)]
    assert stall_parts(Activity(COMPUTE, "x", 3.0, 4.0), 1.0) == [(LAUNCHING, 1.0, 3.0)]


times = st.floats(0, 100, allow_nan=False)
chain = st.lists(st.tuples(st.sampled_from(["copy", "slot", "host"]), times), max_size=3).map(tuple)


@given(times, times, st.lists(chain, max_size=3).map(tuple))
def test_the_parts_of_a_stall_are_the_stall(one: float, other: float, waits: tuple) -> None:
    idle, start = sorted((one, other))
    parts = stall_parts(Activity(COMPUTE, "x", start, start + 1, waits), idle)
    assert sum(end - begin for _, begin, end in parts) == pytest.approx(start - idle)
    assert all(end > begin for _, begin, end in parts)


@given(st.lists(st.tuples(st.sampled_from(LANES), times, st.floats(0.01, 10)), max_size=20))
def test_busy_and_stalled_are_no_more_than_the_window(ones: list[tuple[str, float, float]]) -> None:
    activities = [Activity(lane, "x", start, start + length, nbytes=7) for lane, start, length in ones]
    report = analyse(activities, 20.0, 70.0, 1.0)
    for lane in LANES:
        assert 0 <= report.busy_s[lane] <= 50 + 1e-9
        assert sum(report.stalls_s[lane].values()) <= 50 + 1e-9
    assert 0 <= report.overlap <= 1 + 1e-9


def test_it_is_shown_as_text_as_a_chart_and_as_a_trace() -> None:
    ones = [
        Activity(COPY, "layer 1", 1.0, 1.002, nbytes=10**8),
        Activity(COMPUTE, "embedding", 1.0, 1.0005),
        Activity(COMPUTE, "layer 1", 1.0025, 1.003, ((("a copy", 1.002), ("the repacking", 1.0025)),)),
        Activity(HOST, "layers 2 & 3", 1.003, 1.005, ((("its turn", 1.003), ("the GPU", 1.003)),)),
    ]
    report = analyse(ones, 1.0, 1.006, 50 * GB)
    text = "\n".join(lines(report))
    assert "33% of the 50.0 GB/s" in text and "a copy 1.50 ms" in text and "the repacking 0.50 ms" in text
    assert f"  {REPACK} " not in text  # it did nothing
    chart = timeline("a < b", LANES, blocks(report), report.seconds * 1e3, "ms", lines(report))
    svg = "{http://www.w3.org/2000/svg}"
    root = ElementTree.fromstring(chart)
    widths = [float(r.get("width", "0")) for r in root.iter(f"{svg}rect") if r.get("class") == "block"]
    assert len(widths) == 4 and widths[0] == pytest.approx(4 * widths[1], rel=0.01)
    assert "layers 2 & 3: 3.000 to 5.000 ms" in [one.text for one in root.iter(f"{svg}title")]
    events = json.loads(json.dumps(chrome_trace(report)))["traceEvents"]
    assert [one["args"]["name"] for one in events if one["ph"] == "M"] == list(LANES)
    copy = next(one for one in events if one.get("cat") == COPY)
    assert copy["ts"] == 0 and copy["dur"] == pytest.approx(2000) and copy["args"] == {"bytes": 10**8}
    second = [one for one in events if one.get("cat") == COMPUTE][1]
    assert second["args"]["the repacking there at (us)"] == pytest.approx(2500)


def test_an_empty_timeline_is_one_too() -> None:
    report = analyse([], 0.0, 0.0, 0.0)
    assert report.link_share == report.overlap == report.link_bytes_per_s == 0
    ElementTree.fromstring(timeline("t", LANES, [], 0.0, "ms", []))
