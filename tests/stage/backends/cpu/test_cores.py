"""Which cores are used: one thread a physical core, within the control group's quota."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stage.backends.cpu import cores


def test_hardware_threads_of_one_core_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_allowed", lambda: [1, 2, 5, 6])
    monkeypatch.setattr(cores, "_siblings", lambda cpu: f"{cpu % 4},{cpu % 4 + 4}")
    monkeypatch.setattr(cores, "cpu_quota", lambda: None)
    assert cores.usable_cores() == [1, 2]


@pytest.mark.parametrize(
    ("quota", "expected"), [(1.5, [0]), (0.2, [0]), (3.0, [0, 1, 2]), (9.0, [0, 1, 2, 3])]
)
def test_the_quota_caps_them(monkeypatch: pytest.MonkeyPatch, quota: float, expected: list[int]) -> None:
    monkeypatch.setattr(cores, "_allowed", lambda: [0, 1, 2, 3])
    monkeypatch.setattr(cores, "_siblings", str)
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    assert cores.usable_cores() == expected


def test_only_cores_of_the_affinity_mask() -> None:
    assert set(cores.usable_cores()) <= os.sched_getaffinity(0)


def test_the_tightest_group_counts(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("0::/slice/pod\n")
    root = tmp_path / "fs"
    (root / "slice/pod").mkdir(parents=True)
    assert cores.cpu_quota(root, membership) is None
    (root / "slice/pod/cpu.max").write_text("400000 100000\n")
    (root / "slice/cpu.max").write_text("250000 100000\n")
    (root / "cpu.max").write_text("max 100000\n")
    assert cores.cpu_quota(root, membership) == 2.5


def test_version_one_groups(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("4:cpu,cpuacct:/box\n3:memory:/box\n")
    (tmp_path / "cpu/box").mkdir(parents=True)
    (tmp_path / "cpu/box/cpu.cfs_quota_us").write_text("150000\n")
    (tmp_path / "cpu/box/cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("-1\n")
    assert cores.cpu_quota(tmp_path, membership) == 1.5
