"""Which processors the engine's threads run on: one a physical core, of those this process may use.

Knows the affinity mask, the control group's quota and the kernel's topology files, nothing of the engine.
"""

from __future__ import annotations

import os
from pathlib import Path
from zlib import crc32

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def usable_cores() -> list[int]:
    """One processor number for each physical core this process may run on, ascending.

    At most as many as the control group's CPU quota allows at once (rounded down, at least one).
    """
    allowed = _allowed()
    cores: dict[str, int] = {}
    for cpu in allowed:
        cores.setdefault(_siblings(cpu), cpu)
    chosen = sorted(cores.values())
    quota = cpu_quota()
    return chosen if quota is None else chosen[: max(1, int(quota))]


def shared_by(cores: list[int]) -> str:
    """The file over which those who compute on these cores share them (core_share.h); this user's only."""
    return f"/dev/shm/pipellm-cores-{os.getuid()}-{crc32(repr(cores).encode()):08x}"


def _allowed() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _siblings(cpu: int) -> str:
    """The hardware threads of a core, in the kernel's spelling; the processor alone where it does not say."""
    try:
        return Path(_TOPOLOGY.format(cpu)).read_text().strip()
    except OSError:
        return str(cpu)


def cpu_quota(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> float | None:
    """Processors' worth of time the control groups of this process allow (v2 or v1); None: no limit.

    The tightest of the process's group and the groups above it.
    """
    limits = [limit for group in _groups(root, membership) if (limit := _group_quota(group)) is not None]
    return min(limits, default=None)


def _groups(root: Path, membership: Path) -> list[Path]:
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    groups: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "cpu" if controllers else root
        group = top / path.lstrip("/")
        groups += [group, *(parent for parent in group.parents if parent == top or top in parent.parents)]
    return groups


def _group_quota(group: Path) -> float | None:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text().strip()
    except (OSError, ValueError):
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)
