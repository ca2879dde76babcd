"""The decode benchmark measures a running mesh and ends with one JSON line."""

import json
import subprocess
import sys

from tests.conftest import ROOT
from tests.e2e.daemons import Mesh


def run(mesh: Mesh, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "decode.py"), "--coordinator", mesh.address, *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_it_prints_prefill_and_decode_rates(mesh: Mesh) -> None:
    done = run(mesh, "-p", "200", "-n", "16", "-r", "3")
    assert (done.returncode, done.stderr) == (0, "")
    prefill, decode, last = done.stdout.splitlines()
    assert prefill.split()[0] == "pp200" and decode.split()[0] == "tg16" and "tokens/s" in prefill
    result = json.loads(last)
    assert (result["benchmark"], result["depth"], result["model"]) == ("decode", 0, "tiny")
    assert [window["layers"] for window in result["windows"]][-1][1] == 6
    for test in ("pp200", "tg16"):
        assert len(result[test]["runs"]) == 3
        assert min(result[test]["runs"]) <= result[test]["tokens_per_s"] <= max(result[test]["runs"])


def test_it_measures_at_a_depth(mesh: Mesh) -> None:
    done = run(mesh, "-p", "0", "-n", "16", "-d", "64", "-r", "1")
    assert done.returncode == 0 and "tg16 @ d64" in done.stdout
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["depth"] == 64 and result["tg16"]["tokens_per_s"] > 0 and "pp0" not in result


def test_a_context_too_short_is_no_measurement(mesh: Mesh) -> None:
    done = run(mesh, "-p", "0", "-n", "64", "-d", "500", "-r", "1")
    assert done.returncode == 1 and "not a measurement" in done.stderr
