"""Speed of the CUDA engine in llama-bench's terms, on synthetic models of real shapes.

    python benchmarks/gpu.py --models llama-8b:q4_k_m llama-1b:q8_0 [--llama-bench PATH] [--daemons]
                             [--json FILE] [--svg FILE]

pp N: a prompt of N tokens, in chunks of 2048. tg N @ D: N tokens generated one by one after D in the
context. B x tg N: B sequences at once, tokens of all counted. The engine's loop is timed from token in to
token out: embedding, layers, head, choice of the token, and its arrival on the host.

With --llama-bench the peer runs in turn on the same file, and its llama-batched-bench too where that lies
beside it. With --daemons the same decode is also measured through a coordinator, a stage and gRPC. Ends with
one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.synth_model import SHAPES, write
from common.gguf.reader import GGUFFile
from common.svg_chart import Bar, bar_chart
from stage.backends.base import Decoder, DecodeRow, make_batch
from stage.backends.cuda.backend import CudaBackend
from stage.backends.cuda.decode import CudaDecoder
from stage.backends.cuda.rates import read_bytes_per_s
from stage.backends.timing import BLOCK_SIZE, Model
from stage.model.registry import build_spec
from stage.sampler import SamplingOptions

ROOT = Path(__file__).resolve().parent.parent
CHUNK, REPEAT, AHEAD = 2048, 8, 2  # rows of a prefill step; steps in one issue; issues ahead of what is read
ROW_TOKENS = 1024  # of the cache, for each of many sequences
BATCH_DEPTH, BATCH_STEPS = 128, 64
GREEDY = SamplingOptions(
    temperature=0, top_k=0, top_p=1, min_p=0, typical_p=1, repeat_penalty=1, repeat_last_n=0,
    presence_penalty=0, frequency_penalty=0, seed=0,
)  # fmt: skip

Rates = dict[str, float]


class Engine:
    """A whole model on the GPU, as a single stage runs it."""

    def __init__(self, path: Path, max_context: int, max_rows: int) -> None:
        file = GGUFFile.open(path)
        self.spec = build_spec(file, max_context)
        backend = CudaBackend(torch.device("cuda", 0))
        torch.cuda.synchronize()
        started = time.perf_counter()
        # One long sequence, or many short ones.
        self.model = model = Model(backend, file, self.spec, max(max_context, ROW_TOKENS * max_rows))
        torch.cuda.synchronize()
        self.load_s = time.perf_counter() - started
        self.backend = backend
        parts = (model.embedding, model.layers, model.head, model.kv, max_context)
        self.decoder: Decoder = CudaDecoder(backend, *parts)
        self.eager: Decoder = CudaDecoder(backend, *parts, graphs=False)
        self._ids = model.random_tokens(max_context + 1)
        self._sequences = 0

    def prefill(self, num_tokens: int) -> None:
        model = self.model
        for start in range(0, num_tokens, CHUNK):
            chunk = self._ids[start : min(start + CHUNK, num_tokens)]
            batch = make_batch([(start, len(chunk), model.block_table)], BLOCK_SIZE)
            x = self.backend.embed(model.embedding, chunk)
            for layer in model.layers:
                x = self.backend.run_layer(layer, model.kv, batch, x)
        self.backend.logits(model.head, x[-1:]).argmax().item()

    def generate(self, decoder: Decoder, num_rows: int, depth: int, steps: int) -> float:
        """Seconds for `steps` steps, capture and warm-up not counted."""
        table, blocks = self.model.block_table, ROW_TOKENS // BLOCK_SIZE
        tables = [table] if num_rows == 1 else [table[blocks * i : blocks * (i + 1)] for i in range(num_rows)]
        tokens = self._ids[: depth + 1].tolist()
        self._sequences += num_rows

        def issue(position: int, repeat: int) -> Any:
            names = range(self._sequences, self._sequences + num_rows)
            rows = [
                DecodeRow(name, position, tokens, row, GREEDY)
                for name, row in zip(names, tables, strict=True)
            ]
            return decoder.issue(rows, repeat)

        issue(depth, REPEAT).wait()
        position, end = depth + REPEAT, depth + REPEAT + steps
        under_way: deque[Any] = deque()
        started = time.perf_counter()
        while position < end:
            repeat = min(REPEAT, end - position)
            under_way.append(issue(position, repeat))
            position += repeat
            if len(under_way) > AHEAD:
                under_way.popleft().wait()
        for draws in under_way:
            draws.wait()
        return time.perf_counter() - started

    def close(self) -> None:
        del self.decoder, self.eager
        backend, self.model = self.backend, None  # type: ignore[assignment]
        backend.close()


def median_s(run: Callable[[], Any], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


@torch.inference_mode()
def measure(path: Path, args: argparse.Namespace) -> Rates:
    """Tokens a second by test, and what else was seen."""
    depths, steps = args.depths, args.steps
    max_context = max([*args.prompts, *(depth + steps + 64 for depth in depths), ROW_TOKENS])
    engine = Engine(path, max_context, max(args.batches, default=1))
    rates: Rates = {}
    for prompt in args.prompts:
        rates[f"pp{prompt}"] = prompt / median_s(lambda n=prompt: engine.prefill(n), 3)  # type: ignore[misc]
    for depth in depths:
        best = min(engine.generate(engine.decoder, 1, depth, steps) for _ in range(2))
        rates[f"tg{steps} @ {depth}" if depth else f"tg{steps}"] = steps / best
    for batch in args.batches:
        best = min(engine.generate(engine.decoder, batch, BATCH_DEPTH, BATCH_STEPS) for _ in range(2))
        rates[f"{batch} x tg{BATCH_STEPS}"] = batch * BATCH_STEPS / best
    rates["eager tg16"] = 16 / engine.generate(engine.eager, 1, 0, 16)
    rates["GB beyond weights and KV"] = (
        torch.cuda.max_memory_allocated() - engine.model.weight_bytes - engine.model.kv.nbytes
    ) / 1e9
    rates["read GB/s"] = read_bytes_per_s(engine.backend.kernels) / 1e9
    first = f"tg{steps} @ {depths[0]}" if depths[0] else f"tg{steps}"
    rates["share of read rate"] = (
        sum(engine.model.part_bytes(1, depths[0])) * rates[first] / rates["read GB/s"] / 1e9
    )
    rates["load s"] = engine.load_s
    engine.close()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return rates


def peer(llama_bench: Path, path: Path, args: argparse.Namespace) -> Rates:
    """llama.cpp's rates of the same tests."""
    rates: Rates = {}
    prompts = ["-p", ",".join(map(str, args.prompts)), "-n", "0"]
    generated = ["-p", "0", "-n", str(args.steps), "-d", ",".join(map(str, args.depths))]
    for tests in (prompts, generated):
        command = [
            str(llama_bench),
            "-m",
            str(path),
            "-fa",
            "1",
            "-ngl",
            "99",
            "-r",
            "3",
            "-o",
            "json",
            *tests,
        ]
        for run in json.loads(output(command) or "[]"):
            depth = f" @ {run['n_depth']}" if run.get("n_depth") else ""
            test = f"pp{run['n_prompt']}" if run["n_prompt"] else f"tg{run['n_gen']}"
            rates[test + depth] = run["avg_ts"]
    batched = llama_bench.with_name("llama-batched-bench")
    if args.batches and batched.exists():
        sequences = ",".join(map(str, args.batches))
        context = max(args.batches) * (BATCH_DEPTH + BATCH_STEPS)
        command = [str(batched), "-m", str(path), "-fa", "on", "-ngl", "99", "-c", str(context)]
        command += ["-npp", str(BATCH_DEPTH), "-ntg", str(BATCH_STEPS), "-npl", sequences]
        for line in output([*command, "--output-format", "jsonl"]).splitlines():
            if line.startswith("{"):
                run = json.loads(line)
                rates[f"{run['pl']} x tg{run['tg']}"] = run["speed_tg"]
    return rates


def output(command: list[str]) -> str:
    """What a command prints. A failure costs its own figures, and says so."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}", flush=True)
        return ""
    return done.stdout


def through_daemons(path: Path, steps: int) -> Rates:
    """The client's rates: a coordinator, a stage, gRPC."""
    command = [sys.executable, str(ROOT / "benchmarks" / "decode.py"), str(path), "-n", str(steps), "-r", "3"]
    printed = output(command)
    if not printed:
        return {}
    found = json.loads(printed.splitlines()[-1])
    return {
        "daemons pp512": found["pp512"]["tokens_per_s"],
        f"daemons tg{steps}": found[f"tg{steps}"]["tokens_per_s"],
    }


def machine() -> dict[str, str]:
    import pynvml

    pynvml.nvmlInit()
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": " ".join(sys.argv),
    }


def table(name: str, ours: Rates, theirs: Rates) -> str:
    lines = [f"{name:24} {'PipeLLM':>12} {'llama.cpp':>12} {'ratio':>7}"]
    for test, value in ours.items():
        other = f"{theirs[test]:12.1f} {value / theirs[test]:7.2f}" if test in theirs else ""
        lines.append(f"{test:24} {value:12.{1 if value >= 10 else 3}f} {other}".rstrip())
    return "\n".join(lines)


def chart(title: str, results: dict[str, dict[str, Rates]]) -> str:
    groups = []
    for name, sides in results.items():
        tests = [test for test in sides["PipeLLM"] if test.startswith("tg") or " x tg" in test]
        tests += [test for test in sides["PipeLLM"] if test.startswith("pp")]
        for kind in ("tg", "x tg", "pp"):
            bars = [
                Bar(test, rates[test], f"{rates[test]:,.0f}", side)
                for test in tests
                if (" x tg" in test) == (kind == "x tg") and (kind == "x tg" or test.startswith(kind))
                for side, rates in sides.items()
                if test in rates
            ]
            if bars:
                groups.append((f"{name}, tokens/s", bars))
    return bar_chart(title, groups)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["llama-8b:q4_k_m"], metavar="SHAPE:RECIPE")
    parser.add_argument("--prompts", type=numbers, default=[512, 4096])
    parser.add_argument("--depths", type=numbers, default=[0, 4096, 16384])
    parser.add_argument("--batches", type=numbers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="for the models")
    parser.add_argument("--keep", action="store_true", help="do not remove the models afterwards")
    parser.add_argument("--llama-bench", type=Path, metavar="PATH")
    parser.add_argument("--daemons", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--svg", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    results: dict[str, dict[str, Rates]] = {}
    for name in args.models:
        shape, recipe = name.split(":")
        path = args.folder / f"{shape}-{recipe}.gguf"
        made = not path.exists()
        if made:
            write(path, SHAPES[shape], recipe)
        sides = results[name] = {"PipeLLM": measure(path, args)}
        if args.daemons:
            sides["PipeLLM"] |= through_daemons(path, args.steps)
        if args.llama_bench:
            sides["llama.cpp"] = peer(args.llama_bench, path, args)
        print(table(name, sides["PipeLLM"], sides.get("llama.cpp", {})), end="\n\n", flush=True)
        if made and not args.keep:
            path.unlink()
    found = {"benchmark": "gpu", **machine(), "results": results}
    if args.svg:
        args.svg.write_text(chart(f"tokens/s on one {found['gpu']}", results))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
