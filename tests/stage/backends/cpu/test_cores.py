"""Which cores are used: one thread a physical core, within the control group's quota."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from pathlib import Path

import numpy as np
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


def test_cores_are_shared_with_others_who_compute(tmp_path: Path) -> None:
    from stage.backends.cpu import CpuBackend, abi

    library = abi.library()
    if library is None:
        pytest.skip("the native CPU backend was not built here (no C++ compiler)")
    path = str(tmp_path / "cores")
    others = [os.open(path, os.O_RDWR | os.O_CREAT) for _ in range(3)]

    def computes(other: int, slot: int, kind: int) -> None:
        byte = struct.pack("hhqqi4x", kind, os.SEEK_SET, slot, 1, 0)
        fcntl.fcntl(others[other], fcntl.F_OFD_SETLK, byte)

    def threads() -> int:
        library.pipellm_read_seconds(engine, abi.address(data), data.nbytes)
        return int(library.pipellm_threads_used(engine))

    data = np.zeros(4096, np.uint8)
    variant = CpuBackend(threads=1).variant.encode()
    engine = library.pipellm_create(variant, 6, None, 0, path.encode(), True)
    try:
        assert threads() == 6
        computes(0, 7, fcntl.F_WRLCK)
        assert threads() == 3
        computes(1, 8, fcntl.F_WRLCK)
        computes(2, 60, fcntl.F_WRLCK)
        assert threads() == 1
        computes(0, 7, fcntl.F_UNLCK)
        os.close(others.pop())  # as when its process ends
        assert threads() == 1  # those who met keep to their parts for a while
        time.sleep(0.12)
        assert threads() == 3
    finally:
        library.pipellm_destroy(engine)
        for other in others:
            os.close(other)
