"""Speed of a model that is larger than the GPU memory it may use: streamed weights, host layers, prefetch.

    python benchmarks/streaming.py --shape llama-8b --recipe q4_k_m --resident 24,16,0
    python benchmarks/streaming.py --shape qwen-32b --gpu-memory 12GB --pinned-memory 8GB
    python benchmarks/streaming.py --shape moe-30b --resident 24,0 --hosts 1:1,1:0 --experts

For each number of resident layers: prefill of 512 and 2048 tokens, decode at batch 1 and 8, with all other
layers streamed (with and without prefetch) and with the best division between link and host's cores. The
link's and the host memory's rates are measured in the same run. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu import median_s
from benchmarks.synth_model import SHAPES, write
from common.gguf.reader import GGUFFile
from stage.backends.base import DecodeRow, make_batch
from stage.backends.cuda.backend import CudaBackend
from stage.backends.cuda.placing import link_rate
from stage.memory_settings import MemorySettings
from stage.model.registry import build_spec
from stage.model.spec import tensor_refs
from stage.placement import Place, arrange, describe, keep_hosts
from stage.sampler import SamplingOptions
from stage.weights.loader import raw_tensors

BLOCK_SIZE, MAX_CONTEXT, BLOCKS_A_ROW = 32, 4096, 32
GREEDY = SamplingOptions(0.0, 0, 1.0, 0.0, 1.0, 1.0, 0, 0.0, 0.0, 0)


class Engine:
    """A whole model, its layers in given places."""

    def __init__(
        self,
        path: Path,
        places: Sequence[Place] | None,
        batch_places: Sequence[Place] = (),
        pinned_bytes: int = 0,
        prefetch: bool = True,
        threads: int = 0,
        memory: MemorySettings | None = None,
    ) -> None:
        """`places`: None for those that the backend chooses within `memory`."""
        started = time.perf_counter()
        file = GGUFFile.open(path)
        self.spec = spec = build_spec(file, MAX_CONTEXT)
        self.backend = backend = CudaBackend(torch.device("cuda", 0), memory=memory)
        num_blocks = max(MAX_CONTEXT // BLOCK_SIZE, 8 * BLOCKS_A_ROW)
        if places is None:
            others = [raw_tensors(file, tensor_refs(part)) for part in (spec.embedding, spec.head)]
            other_bytes = sum(backend.stored_bytes(spec.head, raw) for raw in others)
            backend.place(file, spec.layers, other_bytes, num_blocks * BLOCK_SIZE)
        else:
            few, many = dict(enumerate(places)), dict(enumerate(batch_places))
            backend.offload(file, spec.layers, few, many, pinned_bytes, threads, prefetch)
        self.kv = backend.allocate_kv(spec.layers, num_blocks, BLOCK_SIZE)
        self.embedding = backend.prepare_embedding(
            spec.embedding, raw_tensors(file, tensor_refs(spec.embedding))
        )
        self.layers = [
            backend.prepare_layer(layer, raw_tensors(file, tensor_refs(layer))) for layer in spec.layers
        ]
        self.head = backend.prepare_head(spec.head, raw_tensors(file, tensor_refs(spec.head)))
        self.decoder = backend.decoder(self.embedding, self.layers, self.head, self.kv, MAX_CONTEXT)
        torch.cuda.synchronize()
        self.load_s = time.perf_counter() - started
        self.rng = np.random.default_rng(0)
        self.ids = self.rng.integers(0, spec.vocab_size, MAX_CONTEXT, dtype=np.int32)

    def prefill(self, num_tokens: int) -> None:
        table = np.arange(self.kv.num_blocks, dtype=np.int32)
        batch = make_batch([(0, num_tokens, table)], BLOCK_SIZE)
        x = self.backend.embed(self.embedding, self.ids[:num_tokens])
        for layer in self.layers:
            x = self.backend.run_layer(layer, self.kv, batch, x)
        self.backend.logits(self.head, x[-1:]).argmax().item()

    def decode_s(self, num_rows: int, steps: int) -> float:
        """Seconds a step."""
        tables = [
            np.arange(BLOCKS_A_ROW * i, BLOCKS_A_ROW * (i + 1), dtype=np.int32) for i in range(num_rows)
        ]

        def rows(position: int) -> list[DecodeRow]:
            tokens = self.ids[: position + 1].tolist()
            return [DecodeRow(i, position, tokens, table, GREEDY) for i, table in enumerate(tables)]

        self.decoder.issue(rows(128), 8).wait()
        started = time.perf_counter()
        self.decoder.issue(rows(136), steps).wait()
        return (time.perf_counter() - started) / steps

    @property
    def streamed_bytes(self) -> int:
        return self.backend.offloaded.stream.bytes_copied if self.backend.offloaded else 0

    def close(self) -> None:
        del self.decoder, self.layers, self.kv, self.embedding, self.head
        self.backend.close()


def measure(engine: Engine, steps: int, whole: bool, link: float) -> dict[str, float]:
    result = {"load_s": engine.load_s}
    before = engine.streamed_bytes
    step_s = engine.decode_s(1, steps)
    result["decode"] = 1 / step_s
    # The 8 steps of warm-up moved as much each.
    result["link_share"] = (engine.streamed_bytes - before) / (steps + 8) / step_s / link
    if whole:
        result["decode_8"] = 8 / engine.decode_s(8, max(8, steps // 2))
        for tokens in (512, 2048):
            result[f"prefill_{tokens}"] = tokens / median_s(functools.partial(engine.prefill, tokens), 3)
    return {name: round(value, 3) for name, value in result.items()}


def within(path: Path, memory: MemorySettings, steps: int, link: float) -> dict[str, Any]:
    """A placement chosen within budgets: what was predicted, what is measured, and the memory it takes."""
    host_before = psutil.Process().memory_info().rss
    engine = Engine(path, None, memory=memory)
    placement = engine.backend.placement
    result: dict[str, Any] = dict(measure(engine, steps, True, link))
    if placement is not None:
        predicted = placement.prediction
        result["plan"] = describe(placement)
        result["measured / predicted"] = {
            "batch 1": round(result["decode"] / predicted.batch_1, 3),
            "batch 8": round(result["decode_8"] / predicted.batch_8, 3),
            "prefill 512": round(result["prefill_512"] / predicted.prefill, 3),
        }
    free, total = torch.cuda.mem_get_info()
    result["gpu_gb"] = round((total - free) / 1e9, 2)
    result["host_rss_gb"] = round((psutil.Process().memory_info().rss - host_before) / 1e9, 2)
    engine.close()
    return result


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--recipe", default="q4_k_m")
    parser.add_argument("--resident", type=numbers, default=[24, 16, 0])
    parser.add_argument(
        "--hosts", default="0.5:0.25", help="shares of the layers not resident, at batch 1:in batches"
    )
    parser.add_argument("--experts", action="store_true", help="of layers off the GPU only the experts are")
    parser.add_argument("--gpu-memory", help="measures the placement chosen within it, and nothing else")
    parser.add_argument("--pinned-memory", default="auto", help="the same")
    parser.add_argument("--pinned-gb", type=float, default=64)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="for the model")
    parser.add_argument("--deadline-s", type=float, default=1e9, help="nothing new begins after it")
    args = parser.parse_args()
    began = time.perf_counter()
    path = args.folder / f"{args.shape}-{args.recipe}.gguf"
    if not path.exists():
        write(path, SHAPES[args.shape], args.recipe)
    num_layers = SHAPES[args.shape].num_layers
    pinned_bytes = int(args.pinned_gb * 1e9)
    link = max(link_rate(torch.device("cuda", 0)) for _ in range(3))
    results: dict[str, Any] = {"link_gb_s": link / 1e9}
    print(f"link {link / 1e9:.1f} GB/s, model after {time.perf_counter() - began:.0f} s", flush=True)

    def run(
        name: str, places: Sequence[Place], kept: int = 0, prefetch: bool = True, whole: bool = True
    ) -> None:
        if time.perf_counter() - began > args.deadline_s:
            return
        if args.experts:
            name, places = f"{name}, experts alone", tuple(place.split for place in places)
        try:
            batch_places = keep_hosts(places, kept)
            engine = Engine(path, places, batch_places, pinned_bytes, prefetch, args.threads)
            try:
                results[name] = measure(engine, args.steps, whole, link)
            finally:
                engine.close()
        except Exception as error:  # one configuration that fails leaves the others their figures
            results[name] = {"error": f"{type(error).__name__}: {error}"}
        print(f"{name}: {json.dumps(results[name])}", flush=True)

    if args.gpu_memory:
        memory = MemorySettings(gpu_memory=args.gpu_memory, pinned_memory=args.pinned_memory)
        with torch.inference_mode():
            results["within"] = within(path, memory, args.steps, link)
        print(json.dumps({"benchmark": "streaming", "gpu": torch.cuda.get_device_name(), "results": results}))
        return
    with torch.inference_mode():
        run("all resident", arrange(num_layers, 0, 0))
        for resident in args.resident:
            rest = num_layers - resident
            for share, batch_share in (map(float, one.split(":")) for one in args.hosts.split(",")):
                host, kept = round(rest * share), round(rest * batch_share)
                name = f"{resident} resident, {rest - host} streamed, {host} host ({kept} in batches)"
                run(name, arrange(num_layers, rest - host, host), kept)
            run(f"{resident} resident, streamed", arrange(num_layers, rest, 0))
            run(f"{resident}, no prefetch", arrange(num_layers, rest, 0), prefetch=False, whole=False)
    print(json.dumps({"benchmark": "streaming", "gpu": torch.cuda.get_device_name(), "results": results}))


if __name__ == "__main__":
    main()
