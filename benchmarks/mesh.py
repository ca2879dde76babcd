"""A mesh of real daemons for measurements: a coordinator and a stage per device, on sockets of its own.

Like client.local.LocalMesh, with the settings that a measurement turns: devices, carrier, sequences at once.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from client.client import Client
from client.events import Delta
from client.mesh_state import Plan
from client.processes import ChildProcess, stop_all
from common.errors import DeadlineError

START_TIMEOUT_S = 120.0


class Mesh:
    """`with Mesh(model, ["cuda:0", "cuda:1"], context_length=4352) as mesh: mesh.client.generate(...)`"""

    client: Client
    plan: Plan

    def __init__(
        self,
        model: Path,
        devices: Sequence[str],
        *,
        context_length: int,
        carrier: str = "auto",
        max_sequences: int = 64,
        threads: int = 1,
    ) -> None:
        self._model, self._devices, self._context_length = model, devices, context_length
        self._carrier, self._threads, self._max_sequences = carrier, threads, max_sequences
        self._children: list[ChildProcess] = []
        self.load_s = 0.0

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="pipellm-mesh-")
        try:
            self._start(Path(self._folder.name))
        except BaseException as error:
            self.__exit__(type(error), error)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if error is not None:  # the logs go with the folder
            for child in self._children:
                print(f"{child.name}:\n{child.last_lines()}", file=sys.stderr)
        self.client.close()
        stop_all(self._children, 5.0)
        self._folder.cleanup()

    def _start(self, folder: Path) -> None:
        models = folder / "models"
        models.mkdir()
        (models / self._model.name).symlink_to(self._model.resolve())
        address = f"unix:{folder}/c.sock"
        self.client = Client(address)
        flags = ["--listen", address, "--model-dir", str(models)]
        flags += ["--max-sequences", str(self._max_sequences)]
        self._add("coordinator", flags, folder / "coordinator.log")
        for index, device in enumerate(self._devices):
            flags = ["--listen", f"unix:{folder}/s{index}.sock", "--coordinator", address]
            flags += ["--stage-id", f"s{index}", "--device", device, "--carrier", self._carrier]
            if device == "cpu":
                flags += ["--threads", str(self._threads)]
            self._add("stage", flags, folder / f"s{index}.log")
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._registered():
            for child in self._children:
                child.check()
            if time.monotonic() > deadline:
                raise DeadlineError("the stages did not register")
            time.sleep(0.05)
        started = time.monotonic()
        with self.client.load_model(self._model.stem, context_length=self._context_length) as events:
            for event in events:
                if isinstance(event, Plan):
                    self.plan = event
        self.load_s = time.monotonic() - started

    def _add(self, module: str, flags: list[str], log: Path) -> None:
        self._children.append(ChildProcess(log.stem, module, flags, log))

    def _registered(self) -> bool:
        if not self.client.is_running(timeout_s=1.0):
            return False
        return len(self.client.status(timeout_s=5.0).stages) == len(self._devices)

    def links(self) -> list[dict[str, object]]:
        """What the stages' logs say of their links: the carrier, and the round trip of its self-test."""
        lines = [json.loads(line) for line in self._log_lines() if '"link_attached"' in line]
        return [{name: line[name] for name in ("stage_id", "carrier", "round_trip_us")} for line in lines]

    def warnings(self) -> list[str]:
        """Of the daemons' logs: links that fell back, telemetry that is missing, what was not as meant."""
        return [line for line in self._log_lines() if re.search(r'"level": ?"(warning|error)"', line)]

    def _log_lines(self) -> list[str]:
        return [line for child in self._children for line in child.log.read_text().splitlines()]


@dataclass
class Stream:
    """One request's tokens as they came: ids, and how many were there at what time."""

    sent: float = field(default_factory=time.perf_counter)
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    def count(self, start: float, end: float) -> int:
        return sum(tokens for at, tokens in self.arrivals if start < at <= end)

    def tokens_per_s(self) -> float:
        """After the first message; of everything where there was one message alone."""
        last = self.arrivals[-1][0]
        start = self.arrivals[0][0] if len(self.arrivals) > 1 else self.sent
        return self.count(start, last) / (last - start)


def generate(client: Client, prompt: Sequence[int], count: int) -> Stream:
    """`count` greedy tokens."""
    stream = Stream()
    with client.generate(
        prompt, max_tokens=count, temperature=0.0, ignore_eos=True, return_ids=True, timeout_s=300
    ) as events:
        for event in events:
            if isinstance(event, Delta) and event.token_ids:
                stream.token_ids += event.token_ids
                stream.arrivals.append((time.perf_counter(), len(event.token_ids)))
    if len(stream.token_ids) != count:
        raise RuntimeError(f"asked for {count} tokens, got {len(stream.token_ids)}")
    return stream


@dataclass(frozen=True)
class Throughput:
    """While all streams generate: tokens a second in all, and each stage's share of time spent computing."""

    tokens_per_s: float
    busy: dict[str, float]


def run_streams(client: Client, prompts: Sequence[Sequence[int]], count: int) -> Throughput:
    """All prompts at once, `count` tokens each; counted from the last stream's first token to the first one's
    last."""
    streams: list[Stream] = [Stream() for _ in prompts]
    errors: list[BaseException] = []

    def one(index: int) -> None:
        try:
            streams[index] = generate(client, prompts[index], count)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(prompts))]
    client.status()  # the busy shares count from here
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    status = client.status()
    start = max(stream.arrivals[0][0] for stream in streams)
    end = min(stream.arrivals[-1][0] for stream in streams)
    first = min(stream.sent for stream in streams)
    last = max(stream.arrivals[-1][0] for stream in streams)
    if end - start < 0.2 * (last - first):  # hardly a time in which all ran at once
        start, end = first, last
    tokens = sum(stream.count(start, end) for stream in streams)
    busy = {stage.stage_id: round(stage.busy_fraction, 3) for stage in status.stages}
    return Throughput(tokens / (end - start), busy)
