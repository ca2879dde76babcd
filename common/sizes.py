"""Numbers of bytes, for people."""

from __future__ import annotations


def gib(num_bytes: int) -> str:
    """`num_bytes` in GiB, or in MiB where that is less than a tenth of one."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 / 10 else f"{num_bytes / 2**20:.2f} MiB"
