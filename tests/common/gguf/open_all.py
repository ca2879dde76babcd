"""What opening files costs a process that does nothing else. Needs Linux's /proc."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).parents[3]

_SCRIPT = """
import json, sys, time
from common.errors import PipeLLMError
from common.gguf.reader import GGUFFile

def peak_mib():
    # Not getrusage: its maximum is handed on from the parent process.
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))

idle, slowest_s, refused = peak_mib(), 0.0, 0
for path in json.load(sys.stdin):
    start = time.process_time()
    try:
        GGUFFile.open(path).close()
    except PipeLLMError:
        refused += 1
    slowest_s = max(slowest_s, time.process_time() - start)
print(json.dumps({"mib": peak_mib() - idle, "slowest_s": slowest_s, "refused": refused}))
"""


@dataclass(frozen=True)
class Cost:
    """Peak memory beyond the idle process, CPU time of the slowest file, and how many were refused."""

    mib: float
    slowest_s: float
    refused: int


def open_all(paths: list[Path]) -> Cost:
    """Open the files one after another in a fresh process; anything but a PipeLLMError fails the test."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        cwd=_ROOT,
        input=json.dumps([str(path) for path in paths]),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    return Cost(**json.loads(done.stdout))
