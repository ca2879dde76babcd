"""What a CPU stage takes to load a model: time to the first token, and memory.

    python benchmarks/cpu_stage.py MODEL.gguf [--repeats 5] [--context 1024]

Each repetition is a mesh of its own, of a coordinator and one CPU stage. Load to first token: from the
client's Load to its first token of a short prompt, the daemons running and idle before. Memory: the stage's
resident bytes after a generation, less those of the same process idle before Load, against the limit of the
file's bytes, the KV cache of the tokens there were, and 100 MB. Medians; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from client.client import Client
from client.events import Delta
from client.local import LocalMesh
from common.gguf.reader import GGUFFile
from stage.backends.cpu.kv_cache import bytes_per_token
from stage.model.registry import build_spec

ALLOWED_BYTES = 100e6
PROMPT_TOKENS, GENERATED_TOKENS = 16, 128


def first_token(client: Client, count: int) -> float:
    """The moment of the first of `count` tokens; returns after the last."""
    first = 0.0
    prompt = list(range(100, 100 + PROMPT_TOKENS))
    with client.generate(prompt, max_tokens=count, ignore_eos=True, return_ids=True) as events:
        for event in events:
            if isinstance(event, Delta) and not first:
                first = time.perf_counter()
    return first


class ObservedMesh(LocalMesh):
    """Notes the moment and the stage's memory before Load, its daemons idle until then."""

    loaded_at = 0.0
    idle_bytes = 0

    def _load(self) -> None:
        self.loaded_at = time.perf_counter()
        self.idle_bytes = resident_bytes(self)
        super()._load()


def resident_bytes(mesh: LocalMesh) -> int:
    return int(psutil.Process(mesh.pids[1]).memory_info().rss)


def main() -> None:
    parser = argparse.ArgumentParser(description="A CPU stage's time to the first token, and its memory.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--context", type=int, default=1024)
    options = parser.parse_args()
    with GGUFFile.open(options.model) as file:
        spec = build_spec(file)
    kv_bytes = (PROMPT_TOKENS + GENERATED_TOKENS) * sum(
        bytes_per_token(layer, "f16") for layer in spec.layers
    )
    options.model.read_bytes()  # into the page cache
    seconds, taken = [], []
    for _ in range(options.repeats):
        with ObservedMesh(options.model, stages=1, context_length=options.context) as mesh:
            seconds.append(first_token(mesh.client, 1) - mesh.loaded_at)
            first_token(mesh.client, GENERATED_TOKENS)
            taken.append(resident_bytes(mesh) - mesh.idle_bytes)
    limit = options.model.stat().st_size + kv_bytes + ALLOWED_BYTES
    result = {
        "benchmark": "cpu_stage",
        "model": options.model.name,
        "load_to_first_token_s": round(statistics.median(seconds), 3),
        "runs_s": [round(value, 3) for value in seconds],
        "resident_over_idle_mb": round(statistics.median(taken) / 1e6, 1),
        "limit_mb": round(limit / 1e6, 1),
        "load_average": os.getloadavg()[0],
    }
    print(f"load to first token  {result['load_to_first_token_s']} s")
    print(f"resident over idle   {result['resident_over_idle_mb']} MB (limit {result['limit_mb']})")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
