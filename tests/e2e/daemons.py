"""Real daemon processes for end-to-end tests: a coordinator and stages on unix sockets in a test's folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from client import Client
from tests.conftest import ROOT

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0


class Daemon:
    def __init__(self, module: str, arguments: list[str], log: Path) -> None:
        self.log = log
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments], cwd=ROOT, env=environment,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(STOP_TIMEOUT_S)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        try:
            return self.wait()
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"{self.log.name} did not stop:\n{self.log.read_text()}") from None


class Mesh:
    """A coordinator that serves `model`, and its stages."""

    def __init__(
        self, folder: Path, model: Path, stages: int, *coordinator_flags: str, carrier: str = "auto",
        stage_flags: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self._carrier = carrier
        self._stage_flags = stage_flags
        self.folder = folder
        self.address = f"unix:{folder}/c.sock"
        self.client = Client(self.address)
        self._flags = ["--model-dir", str(model.parent), "--model", model.stem, *coordinator_flags]
        self._num_stages = stages
        self.stages: dict[str, Daemon] = {}

    def start_coordinator(self) -> Daemon:
        arguments = ["--listen", self.address, "--min-stages", str(self._num_stages), *self._flags]
        self.coordinator = Daemon("coordinator", arguments, self.folder / "coordinator.log")
        return self.coordinator

    def start_stage(self, name: str, *flags: str) -> Daemon:
        arguments = ["--listen", f"unix:{self.folder}/{name}.sock", "--coordinator", self.address]
        arguments += ["--stage-id", name, "--backend", "reference", "--threads", "1"]
        arguments += ["--carrier", self._carrier, *self._stage_flags, *flags]
        self.stages[name] = Daemon("stage", arguments, self.folder / f"{name}.log")
        return self.stages[name]

    def __enter__(self) -> Self:
        self.start_coordinator()
        for index in range(self._num_stages):
            self.start_stage(f"s{index}")
        try:
            self.wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        daemons = [*self.stages.values(), self.coordinator]
        for daemon in daemons:
            if daemon.process.poll() is None:
                daemon.process.kill()
        for daemon in daemons:
            daemon.process.wait()

    def wait_ready(self) -> None:
        self.wait(lambda: self.client.status(timeout_s=5).state == "ready", "the mesh to serve")

    def wait(self, condition: Callable[[], bool], what: str, timeout_s: float = START_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if condition():
                    return
            except Exception as error:
                last: object = error
            else:
                last = "not yet"
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text()[-3000:] for path in sorted(self.folder.glob("*.log")))
                raise AssertionError(f"waited in vain for {what} ({last}); logs:\n{logs}")
            time.sleep(0.05)
