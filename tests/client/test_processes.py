"""Child daemons are watched, and none is left running, whatever happens."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from client.local import gpu_count
from client.processes import ChildProcess, stop_all
from common.errors import UnavailableError

STUBBORN = "tests.client.stubborn_daemon"


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_child_that_ended_is_named_with_its_last_words(tmp_path: Path) -> None:
    child = ChildProcess("coordinator", "coordinator", ["--colour", "red"], tmp_path / "log")
    assert child.wait(60.0)
    with pytest.raises(UnavailableError, match=r"the coordinator ended with status 2:\n(.*\n)*.*--colour"):
        child.check()


def test_a_child_that_was_killed_is_named_with_the_signal(tmp_path: Path) -> None:
    child = ChildProcess("stage-0", STUBBORN, [str(tmp_path / "pids")], tmp_path / "log")
    try:
        child.check()
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait(10.0)
        with pytest.raises(UnavailableError, match=r"was killed by SIGKILL:\n  \(it logged nothing\)"):
            child.check()
    finally:
        stop_all([child], 0.0)


def test_what_ignores_sigterm_is_killed_with_its_own_children(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    children = [ChildProcess(file.name, STUBBORN, [str(file)], tmp_path / "log") for file in files]
    try:
        assert until(lambda: all(file.exists() for file in files))
        pids = [int(pid) for file in files for pid in file.read_text().split()]
        assert all(map(running, pids)) and len(pids) == 4
        assert os.getsid(pids[0]) != os.getsid(0)  # Ctrl-C on the terminal does not reach it
    finally:
        started_at = time.monotonic()
        stop_all(children, 0.5)
    assert time.monotonic() - started_at < 5.0  # one grace period for all
    assert until(lambda: not any(map(running, pids)))
    stop_all(children, 0.5)  # once more does no harm


def test_children_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from client.processes import ChildProcess\n"
        "ChildProcess('x', sys.argv[1], [sys.argv[2]], Path(sys.argv[3])); time.sleep(60)\n"
    )
    pids_file = tmp_path / "pids"
    parent = subprocess.Popen([sys.executable, "-c", script, STUBBORN, str(pids_file), str(tmp_path / "log")])
    grandchild = 0
    try:
        assert until(pids_file.exists)
        child, grandchild = map(int, pids_file.read_text().split())
        parent.kill()
        assert until(lambda: not running(child))
    finally:
        parent.kill()
        parent.wait()
        if grandchild:
            os.kill(grandchild, signal.SIGKILL)


def test_daemons_do_not_take_their_settings_from_this_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELLM_CONFIG", str(tmp_path / "missing.toml"))
    child = ChildProcess("coordinator", "coordinator", ["--listen", "nowhere"], tmp_path / "log")
    assert child.wait(60.0)
    with pytest.raises(UnavailableError, match="nowhere"):
        child.check()
    assert "missing.toml" not in child.last_lines()


def test_json_log_lines_are_quoted_readably(tmp_path: Path) -> None:
    child = ChildProcess("coordinator", "coordinator", ["--help"], tmp_path / "log")
    assert child.wait(60.0)
    child.log.write_text('{"event": "load_failed", "level": "error", "stage_id": "s"}\nplain\n')
    assert child.last_lines() == "  load_failed stage_id=s\n  plain"


@pytest.mark.parametrize(
    ("visible", "count"), [("", 0), ("0", 1), ("0,2", 2), ("1,-1,2", 1), ("GPU-aa, GPU-bb", 2)]
)
def test_visible_gpus_are_counted_where_there_are_any(
    monkeypatch: pytest.MonkeyPatch, visible: str, count: int
) -> None:
    present = any(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia*"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_count() == (count if present else 0)
