"""The folder of a mesh of its own: entered by this user only, and removed even when its owner was killed.

An owner that is killed cannot remove its folder, so the next one does: each owner holds a lock (flock) on a
file in its folder, which the kernel releases with the process, and a folder whose lock is free is a leftover.
Knows nothing of what is kept in the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

_PREFIX = "pipellm-"
_LOCK = "owner.lock"


class PrivateFolder:
    """A new folder at `path`, in the user's folder for temporary files. Creating it removes leftovers.

    A file named as `longest_name` in it has a path of at most `max_path_bytes`, if need be because the
    folder is in /tmp. Raises OSError when there can be no folder.
    """

    def __init__(self, longest_name: str, max_path_bytes: int) -> None:
        parent = tempfile.gettempdir()
        _remove_leftovers(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        if len(os.fsencode(self.path / longest_name)) > max_path_bytes:
            self.path.rmdir()
            _remove_leftovers("/tmp")
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))
        self._lock = _owner_lock(self.path)

    def remove(self) -> None:
        """Removes it with all it holds. To be called once."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _owner_lock(folder: Path) -> int:
    """The descriptor that holds the lock. The file gets its name when it is locked: no one finds it free."""
    unnamed = folder / f"{_LOCK}.new"
    lock = os.open(unnamed, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    unnamed.rename(folder / _LOCK)
    return lock


def _remove_leftovers(parent: str) -> None:
    """Folders of this user whose owner is gone. One without a lock file is being made, or is none of ours."""
    for folder in Path(parent).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # locked by a living owner, or gone in the meantime
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
