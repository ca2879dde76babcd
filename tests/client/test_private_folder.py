"""The private folder: living owners keep theirs, and what a killed one leaves is removed by the next."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from client.private_folder import PrivateFolder

OWNER = """
import time
from client.private_folder import PrivateFolder
print(PrivateFolder("a.sock", 107).path, flush=True)
time.sleep(60)
"""


@pytest.fixture
def tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def make() -> PrivateFolder:
    return PrivateFolder("a.sock", 1000)


def test_only_the_folders_of_dead_owners_are_removed(tmp: Path) -> None:
    owners = [
        subprocess.Popen(
            [sys.executable, "-c", OWNER],
            env=os.environ | {"TMPDIR": str(tmp)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        paths = []
        for owner in owners:
            assert owner.stdout
            paths.append(Path(owner.stdout.readline().strip()))
        mine = make()
        assert all(path.is_dir() for path in (*paths, mine.path))
        (paths[0] / "models").mkdir()
        (paths[0] / "models" / "link").symlink_to(tmp)
        owners[0].kill()
        owners[0].wait()
        another = make()
        assert [path.is_dir() for path in (*paths, mine.path, another.path)] == [False, True, True, True]
        assert another.path.stat().st_mode & 0o077 == 0
        for folder in (mine, another):
            folder.remove()
        assert [*tmp.iterdir()] == [paths[1]]
    finally:
        for owner in owners:
            owner.kill()
            owner.communicate()


def test_what_is_not_a_leftover_is_left_alone(tmp: Path) -> None:
    (tmp / "pipellm-notes").mkdir()  # no lock: someone else's
    (tmp / "pipellm-file").write_text("x")
    elsewhere = tmp / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "owner.lock").touch()
    (tmp / "pipellm-link").symlink_to(elsewhere)
    make().remove()
    assert sorted(path.name for path in tmp.iterdir()) == [
        "elsewhere", "pipellm-file", "pipellm-link", "pipellm-notes",
    ]  # fmt: skip
    assert (elsewhere / "owner.lock").exists()


def test_a_path_too_long_for_a_socket_moves_to_tmp(tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    folder = PrivateFolder("coordinator.sock", 107)
    try:
        assert folder.path.parent == Path("/tmp") and list(long.iterdir()) == []
    finally:
        folder.remove()
    assert not folder.path.exists()
