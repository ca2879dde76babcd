"""A mesh of its own on this machine: a coordinator and stages as child processes, for as long as it is used.

The daemons listen on unix sockets in a private folder, so that no port is taken and no one else gets in.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from client.client import Client
from client.mesh_state import LoadEvent, LoadProgress, Model, Plan
from client.private_folder import PrivateFolder
from client.processes import ChildProcess, stop_all
from common.errors import DeadlineError, PipeLLMError, UnknownModelError

START_TIMEOUT_S = 120.0
STOP_GRACE_S = 5.0
_POLL_S = 0.05
_MAX_SOCKET_PATH_BYTES = 107
_SPLIT = re.compile(r"-\d{5}-of-\d{5}$")


class LocalMesh:
    """`with LocalMesh("model.gguf", stages=2) as mesh: mesh.client.generate(...)`

    Stages: one per GPU, or `stages` of them on the CPU (one, where there is no GPU). `context_length` is
    what a sequence may hold (0: the coordinator's default), `threads` what each CPU stage uses (0: all cores,
    shared by those who compute at one time). `on_event` hears of the start: `LoadProgress`, the `Plan`, the
    loaded `Model`.

    Entering starts the daemons and loads the model; raises UnknownModelError when there is no such file,
    UnavailableError with a daemon's last words when one ends, DeadlineError when they do not get ready, and
    whatever `Client.load_model` raises. Leaving, for whatever reason, stops all of them. The thread that
    enters must outlive the mesh. Where the process is killed by a signal, its daemons die with it, and their
    folder is removed when the next mesh starts.
    """

    client: Client  # closed with the mesh
    plan: Plan
    model: Model

    def __init__(
        self,
        model: str | Path,
        *,
        stages: int | None = None,
        context_length: int = 0,
        threads: int = 0,
        on_event: Callable[[LoadEvent], None] = lambda event: None,
    ) -> None:
        self.model_path = Path(os.path.abspath(model))
        self.devices = ["cpu"] * stages if stages else _default_devices()
        self._context_length = context_length
        self._threads = threads
        self._on_event = on_event
        self._children: list[ChildProcess] = []
        self._folder: PrivateFolder | None = None

    @property
    def pids(self) -> list[int]:
        """The daemons' process ids: the coordinator's, then the stages'."""
        return [child.pid for child in self._children]

    def start(self) -> None:
        """What entering the context does; use `stop` afterwards in any case."""
        if not self.model_path.is_file():
            raise UnknownModelError(f"{self.model_path}: no such file")
        deadline = time.monotonic() + START_TIMEOUT_S
        self._on_event(LoadProgress("start", 0, 0))
        self._folder = PrivateFolder("coordinator.sock", _MAX_SOCKET_PATH_BYTES)
        self._spawn(self._folder.path)
        try:
            self._wait(lambda: self.client.is_running(timeout_s=1.0), deadline, "the coordinator to listen")
            self._wait(lambda: self._all_registered(deadline), deadline, "the stages to register")
            self._load()
        except PipeLLMError as error:
            for child in self._children:  # a daemon's own last words say more
                child.check()
            if type(error) is PipeLLMError:  # an internal fault, and the logs go away with the mesh
                raise PipeLLMError(f"{error}\n{self._last_lines()}") from error
            raise

    def stop(self) -> None:
        """Stops every daemon and removes the folder. May be called more than once."""
        try:
            if self._children:
                self.client.close()
            stop_all(self._children, STOP_GRACE_S)
        finally:
            self._children = []
            if self._folder:
                self._folder.remove()
                self._folder = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _spawn(self, folder: Path) -> None:
        address = f"unix:{folder}/coordinator.sock"
        self.client = Client(address)
        arguments = ["--listen", address, "--model-dir", str(_model_folder(folder, self.model_path))]
        self._add(folder, "coordinator", "coordinator", arguments)
        for index, device in enumerate(self.devices):
            arguments = ["--listen", f"unix:{folder}/stage-{index}.sock", "--coordinator", address]
            arguments += ["--stage-id", f"stage-{index}", "--device", device]
            if self._threads and device == "cpu":
                arguments += ["--threads", str(self._threads)]
            self._add(folder, f"stage-{index}", "stage", arguments)

    def _add(self, folder: Path, name: str, module: str, arguments: list[str]) -> None:
        self._children.append(ChildProcess(name, module, arguments, folder / f"{name}.log"))

    def _all_registered(self, deadline: float) -> bool:
        stages = self.client.status(timeout_s=max(1.0, deadline - time.monotonic())).stages
        return sum(stage.state != "lost" for stage in stages) == len(self.devices)

    def _load(self) -> None:
        name = _model_name(self.model_path)
        with self.client.load_model(name, context_length=self._context_length) as events:
            for event in events:
                if isinstance(event, Plan):
                    self.plan = event
                elif isinstance(event, Model):
                    self.model = event
                self._on_event(event)

    def _wait(self, condition: Callable[[], bool], deadline: float, what: str) -> None:
        while not condition():
            for child in self._children:
                child.check()
            if time.monotonic() > deadline:
                waited = f"waited {START_TIMEOUT_S:.0f} s in vain for {what}"
                raise DeadlineError(f"{waited}\n{self._last_lines()}")
            time.sleep(_POLL_S)

    def _last_lines(self) -> str:
        return "\n".join(f"{child.name}:\n{child.last_lines()}" for child in self._children)


def _model_name(path: Path) -> str:
    return _SPLIT.sub("", path.name.removesuffix(".gguf"))


def _model_folder(folder: Path, path: Path) -> Path:
    """A model directory that holds this model alone, as links: the user's folder may hold a great deal."""
    models = folder / "models"
    models.mkdir()
    parts = path.parent.glob("*.gguf") if _SPLIT.search(path.stem) else [path]
    for part in parts:
        if _model_name(part) == _model_name(path):
            (models / f"{part.name.removesuffix('.gguf')}.gguf").symlink_to(part)
    return models


def _default_devices() -> list[str]:
    return [f"cuda:{index}" for index in range(gpu_count())] or ["cpu"]


def gpu_count() -> int:
    """The NVIDIA GPUs this process may use: `CUDA_VISIBLE_DEVICES`, else the device files."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = sum(path.name.removeprefix("nvidia").isdigit() for path in Path("/dev").glob("nvidia*"))
    if visible is None or not present:
        return present
    names = [name.strip() for name in visible.split(",")]
    usable = names.index("-1") if "-1" in names else len(names)  # CUDA ignores what follows a bad one
    return sum(bool(name) for name in names[:usable])
