"""Prefill and decode tokens/s through the whole mesh, in llama-bench's terms.

    python benchmarks/decode.py MODEL.gguf [--stages N] [-p 512] [-n 128] [-d DEPTH] [-r 5]
    python benchmarks/decode.py --coordinator ADDRESS

pp512: a prompt of 512 random tokens, to its first generated token. tg128: 128 tokens generated one at a
time. `-d N`: with N tokens in the context before (pp at a depth is the time of N + 512 tokens less that of
N). Times are the client's, so gRPC and the coordinator count. Every repetition has a prompt of its own, so
no KV block is reused. Medians; the last line is one JSON object.

A mesh of its own also tells what a generated token costs each process in processor time (this client last),
and how many tokens came in one message.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from client.client import Client
from client.events import Delta, Finished
from client.local import LocalMesh
from client.mesh_state import Model, Plan, Status
from common.errors import NotReadyError, PipeLLMError


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        with _mesh(arguments) as (client, pids):
            print(json.dumps(run(client, pids, arguments)))
    except PipeLLMError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def run(client: Client, pids: Sequence[int], arguments: argparse.Namespace) -> dict[str, object]:
    """Measures what is asked for, prints a line each, and returns all of it. `pids` are the daemons', if they
    run here."""
    status = client.status()
    if status.model is None or status.plan is None:
        raise NotReadyError(f"the coordinator at {client.address} has no model loaded")
    draw = random.Random()  # another prompt at every run: a mesh that goes on running remembers the last
    vocab_size, depth, repetitions = status.model.vocab_size, arguments.depth, range(arguments.repetitions)

    def measure(prompt_tokens: int, count: int) -> Timing:
        return _generate(client, [draw.randrange(vocab_size) for _ in range(prompt_tokens)], count)

    measure(32, 8)  # warm: the first request pays for what is made at first use
    results = _describe(status, status.model, status.plan) | {"depth": depth}
    if arguments.prompt:
        test = f"pp{arguments.prompt}"
        before = statistics.median([measure(depth, 1).first_s for _ in repetitions]) if depth else 0.0
        times = [measure(depth + arguments.prompt, 1).first_s - before for _ in repetitions]
        if min(times) <= 0:
            raise NotReadyError(f"{test} at depth {depth}: the noise is larger than the time of the prompt")
        results[test] = _report(test, depth, [arguments.prompt / seconds for seconds in times])
    if arguments.generate:
        test = f"tg{arguments.generate}"
        before_s = _processor_times(pids)
        timings = [measure(max(1, depth), arguments.generate + 1) for _ in repetitions]
        spent_s = [after - before for before, after in zip(before_s, _processor_times(pids), strict=True)]
        rates = _report(test, depth, [timing.rest_tokens / timing.rest_s for timing in timings])
        results[test] = rates | _report_costs(timings, spent_s)
    return results


def _processor_times(pids: Sequence[int]) -> list[float]:
    """Seconds that the daemons, in this order, and this process have computed; nothing without daemons."""
    times = [psutil.Process(pid).cpu_times() for pid in (*pids, os.getpid())] if pids else []
    return [one.user + one.system for one in times]


@dataclass
class Timing:
    """Seconds from sending to the first token, and the tokens, messages and seconds after it."""

    first_s: float = 0.0
    messages: int = 0
    rest_tokens: int = 0
    rest_s: float = 0.0


def _generate(client: Client, ids: list[int], count: int) -> Timing:
    timing = Timing()
    sent_at = time.perf_counter()
    with client.generate(ids, max_tokens=count, temperature=0.0, ignore_eos=True, return_ids=True) as events:
        for event in events:
            if isinstance(event, Delta) and event.token_ids:
                passed_s = time.perf_counter() - sent_at
                if not timing.first_s:
                    timing.first_s = passed_s
                else:
                    timing.messages += 1
                    timing.rest_tokens += len(event.token_ids)
                    timing.rest_s = passed_s - timing.first_s
            elif isinstance(event, Finished) and (event.generated_tokens, event.cached_tokens) != (count, 0):
                raise NotReadyError(
                    f"asked for {count} tokens after a fresh prompt of {len(ids)}, got "
                    f"{event.generated_tokens} with {event.cached_tokens} cached (the context is "
                    f"{event.context_length}): not a measurement"
                )
    return timing


def _report(test: str, depth: int, rates: list[float]) -> dict[str, object]:
    median = statistics.median(rates)
    name = f"{test} @ d{depth}" if depth else test
    print(f"{name:>16}  {median:10.2f} tokens/s  (min {min(rates):.2f}, max {max(rates):.2f})", flush=True)
    return {"tokens_per_s": round(median, 3), "runs": [round(rate, 3) for rate in rates]}


def _report_costs(timings: Sequence[Timing], spent_s: Sequence[float]) -> dict[str, object]:
    """`spent_s` is the coordinator's, the stages' and this client's processor time, or nothing."""
    num_tokens = sum(timing.rest_tokens for timing in timings)
    num_messages = sum(timing.messages for timing in timings)
    costs = [round(1e6 * seconds / num_tokens) for seconds in spent_s]
    if costs:
        stages = ", ".join(map(str, costs[1:-1]))
        each = f"coordinator {costs[0]}, stages {stages}, client {costs[-1]}"
        print(f"{'':>16}  us of processor time a token: {each}", flush=True)
    per_message = round(num_tokens / max(1, num_messages), 2)
    return {"tokens_per_message": per_message, "processor_us_per_token": costs}


def _describe(status: Status, model: Model, plan: Plan) -> dict[str, object]:
    devices = {stage.stage_id: stage.device for stage in status.stages}
    windows = [
        {
            "layers": [window.layer_start, window.layer_end],
            "device": devices[window.stage_id].name,
            "backend": devices[window.stage_id].backend,
            "carrier": window.carrier,
        }
        for window in plan.windows
    ]
    return {
        "benchmark": "decode",
        "model": model.name,
        "quantization": model.quantization,
        "file_bytes": model.file_bytes,
        "windows": windows,
        "version": status.version,
    }


@contextmanager
def _mesh(arguments: argparse.Namespace) -> Iterator[tuple[Client, Sequence[int]]]:
    if arguments.coordinator:
        with Client(arguments.coordinator) as client:
            yield client, ()
        return
    length = arguments.depth + arguments.prompt + arguments.generate + 64
    with LocalMesh(
        arguments.model, stages=arguments.stages, threads=arguments.threads, context_length=length
    ) as mesh:
        yield mesh.client, mesh.pids


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Prefill and decode tokens/s through the whole mesh.")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("model", nargs="?", metavar="MODEL.gguf", help="run it in a mesh of its own")
    where.add_argument("--coordinator", metavar="ADDRESS", help="measure the mesh that runs there")
    parser.add_argument("--stages", type=int, metavar="N", help="CPU stages (default: one per GPU, else one)")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="threads of a CPU stage")
    parser.add_argument("-p", "--prompt", type=int, default=512, help="prompt tokens; 0: no prefill test")
    parser.add_argument("-n", "--generate", type=int, default=128, help="tokens; 0: no decode test")
    parser.add_argument("-d", "--depth", type=int, default=0, help="tokens in the context before")
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    return parser


if __name__ == "__main__":
    sys.exit(main())
