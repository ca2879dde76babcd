"""How much of the host's memory weights and KV cache may take."""

from __future__ import annotations

from pathlib import Path

import psutil

from stage.memory_settings import parse_amount

# Left for the process itself, activations, and the rest of the machine.
_RESERVE_FRACTION = 0.05
_MIN_RESERVE_BYTES = 256 << 20

_CGROUP = Path("/sys/fs/cgroup")


def stated_bytes(amount: str) -> int:
    """What a setting of a CPU stage says, shares being of the machine's memory; 0: whatever is free."""
    return parse_amount(amount, psutil.virtual_memory().total) or 0


def host_memory_budget_bytes() -> int:
    """What is free now, by the machine and by the process's control group (containers), less a reserve."""
    memory = psutil.virtual_memory()
    reserve = max(int(memory.total * _RESERVE_FRACTION), _MIN_RESERVE_BYTES)
    return max(0, min(memory.available, _cgroup_free_bytes(memory.total)) - reserve)


def _cgroup_free_bytes(otherwise: int) -> int:
    """What the control group's limit (version 2) leaves; `otherwise` where there is none."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        return otherwise if limit == "max" else int(limit) - used
    except (OSError, ValueError):
        return otherwise
