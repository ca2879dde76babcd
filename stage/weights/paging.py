"""Pages of the mapped file: advice to the kernel to read them ahead, or to let go of them; and the files by
themselves."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np

_PAGE = mmap.PAGESIZE


_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14


def populate(data: np.ndarray) -> None:
    """Reads the pages of a contiguous view of a mapping and maps them. Where the kernel cannot do that at
    once, reading has only begun on return."""
    if not _advise(data, _POPULATE_READ, outwards=True):
        _advise(data, mmap.MADV_WILLNEED, outwards=True)


def let_go(data: np.ndarray) -> None:
    """The pages that lie wholly in a contiguous view no longer count as this process's memory; the page cache
    may keep them. The view stays valid: its pages are read again when they are touched."""
    _advise(data, mmap.MADV_DONTNEED, outwards=False)


def open_all(paths: Iterable[Path], flags: int) -> dict[Path, int]:
    """Descriptors of files, all of them or none. Raises OSError."""
    files: dict[Path, int] = {}
    try:
        for path in paths:
            files[path] = os.open(path, flags)
    except BaseException:
        for file in files.values():
            os.close(file)
        raise
    return files


def _advise(data: np.ndarray, advice: int, outwards: bool) -> bool:
    """Whether the kernel took the advice; it is only about speed and memory."""
    start, end = data.ctypes.data, data.ctypes.data + data.nbytes
    if outwards:
        start, end = start // _PAGE * _PAGE, -(-end // _PAGE) * _PAGE
    else:
        start, end = -(-start // _PAGE) * _PAGE, end // _PAGE * _PAGE
    if end <= start or os.name != "posix":
        return False
    status = _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), ctypes.c_int(advice))
    return bool(status == 0)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
