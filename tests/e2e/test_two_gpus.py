"""The two-GPU benchmark, rehearsed on two CPU stages: every part runs, and the last line is all of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.gguf_files import write_tiny_llama


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_rehearsal_on_cpus_measures_everything(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny.gguf", layers=4)
    flags = [
        "--devices",
        "cpu,cpu",
        "--models",
        str(model),
        "--prompt",
        "64",
        "--streams",
        "2",
        "--tokens",
        "12",
    ]
    command = [sys.executable, str(ROOT / "benchmarks" / "two_gpus.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    result = found["models"]["tiny"]
    assert found["left_out"] == [] and "error" not in result, result
    assert result["bitwise_equal"] and result["slowed"]["bitwise_equal"]
    assert set(result["hop_us"]) == {"shm", "grpc"}
    assert [link["carrier"] for link in result["two"]["links"]] == ["shm", "shm"]
    assert result["one"]["links"] == [] and len(result["two"]["plan"]) == 2
    assert result["two"]["streams"]["2"]["tokens_per_s"] > 0 and set(result["ratios"]) == {
        "2 streams",
        "prefill",
    }
