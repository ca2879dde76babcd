"""Speed of the CUDA engine in llama-bench's terms, on synthetic models of real shapes.

    python benchmarks/gpu.py --models llama-8b:q4_k_m llama-1b:q8_0 [--llama-bench PATH] [--json OUT]

pp N: a prompt of N tokens, in chunks of 2048. tg N @ D: N tokens generated one by one after D in the
context. B x tg:
B sequences at once, tokens of all counted. The engine's loop is timed from token in to token out:
embedding, layers, head, choice of the token. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.synth_model import SHAPES, write
from common.gguf.reader import GGUFFile
from stage.backends.base import make_batch
from stage.backends.cuda.backend import CudaBackend
from stage.backends.cuda.decode import Decoder
from stage.model.registry import build_spec
from stage.model.spec import tensor_refs
from stage.weights.loader import raw_tensors

BLOCK_SIZE, CHUNK = 32, 2048


class Engine:
    """A whole model on the GPU, as a single stage runs it."""

    def __init__(self, path: Path, max_context: int, max_rows: int) -> None:
        started = time.perf_counter()
        file = GGUFFile.open(path)
        self.spec = spec = build_spec(file, max_context)
        self.backend = backend = CudaBackend(torch.device("cuda", 0))
        backend.check(spec)
        self.embedding = backend.prepare_embedding(
            spec.embedding, raw_tensors(file, tensor_refs(spec.embedding))
        )
        self.layers = [
            backend.prepare_layer(layer, raw_tensors(file, tensor_refs(layer))) for layer in spec.layers
        ]
        self.head = backend.prepare_head(spec.head, raw_tensors(file, tensor_refs(spec.head)))
        torch.cuda.synchronize()
        self.load_s = time.perf_counter() - started
        # One long sequence, or many short ones.
        self.blocks_a_row = -(-1024 // BLOCK_SIZE)
        num_blocks = max(-(-max_context // BLOCK_SIZE), self.blocks_a_row * max_rows)
        self.kv = backend.allocate_kv(spec.layers, num_blocks, BLOCK_SIZE)
        self.num_blocks = num_blocks
        self.decoder = Decoder(backend, self.embedding, self.layers, self.head, self.kv, max_context)
        self.eager = Decoder(
            backend, self.embedding, self.layers, self.head, self.kv, max_context, graphs=False
        )
        self.rng = np.random.default_rng(0)

    def prefill(self, num_tokens: int) -> None:
        ids = self.rng.integers(0, self.spec.vocab_size, num_tokens, dtype=np.int32)
        table = np.arange(self.num_blocks, dtype=np.int32)
        for start in range(0, num_tokens, CHUNK):
            chunk = ids[start : start + CHUNK]
            batch = make_batch([(start, len(chunk), table)], BLOCK_SIZE)
            x = self.backend.embed(self.embedding, chunk)
            for layer in self.layers:
                x = self.backend.run_layer(layer, self.kv, batch, x)
        self.backend.logits(self.head, x[-1:]).argmax().item()

    def place(self, decoder: Decoder, num_rows: int, depth: int) -> None:
        if num_rows == 1:
            tables = [np.arange(self.num_blocks, dtype=np.int32)]
        else:
            tables = [
                np.arange(self.blocks_a_row * i, self.blocks_a_row * (i + 1), dtype=np.int32)
                for i in range(num_rows)
            ]
        tokens = self.rng.integers(0, self.spec.vocab_size, num_rows)
        decoder.place(tokens.tolist(), [depth] * num_rows, tables)

    def generate(self, decoder: Decoder, num_rows: int, depth: int, steps: int) -> float:
        """Seconds for `steps` steps, capture and warm-up not counted."""
        self.place(decoder, num_rows, depth)
        for _ in range(8):
            decoder.step()
        decoder.drawn(7, 8)
        started = time.perf_counter()
        for _ in range(steps):
            decoder.step()
        decoder.drawn(7 + steps, 8 + steps)
        return time.perf_counter() - started


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


def measure(
    path: Path, prompts: Sequence[int], depths: Sequence[int], batches: Sequence[int], steps: int
) -> dict[str, float]:
    max_context = max([*prompts, *(depth + 512 for depth in depths), 1024])
    engine = Engine(path, max_context, max(batches, default=1))
    rates: dict[str, float] = {"load_s": engine.load_s, "weight_gb": path.stat().st_size / 1e9}
    for prompt in prompts:
        rates[f"pp{prompt}"] = prompt / median_s(lambda n=prompt: engine.prefill(n), 3)
    for depth in depths:
        best = min(engine.generate(engine.decoder, 1, depth, steps) for _ in range(2))
        rates[f"tg{steps} @ {depth}"] = steps / best
    for batch in batches:
        if batch > 1:
            rates[f"{batch} x tg{steps}"] = batch * steps / engine.generate(engine.decoder, batch, 128, steps)
    rates["eager tg"] = 16 / engine.generate(engine.eager, 1, 0, 16)
    started = time.perf_counter()
    for _ in range(20):
        engine.decoder.step()
    rates["issue_us"] = (time.perf_counter() - started) / 20 * 1e6
    rates["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return rates


def peer(llama_bench: Path, path: Path, prompts: Sequence[int], depths: Sequence[int], steps: int) -> Any:
    command = [str(llama_bench), "-m", str(path), "-fa", "1", "-ngl", "99", "-o", "json", "-n", str(steps)]
    command += ["-p", ",".join(map(str, prompts)), "-d", ",".join(map(str, depths))]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["llama-8b:q4_k_m"], metavar="SHAPE:RECIPE")
    parser.add_argument("--prompts", type=numbers, default=[512, 4096])
    parser.add_argument("--depths", type=numbers, default=[0, 4096, 16384])
    parser.add_argument("--batches", type=numbers, default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="for the models")
    parser.add_argument("--llama-bench", type=Path)
    args = parser.parse_args()
    results = {}
    for name in args.models:
        shape, recipe = name.split(":")
        path = args.folder / f"{shape}-{recipe}.gguf"
        if not path.exists():
            write(path, SHAPES[shape], recipe)
        with torch.inference_mode():
            results[name] = measure(path, args.prompts, args.depths, args.batches, args.steps)
        print(name, flush=True)
        for what, value in results[name].items():
            print(f"  {what:16s} {value:10.1f}", flush=True)
        torch.cuda.empty_cache()
        if args.llama_bench:
            results[f"{name} llama.cpp"] = peer(args.llama_bench, path, args.prompts, args.depths, args.steps)
    print(json.dumps({"benchmark": "gpu", "gpu": torch.cuda.get_device_name(), "results": results}))


if __name__ == "__main__":
    main()
