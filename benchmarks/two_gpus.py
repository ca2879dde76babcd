"""The pipeline on a machine with two GPUs, through real daemons: one command, under 8 minutes, JSON at last.

    python benchmarks/two_gpus.py [--models llama-8b:q4_k_m qwen-32b:q4_k_m] [--llama-bench PATH]
    python benchmarks/two_gpus.py --devices cuda:0,cuda:0          # a rehearsal on one GPU
    python benchmarks/two_gpus.py --devices cpu,cpu --models SMALL.gguf --prompt 256 --streams 2,4

For each model: greedy text of two stages against one's, bit for bit; tokens a second of one stream; what a
hop takes by link carrier; many streams with each GPU's busy share; a long prompt in chunks; llama.cpp beside
it with -sm layer. For the first model also: the plan while another process takes turns on the second GPU. A
part that the time does not allow any more is left out, and said to be.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.mesh import Mesh, generate, run_streams
from common.gguf.reader import GGUFFile

ROOT = Path(__file__).resolve().parent.parent
GOAL_STREAMS, GOAL_PREFILL = 1.7, 1.7  # two GPUs over one
TEXTS, TEXT_TOKENS, STREAM_PROMPT = 3, 48, 128

Result = dict[str, Any]

# Keeps a device busy until it is ended; CUDA lets processes take turns on a GPU, so others get about half.
BURNER = """
import sys
device = sys.argv[1]
if device == "cpu":
    while True:
        sum(range(1000000))
import torch
a = torch.randn(8192, 8192, device=device, dtype=torch.float16)
while True:
    for _ in range(20):
        a @ a
    torch.cuda.synchronize()
"""


class Budget:
    """What is left of the time; parts that do not fit are skipped."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.skipped: list[str] = []

    def allows(self, what: str, needed_s: float) -> bool:
        if time.monotonic() + needed_s <= self._end:
            return True
        self.skipped.append(what)
        say(f"left out, no time: {what}")
        return False


def say(text: str) -> None:
    print(text, flush=True)


class Measurement:
    """One model on one and on two devices."""

    def __init__(self, path: Path, args: argparse.Namespace) -> None:
        self._path, self._args = path, args
        with GGUFFile.open(path) as file:
            architecture = file.require("general.architecture", str)
            self._vocabulary = next(
                tensor.shape[-1] for name, tensor in file.tensors.items() if name == "token_embd.weight"
            )
            limit = file.require(f"{architecture}.context_length", int)
        self._context = min(limit, args.prompt + 256)

    def mesh(self, devices: Sequence[str], carrier: str = "auto") -> Mesh:
        return Mesh(
            self._path, devices, context_length=self._context, carrier=carrier,
            max_sequences=max(self._args.streams), threads=self._args.threads,
        )  # fmt: skip

    def prompt(self, length: int, seed: int) -> list[int]:
        draw = random.Random(seed)
        return [draw.randrange(self._vocabulary) for _ in range(min(length, self._context - 160))]

    def basics(self, mesh: Mesh) -> Result:
        """Texts, the plan, one stream."""
        texts = [
            generate(mesh.client, self.prompt(40 + 7 * i, i), TEXT_TOKENS).token_ids for i in range(TEXTS)
        ]
        rates = [self.one_stream(mesh, 100 + i) for i in range(3)]
        windows = [
            {"stage": w.stage_id, "layers": [w.layer_start, w.layer_end], "predicted_ms": w.predicted_s * 1e3,
             "carrier": w.carrier}
            for w in mesh.plan.windows
        ]  # fmt: skip
        result = {
            "texts": texts,
            "load_s": mesh.load_s,
            "plan": windows,
            "predicted_ms_a_token": sum(window.predicted_s for window in mesh.plan.windows) * 1e3,
            "links": mesh.links(),
            "tg": statistics.median(rates),
        }
        return result | {"ms_a_token": 1e3 / result["tg"]}  # type: ignore[operator]

    def one_stream(self, mesh: Mesh, seed: int) -> float:
        """Tokens a second after the first."""
        stream = generate(mesh.client, self.prompt(STREAM_PROMPT, seed), self._args.tokens)
        return stream.tokens_per_s()

    def everything(self, devices: Sequence[str], budget: Budget) -> Result:
        with self.mesh(devices) as mesh:
            result = self.basics(mesh)
            say(f"  {','.join(devices)}: {result['tg']:.1f} tokens/s, one stream")
            result["streams"] = {}
            for count in self._args.streams:
                if not budget.allows(f"{count} streams on {len(devices)} devices", 12):
                    continue
                prompts = [self.prompt(STREAM_PROMPT, 1000 * count + i) for i in range(count)]
                found = run_streams(mesh.client, prompts, self._args.tokens)
                result["streams"][count] = {"tokens_per_s": found.tokens_per_s, "busy": found.busy}
                say(f"    {count} streams: {found.tokens_per_s:.1f} tokens/s, busy {found.busy}")
            times = [self._first_token_s(mesh, 5000 + i) for i in range(3)]
            length = len(self.prompt(self._args.prompt, 0))
            result["prefill"] = {"tokens": length, "tokens_per_s": length / statistics.median(times)}
            say(f"    prefill of {length}: {result['prefill']['tokens_per_s']:.0f} tokens/s")
            stages = mesh.client.status().stages
            result["telemetry"] = {
                stage.stage_id: str(stage.telemetry) for stage in stages if stage.telemetry is not None
            }
            result["warnings"] = mesh.warnings()
        return result

    def _first_token_s(self, mesh: Mesh, seed: int) -> float:
        stream = generate(mesh.client, self.prompt(self._args.prompt, seed), 1)
        return stream.arrivals[0][0] - stream.sent

    def run(self, devices: Sequence[str], budget: Budget, balance: bool) -> Result:
        one = self.everything(devices[:1], budget)
        two = self.everything(devices, budget)
        result: Result = {"one": one, "two": two}
        result["bitwise_equal"] = one.pop("texts") == two["texts"]
        hop = (two["ms_a_token"] - one["ms_a_token"]) * 1e3 / len(devices)
        result["hop_us"] = {two["plan"][0]["carrier"]: hop}
        for carrier in ("shm", "grpc"):
            if carrier in result["hop_us"] or not budget.allows(f"the hop by {carrier}", 25):
                continue
            with self.mesh(devices, carrier) as mesh:
                other = self.basics(mesh)
            result["bitwise_equal"] &= other.pop("texts") == two["texts"]
            hop = (other["ms_a_token"] - one["ms_a_token"]) * 1e3 / len(devices)
            result["hop_us"][other["plan"][0]["carrier"]] = hop
        texts = two.pop("texts")
        result["ratios"] = {
            f"{count} streams": two["streams"][count]["tokens_per_s"] / found["tokens_per_s"]
            for count, found in one["streams"].items()
            if count in two["streams"]
        } | {"prefill": two["prefill"]["tokens_per_s"] / one["prefill"]["tokens_per_s"]}
        if balance and budget.allows("the slowed device", 40):
            result["slowed"] = self._slowed(devices, texts)
        say(f"  bitwise equal: {result['bitwise_equal']}; us a hop: {result['hop_us']}")
        say(f"  two over one: { {name: round(ratio, 2) for name, ratio in result['ratios'].items()} }")
        return result

    def _slowed(self, devices: Sequence[str], texts: list[list[int]]) -> Result:
        """The plan, and one stream, while another process computes on the last device all the time."""
        with burning(devices[-1]), self.mesh(devices) as mesh:
            found = self.basics(mesh)
        found["bitwise_equal"] = found.pop("texts") == texts
        layers = [window["layers"] for window in found["plan"]]
        say(
            f"  one device slowed: layers {layers}, predicted {found['predicted_ms_a_token']:.2f} ms a "
            f"token, measured {found['ms_a_token']:.2f}"
        )
        return found


@contextmanager
def burning(device: str) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", BURNER, device])
    try:
        time.sleep(8.0 if device != "cpu" else 0.5)  # until it computes
        yield
    finally:
        process.kill()
        process.wait()


def peer(llama_bench: Path, model: Path, args: argparse.Namespace) -> Result:
    """llama.cpp by layers over all GPUs, and on the first alone."""
    results: Result = {}
    for name, gpus in (("one", ["-sm", "none"]), ("two", ["-sm", "layer"])):
        command = [
            str(llama_bench),
            "-m",
            str(model),
            "-ngl",
            "99",
            "-fa",
            "1",
            *gpus,
            "-r",
            "2",
            "-o",
            "json",
        ]
        runs = output([*command, "-p", str(args.prompt), "-n", str(args.tokens)])
        results[name] = {
            ("prefill" if run["n_prompt"] else "tg"): run["avg_ts"] for run in json.loads(runs or "[]")
        }
        batched = llama_bench.with_name("llama-batched-bench")
        if batched.exists():
            command = [str(batched), "-m", str(model), "-ngl", "99", "-fa", "on", *gpus, "-npp", "128"]
            command += ["-ntg", str(args.tokens), "-npl", ",".join(map(str, args.streams))]
            command += ["-c", str(max(args.streams) * (128 + args.tokens)), "--output-format", "jsonl"]
            lines = [json.loads(line) for line in output(command).splitlines() if line.startswith("{")]
            results[name]["streams"] = {run["pl"]: run["speed_tg"] for run in lines}
    return results


def output(command: Sequence[str]) -> str:
    """What a command prints; nothing, and a word about it, where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        say(f"{command[0]}: {error}")
        return ""
    if done.returncode:
        say(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-500:]}")
        return ""
    return done.stdout


TOPOLOGY = """
import json, torch
n = torch.cuda.device_count()
print(json.dumps({
    "gpus": [torch.cuda.get_device_name(i) for i in range(n)],
    "peer_access": [[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(n)] for i in range(n)],
    "torch": torch.__version__, "cuda": torch.version.cuda,
}))
"""


def topology() -> Result:
    """Names, peer access and links of the GPUs as the driver reports them."""
    told = output([sys.executable, "-c", TOPOLOGY])
    driver = output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).split("\n")[0]
    return json.loads(told or "{}") | {"driver": driver, "links": output(["nvidia-smi", "topo", "-m"])}


def models(args: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    for name in args.models:
        if name.endswith(".gguf"):
            yield Path(name).stem, Path(name)
            continue
        from benchmarks.synth_model import SHAPES, write

        shape, recipe = name.split(":")
        path = args.folder / f"{shape}-{recipe}.gguf"
        if not path.exists():
            write(path, SHAPES[shape], recipe)
        yield name, path


def arguments() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    split: Callable[[str], list[str]] = lambda text: text.split(",")  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--devices", type=split, default=["cuda:0", "cuda:1"])
    parser.add_argument("--models", nargs="+", default=["llama-8b:q4_k_m", "qwen-32b:q4_k_m"])
    parser.add_argument("--streams", type=numbers, default=[2, 8, 32, 64])
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of the long prompt")
    parser.add_argument("--tokens", type=int, default=96, help="generated a stream")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU stage")
    parser.add_argument("--seconds", type=float, default=450.0, help="in all")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="for the models")
    parser.add_argument("--llama-bench", type=Path, metavar="PATH")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    budget = Budget(args.seconds)
    cuda = any(device.startswith("cuda") for device in args.devices)
    found: Result = {"benchmark": "two_gpus", "devices": args.devices, "command": " ".join(sys.argv)}
    found["topology"] = topology() if cuda else {}
    found["models"] = {}
    for name, path in models(args):
        if not budget.allows(name, 60):
            continue
        say(name)
        try:
            result = Measurement(path, args).run(args.devices, budget, balance=not found["models"])
            if args.llama_bench and budget.allows(f"llama.cpp on {name}", 60):
                result["llama.cpp"] = peer(args.llama_bench, path, args)
        except Exception as error:  # what was measured of the others is not lost
            result = {"error": f"{type(error).__name__}: {error}"}
            say(f"  {result['error']}")
        found["models"][name] = result
    found["goals"] = {"32 streams": GOAL_STREAMS, "prefill": GOAL_PREFILL}
    found["left_out"] = budget.skipped
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
