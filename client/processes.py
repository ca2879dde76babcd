"""Child daemons of this process: started apart from the terminal, watched, and stopped without exception.

A child runs in a session of its own, so that Ctrl-C reaches this process only, and is killed by the kernel
when this process dies in whatever way (Linux). Its stderr goes to a file whose last lines errors quote.
Knows nothing of what the daemons do.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from common.errors import UnavailableError

# Packages are found from here, whether installed or not, and not in whatever folder the user stands in.
_ROOT = Path(__file__).resolve().parent.parent
_QUOTED_LINES = 8
# Runs in the child before the daemon, because Popen's preexec_fn is not safe beside gRPC's threads:
# asks for SIGKILL at the parent's death (prctl option 1), and leaves if the parent is gone already.
_LAUNCH = """
import os, signal, sys
parent, command = int(sys.argv[1]), sys.argv[2:]
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == parent:
    os.execv(command[0], command)
"""


class ChildProcess:
    """`python -m MODULE ARGUMENTS` as a child. It dies with the thread that starts it at the latest."""

    def __init__(self, name: str, module: str, arguments: Sequence[str], log: Path) -> None:
        self.name = name
        self.log = log
        command = [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid())]
        command += [sys.executable, "-m", module, *arguments]
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                cwd=_ROOT,
                env=_environment(),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raises UnavailableError, with the last log lines, when the process has ended."""
        code = self._process.poll()
        if code is None:
            return
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        raise UnavailableError(f"the {self.name} {how}:\n{self.last_lines()}")

    def last_lines(self) -> str:
        """The end of its log, indented, for error messages."""
        with contextlib.suppress(OSError):
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
            if lines:
                return "\n".join(f"  {_readable(line)}" for line in lines[-_QUOTED_LINES:])
        return "  (it logged nothing)"

    def terminate(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()

    def wait(self, timeout_s: float) -> bool:
        """Whether the process ended within the time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self._process.returncode is not None

    def kill(self) -> None:
        """SIGKILL to the process and all of its own children."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()


def stop_all(children: Iterable[ChildProcess], grace_s: float) -> None:
    """SIGTERM to all, then SIGKILL to those that are still there after `grace_s`; none is left running."""
    children = list(children)
    try:
        for child in children:
            child.terminate()
        deadline = time.monotonic() + grace_s
        for child in children:
            child.wait(max(0.0, deadline - time.monotonic()))
    finally:  # an impatient second Ctrl-C kills at once
        for child in children:
            child.kill()


def _environment() -> dict[str, str]:
    """This process's environment without the settings in it, which are meant for daemons started by hand."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIPELLM_")}
    if "PIPELLM_CACHE" in os.environ:
        kept["PIPELLM_CACHE"] = os.environ["PIPELLM_CACHE"]
    return kept


def _readable(line: str) -> str:
    """A JSON log line as `event key=value ...`; other lines as they are."""
    try:
        fields = json.loads(line)
    except ValueError:
        return line
    if not isinstance(fields, dict) or "event" not in fields:
        return line
    event = fields.pop("event")
    for name in ("timestamp", "level"):
        fields.pop(name, None)
    trace = str(fields.pop("exception", ""))
    text = " ".join([str(event), *(f"{name}={value}" for name, value in fields.items())])
    return f"{text}\n{trace}" if trace else text
