"""What the coordinator costs at the speed of a fast GPU: a real coordinator and client, and a stage that does
nothing but wait as long as a forward would take.

    python benchmarks/coordinator.py MODEL.gguf [--iteration-ms 0.5] [--sequences N] [--tokens N] [-r 3]

MODEL lends its tokenizer. The best rate that can come out is sequences / iteration time. The stage reports as
a real one does (`stage.epoch`). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from client.client import Client
from client.events import Delta
from common import rpc
from common.errors import NotReadyError
from common.gguf.reader import GGUFFile
from protos import coordinator_pb2, model_pb2, stage_pb2, stage_pb2_grpc
from stage.epoch import Responses
from stage.registration import Registration

_ROOT = Path(__file__).resolve().parent.parent
_NUM_LAYERS = 2
_START_TIMEOUT_S = 30.0


class WaitingStage(stage_pb2_grpc.StageServiceServicer):
    """Answers each step when its iterations would be done, with tokens from all over the vocabulary."""

    def __init__(self, model: Path, iteration_s: float) -> None:
        with GGUFFile.open(model) as file:
            self._fingerprint = file.fingerprint
            self._vocab_size = len(file.metadata["tokenizer.ggml.tokens"])
        self._iteration_s = iteration_s
        self.instance_id = uuid.uuid4().hex
        self.device = model_pb2.DeviceInfo(kind="cpu", name="none", backend="none")

    def Describe(self, request: Any, context: Any) -> stage_pb2.DescribeResponse:
        return stage_pb2.DescribeResponse(
            stage_id="waiting",
            instance_id=self.instance_id,
            protocol_version=rpc.PROTOCOL_VERSION,
            device=self.device,
        )

    def Profile(self, request: Any, context: Any) -> stage_pb2.ProfileResponse:
        return stage_pb2.ProfileResponse(
            fingerprint=self._fingerprint, num_layers=_NUM_LAYERS, context_length=8192, layer_decode_s=1e-4,
            embedding_s=1e-5, head_s=1e-4, layer_weight_bytes=[1 << 20] * _NUM_LAYERS,
            layer_kv_bytes_per_token=[1 << 10] * _NUM_LAYERS, memory_budget_bytes=1 << 33,
        )  # fmt: skip

    def Load(self, request: Any, context: Any) -> Iterator[stage_pb2.LoadResponse]:
        yield stage_pb2.LoadResponse(loaded=True)

    def Unload(self, request: Any, context: Any) -> stage_pb2.UnloadResponse:
        return stage_pb2.UnloadResponse()

    def Execute(self, requests: Iterator[Any], context: Any) -> Iterator[stage_pb2.ExecuteResponse]:
        steps: queue.SimpleQueue[stage_pb2.Step | None] = queue.SimpleQueue()
        responses = Responses()

        def read() -> None:
            try:
                for request in requests:
                    for step in request.steps:
                        steps.put(step)
            finally:
                steps.put(None)

        def work() -> None:
            while (step := steps.get()) is not None:
                if not step.items:
                    responses.put(stage_pb2.ExecuteResponse(acknowledged_steps=[step.step_id]))
                    continue
                time.sleep(step.repeat * self._iteration_s)
                for repeat in range(step.repeat):
                    responses.put(self._answer(step, repeat))

        for job in (read, work):
            threading.Thread(target=job, daemon=True).start()
        while context.is_active():
            response, _ = responses.take()
            if response is not None:
                yield response

    def _answer(self, step: stage_pb2.Step, repeat: int) -> stage_pb2.ExecuteResponse:
        result = stage_pb2.StepResult(step_id=step.step_id, repeat=repeat)
        for item in step.items:
            for sampled in item.sample_positions:
                position = sampled + repeat + 1
                token_id = (position * 7919 + item.sequence_id) % self._vocab_size
                result.tokens.add(sequence_id=item.sequence_id, position=position, token_id=token_id)
        acknowledged = [step.step_id] if repeat == step.repeat - 1 else []
        results = [result] if result.tokens else []
        return stage_pb2.ExecuteResponse(results=results, acknowledged_steps=acknowledged)


def serve(model: Path, iteration_s: float, address: str, coordinator: str) -> None:
    """The stage's process."""
    stage = WaitingStage(model, iteration_s)
    server, _ = rpc.make_server("pipellm.v1.StageService", 16)
    stage_pb2_grpc.add_StageServiceServicer_to_server(stage, server)
    registration = coordinator_pb2.RegisterStageRequest(
        stage_id="waiting", address=rpc.listen(server, address), protocol_version=rpc.PROTOCOL_VERSION,
        device=stage.device, instance_id=stage.instance_id,
    )  # fmt: skip
    server.start()
    Registration(coordinator, registration, lambda: None, lambda error: None)
    server.wait_for_termination()


@contextmanager
def mesh(arguments: argparse.Namespace) -> Iterator[tuple[Client, int]]:
    """A client of a coordinator that serves through the waiting stage, and the coordinator's process id."""
    model = arguments.model.resolve()
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/coordinator.sock"
        command = [
            sys.executable, "-m", "coordinator", "--listen", address, "--model-dir", str(model.parent),
            "--model", model.stem, "--max-sequences", str(arguments.sequences),
            "--repeat", str(arguments.repeat), "--run-ahead", str(arguments.run_ahead),
        ]  # fmt: skip
        stage = multiprocessing.get_context("spawn").Process(
            target=serve,
            args=(model, arguments.iteration_ms / 1e3, f"unix:{folder}/stage.sock", address),
            daemon=True,
        )
        with subprocess.Popen(command, cwd=_ROOT, stderr=subprocess.DEVNULL) as coordinator:
            stage.start()
            try:
                with Client(address) as client:
                    _wait_ready(client, coordinator)
                    yield client, coordinator.pid
            finally:
                stage.terminate()
                coordinator.terminate()


def _wait_ready(client: Client, coordinator: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not client.is_ready():
        if time.monotonic() > deadline or coordinator.poll() is not None:
            raise NotReadyError("the coordinator does not get ready")
        time.sleep(0.05)


def _generate(client: Client, number: int, num_tokens: int, times: list[tuple[float, int]]) -> None:
    """One request; notes when each message came and with how many tokens."""
    prompt = [1 + number % 100] * 16
    with client.generate(prompt, max_tokens=num_tokens, ignore_eos=True, return_ids=True) as events:
        times += [(time.perf_counter(), len(one.token_ids)) for one in events if isinstance(one, Delta)]


def measure(client: Client, pid: int, sequences: int, num_tokens: int) -> dict[str, float]:
    """All sequences at once, to the end of the last."""
    coordinator, here = psutil.Process(pid), psutil.Process()
    before = [sum(process.cpu_times()[:2]) for process in (coordinator, here)]
    began = time.perf_counter()
    times: list[list[tuple[float, int]]] = [[] for _ in range(sequences)]
    threads = [
        threading.Thread(target=_generate, args=(client, number, num_tokens, each))
        for number, each in enumerate(times)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took_s = time.perf_counter() - began
    spent = [sum(process.cpu_times()[:2]) for process in (coordinator, here)]
    total = sum(count for each in times for _, count in each)
    messages = sum(map(len, times))
    return {
        "tokens_per_s": total / took_s,
        "first_token_ms": 1e3 * statistics.median(each[0][0] - began for each in times),
        "tokens_per_message": total / messages,
        "coordinator_us_per_token": 1e6 * (spent[0] - before[0]) / total,
        "client_us_per_token": 1e6 * (spent[1] - before[1]) / total,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--iteration-ms", type=float, default=0.5, help="time of a forward of the stage")
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1000, help="of each answer")
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=0, help="the coordinator's setting")
    parser.add_argument("--run-ahead", type=int, default=0, help="the coordinator's setting")
    arguments = parser.parse_args()
    with mesh(arguments) as (client, pid):
        measure(client, pid, 1, 32)  # warm
        runs = [
            measure(client, pid, arguments.sequences, arguments.tokens) for _ in range(arguments.repetitions)
        ]
    medians = {name: round(statistics.median(run[name] for run in runs), 2) for name in runs[0]}
    for name, value in medians.items():
        print(f"{name:>26}  {value:10.2f}")
    settings = {name: value for name, value in vars(arguments).items() if name != "model"}
    print(json.dumps({"benchmark": "coordinator", **settings, **medians}))


if __name__ == "__main__":
    main()
