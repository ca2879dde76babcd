"""Decode speed of a CPU stage whose layers exceed its memory, with and without read-ahead.

    python benchmarks/cpu_windows.py MODEL.gguf --memory 600000000 [--plain] [--threads N] [--steps 5]

Run it in a control group whose memory limit is smaller than the model, else the page cache holds everything:
    mkdir /sys/fs/cgroup/memory/windows && echo 700M > /sys/fs/cgroup/memory/windows/memory.limit_in_bytes
    sh -c 'echo $$ > /sys/fs/cgroup/memory/windows/cgroup.procs && exec python benchmarks/cpu_windows.py ...'
--plain leaves the pages to the kernel. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.gguf.reader import GGUFFile
from stage.backends.base import make_batch
from stage.backends.cpu.backend import CpuBackend
from stage.model.registry import build_spec
from stage.runner import Runner


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--memory", type=int, required=True, help="bytes for weights and KV cache")
    parser.add_argument("--plain", action="store_true", help="without read-ahead and letting go")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    descriptor = os.open(args.model, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # nothing of it in memory at the start
    os.close(descriptor)
    file = GGUFFile.open(args.model)
    spec = build_spec(file, 512)
    backend = CpuBackend(args.threads, memory_bytes=0 if args.plain else args.memory)
    runner = Runner.load(
        backend, file, spec, 0, len(spec.layers), embedding=True, head=True, num_kv_blocks=16,
        kv_block_size=32,
    )  # fmt: skip
    peak = 0

    def step(position: int) -> None:
        nonlocal peak
        batch = make_batch([(position, 1, np.arange(16, dtype=np.int32))], 32)
        runner.logits(runner.forward(batch, np.asarray([position], np.int32)), np.asarray([0]))
        peak = max(peak, psutil.Process().memory_info().rss)

    step(0)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    started = time.perf_counter()
    for position in range(1, args.steps + 1):
        step(position)
    seconds = (time.perf_counter() - started) / args.steps
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - faults
    runner.close()
    result = {
        "benchmark": "cpu_windows", "plain": args.plain, "tokens_per_s": round(1 / seconds, 3),
        "file_gb": round(file.file_bytes / 1e9, 2), "peak_rss_gb": round(peak / 1e9, 2),
        "major_faults_a_step": round(faults / args.steps),
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
