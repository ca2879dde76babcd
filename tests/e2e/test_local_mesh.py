"""A mesh of its own: it answers, and nothing of it is left running, however it ends."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from client import LocalMesh, public_models
from client.events import Delta, Finished
from client.mesh_state import LoadProgress, Model, Plan
from common.errors import CorruptDataError, UnavailableError, UnknownModelError
from tests.conftest import ROOT
from tests.gguf_files import write_tiny_llama

NOWHERE = {"PIPELLM_COORDINATOR": "unix:/nonexistent/socket"}


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def folders(tmp: Path) -> list[str]:
    return [path.name for path in tmp.glob("pipellm-*")]


def start(tmp: Path, *argv: str) -> subprocess.Popen[bytes]:
    """A program with its temporary files in `tmp` and no coordinator in sight."""
    env = os.environ | NOWHERE | {"TMPDIR": str(tmp)}
    return subprocess.Popen(
        [sys.executable, *argv], cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, bufsize=0,
    )  # fmt: skip


@pytest.fixture
def tmp() -> Iterator[Path]:
    """A folder for temporary files with a short path: pytest's own can be too long for a socket's."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder)


def test_it_tells_of_its_start_answers_and_is_gone(
    tmp: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp))
    monkeypatch.setenv("PIPELLM_LISTEN", "127.0.0.1:1")  # for daemons started by hand, not for these
    events: list[object] = []
    nameless = tmp / "sha256-abc"  # as some model stores name their files
    nameless.symlink_to(tiny_model)
    with LocalMesh(nameless, stages=2, context_length=128, threads=1, on_event=events.append) as mesh:
        pids = mesh.pids
        assert len(alive(pids)) == 3
        answer = list(mesh.client.generate("once", max_tokens=5, temperature=0.0, ignore_eos=True))
        assert isinstance(answer[-1], Finished) and answer[-1].generated_tokens == 5
        assert answer[-1].context_length == 128 and mesh.model.name == "sha256-abc"
        assert len(mesh.plan.windows) == 2 and mesh.plan.windows[0].layer_start == 0
        assert os.stat(tmp / folders(tmp)[0]).st_mode & 0o077 == 0  # no one else gets at its sockets
    assert alive(pids) == [] and folders(tmp) == []
    phases = [event.phase for event in events if isinstance(event, LoadProgress)]
    assert list(dict.fromkeys(phases)) == ["start", "measure", "load", "link", "check"]
    assert sum(isinstance(event, Plan) for event in events) == 1 and isinstance(events[-1], Model)
    mesh.stop()  # once more does no harm


def test_a_split_model_is_found_whole(tmp_path: Path) -> None:
    parts = write_tiny_llama(tmp_path / "split.gguf", layers=2, max_tensors_per_file=8)
    assert "-00001-of-" in parts.name
    with LocalMesh(parts, stages=1, threads=1) as mesh:
        assert mesh.model.name == "split"


def test_what_cannot_start_says_why_and_leaves_nothing(tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp))
    with pytest.raises(UnknownModelError, match=r"missing.gguf: no such file"):
        LocalMesh(tmp / "missing.gguf", stages=1).start()
    picture = tmp / "picture.gguf"
    picture.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    mesh = LocalMesh(picture, stages=1, threads=1)
    with pytest.raises(CorruptDataError, match=r"picture.gguf.*PNG"), mesh:
        pass
    assert mesh.pids == [] and folders(tmp) == []


def test_a_stage_that_dies_ends_the_answer_with_a_reason(tiny_model: Path) -> None:
    with LocalMesh(tiny_model, stages=2, threads=1) as mesh:
        with pytest.raises(UnavailableError, match="stage-1"):
            for event in mesh.client.generate("once", ignore_eos=True, temperature=0.0):
                if isinstance(event, Delta):
                    os.kill(mesh.pids[2], signal.SIGKILL)
        assert until(lambda: len(alive(mesh.pids)) == 2, 10)


def test_a_chat_without_a_coordinator_starts_a_mesh_and_stops_it(tmp: Path, tiny_model: Path) -> None:
    argv = ["-m", "client.cli", "chat", str(tiny_model), "--stages", "2", "--threads", "1"]
    chat = start(tmp, *argv, "--max-tokens", "5", "--ignore-eos")
    stdout, stderr = chat.communicate(b"who is it\n", timeout=120)
    assert (chat.returncode, stderr) == (0, b"") and stdout.strip()
    assert folders(tmp) == []


@pytest.mark.parametrize(
    ("number", "code", "loading"),
    [
        (signal.SIGINT, 130, True),
        (signal.SIGTERM, 143, True),
        (signal.SIGHUP, 129, True),
        (signal.SIGKILL, -signal.SIGKILL, True),
        (signal.SIGINT, 130, False),
        (signal.SIGKILL, -signal.SIGKILL, False),
    ],
)
def test_however_it_is_ended_nothing_is_left(
    tmp: Path, tiny_model: Path, number: signal.Signals, code: int, loading: bool
) -> None:
    argv = ["-m", "client.cli", "chat", str(tiny_model), "--stages", "2", "--threads", "1", "--ignore-eos"]
    chat = start(tmp, *argv)
    try:
        assert chat.stdin and chat.stdout
        with chat.stdin as stdin:
            stdin.write(b"who is it\n")
        assert until(lambda: len(psutil.Process(chat.pid).children()) == 3)
        daemons = [child.pid for child in psutil.Process(chat.pid).children(recursive=True)]
        if not loading:
            assert os.read(chat.stdout.fileno(), 1)
            daemons = [child.pid for child in psutil.Process(chat.pid).children(recursive=True)]
        chat.send_signal(number)
        assert chat.wait(30) == code
    finally:
        chat.kill()
        chat.wait()
    assert until(lambda: alive(daemons) == [], 10)
    assert number == signal.SIGKILL or folders(tmp) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_next_mesh_removes_what_a_killed_program_left(
    tmp: Path, tiny_model: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        "import sys, time; from client import LocalMesh\n"
        "with LocalMesh(sys.argv[1], stages=1, threads=1) as mesh:\n"
        "    print(*mesh.pids, flush=True); time.sleep(60)\n"
    )
    program = start(tmp, "-c", script, str(tiny_model))
    try:
        assert program.stdout
        pids = [int(pid) for pid in program.stdout.readline().split()]
        left = folders(tmp)
        assert len(pids) == 2 and len(left) == 1
        program.send_signal(number)
        assert program.wait(30) == -number
    finally:
        program.kill()
        program.communicate()
    assert until(lambda: alive(pids) == [], 10) and folders(tmp) == left
    monkeypatch.setattr("tempfile.tempdir", str(tmp))
    with LocalMesh(tiny_model, stages=1, threads=1):
        assert len(folders(tmp)) == 1 and folders(tmp) != left
    assert folders(tmp) == []


@pytest.mark.slow
def test_the_demo_shows_plan_answer_and_speed(tmp: Path) -> None:
    if not public_models.find("smollm2"):
        pytest.skip("the demo's model has not been fetched (make model)")
    demo = start(tmp, "-m", "client.demo")
    stdout, stderr = demo.communicate(timeout=240)
    assert (demo.returncode, stderr) == (0, b"")
    text = stdout.decode()
    assert "stage-0: layers 0 to " in text and "to 29, head" in text
    assert "time to first token" in text and "tokens/s" in text and "stopped" in text
    assert "light" in text  # why the sky is blue
    assert folders(tmp) == []


@pytest.mark.slow
def test_ctrl_c_ends_the_demo_whole(tmp: Path) -> None:
    if not public_models.find("smollm2"):
        pytest.skip("the demo's model has not been fetched (make model)")
    demo = start(tmp, "-m", "client.demo")
    try:
        assert until(lambda: len(psutil.Process(demo.pid).children()) == 3)
        daemons = [child.pid for child in psutil.Process(demo.pid).children(recursive=True)]
        demo.send_signal(signal.SIGINT)
        assert demo.wait(30) == 130
    finally:
        demo.kill()
        demo.communicate()
    assert alive(daemons) == [] and folders(tmp) == []
