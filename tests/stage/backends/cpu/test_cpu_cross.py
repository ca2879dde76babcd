"""Kernels for another processor, compiled by a cross-compiler and run in an emulator where both are here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGMLType

from stage.weights.quants import BLOCK_LAYOUTS, dequantize
from tests.stage.backends.cpu.random_weights import FLOAT_TYPES, random_raw

NATIVE = Path(__file__).resolve().parents[4] / "stage/backends/cpu/native"
FLAGS = ["-std=gnu++20", "-ffp-contract=fast", "-Wno-psabi", "-pthread", f"-I{NATIVE}"]
VARIANTS = {"neon": ["-O2", "-march=armv8.2-a+dotprod"], "plain": ["-O1"]}
TOLERANCE = {True: 5e-4, False: 0.15}


def write_cases(path: Path, shapes: tuple[tuple[int, int, int], ...] = ((33, 512, 1), (41, 768, 13))) -> None:
    """Products of every type, of (rows, cols, n), with what float64 makes of them."""
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        for ggml_type in BLOCK_LAYOUTS:
            for rows, cols, n in shapes:
                cols += 5 if ggml_type in FLOAT_TYPES else 0
                raw = random_raw(rng, GGMLType(ggml_type), (rows, cols))
                x = rng.standard_normal((n, cols)).astype(np.float32)
                y = x.astype(np.float64) @ dequantize(raw).numpy().astype(np.float64).T
                for exact, tolerance in TOLERANCE.items():
                    head = np.array([ggml_type, rows, cols, n, exact, raw.nbytes], np.int32)
                    for part in (head, raw.data, x, y.astype(np.float32), np.float32(tolerance)):
                        file.write(part.tobytes())


@pytest.mark.slow
def test_arm_kernels(tmp_path: Path) -> None:
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("needs aarch64-linux-gnu-g++ (g++-aarch64-linux-gnu) and qemu-aarch64 (qemu-user)")
    units = [(path, path.stem, ["-O2"]) for path in NATIVE.glob("*.cpp") if path.name != "variant.cpp"]
    units += [
        (NATIVE / "variant.cpp", variant, [f"-DPIPELLM_VARIANT={variant}", *flags])
        for variant, flags in VARIANTS.items()
    ]
    units.append((Path(__file__).with_name("check_products.cpp"), "check_products", ["-O1"]))
    jobs = [
        subprocess.Popen([compiler, *FLAGS, *flags, "-c", source, "-o", tmp_path / f"{name}.o"])
        for source, name, flags in units
    ]
    assert [job.wait() for job in jobs] == [0] * len(jobs)
    program = tmp_path / "check_products"
    objects = [tmp_path / f"{name}.o" for _, name, _ in units]
    subprocess.run([compiler, "-static", "-pthread", *objects, "-o", program], check=True)
    write_cases(tmp_path / "cases.bin")
    for variant in VARIANTS:
        done = subprocess.run(
            [emulator, program, variant, tmp_path / "cases.bin"], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout
