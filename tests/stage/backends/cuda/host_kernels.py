"""Kernels without matrix units on the host's CPU: the sources themselves, compiled as C++ around host_cuda.h.

`HostKernels` stands where `Kernels` does, so that grids, shared memory and arguments are the real ones too.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from stage.backends.cuda.compile import KERNELS, Family
from stage.backends.cuda.launch import Arguments
from stage.weights.quants import RawTensor

# A function that is PTX inside.
_FUNCTION = re.compile(
    r"^(?:template <[^\n]*>\n)?DEVICE [^\n]*\{(?:[^\n]*\}|\n(?:[^}\n][^\n]*\n|\n)*\})\n", re.MULTILINE
)
_DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(16\) )?(\w+) (\w+)\[\];")


def host_library(compiler: str, folder: Path, source: str) -> Path:
    """`source`, C++ that begins with host_cuda.h and includes kernels' sources, as a library in `folder`."""
    for path in KERNELS.iterdir():
        text = path.read_text()
        if path.name == "common.cuh":
            text = _FUNCTION.sub(lambda match: "" if "asm" in match[0] else match[0], text)
        (folder / path.name).write_text(_DYNAMIC.sub(r"\1* \2 = (\1*)dynamic_shared;", text))
    (folder / "host.cpp").write_text(source)
    library = folder / "host.so"
    here = str(Path(__file__).parent)
    command = [compiler, "-O1", "-std=c++17", "-fPIC", "-shared", "-w", "-I", here, "-I", str(folder)]
    subprocess.run([*command, str(folder / "host.cpp"), "-o", str(library)], check=True)
    return library


def compile_on_host(compiler: str, folder: Path, sources: Sequence[str], kernels: dict[str, str]) -> Path:
    """kernels: expression -> its structures, "LinearArgs" or "AttentionArgs, RopeArgs"."""
    lines = ['#include "host_cuda.h"', *(f'#include "{source}"' for source in sources)]
    lines.append(
        'extern "C" int host_launch(const char* name, const int* g, int threads, const void** args) {'
    )
    for expression, structures in kernels.items():
        arguments = ", ".join(f"*(const {s}*)args[{i}]" for i, s in enumerate(structures.split(", ")))
        call = f"launch({{g[0], g[1], g[2]}}, threads, [&] {{ {expression}({arguments}); }})"
        lines.append(f'    if (!strcmp(name, "{expression}")) return {call}, 1;')
    lines += ["    return 0;", "}"]
    return host_library(compiler, folder, "\n".join(lines))


class HostKernels:
    """Launches by name what `compile_on_host` made."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self.device = torch.device("cpu")
        self.arch = "sm_75"
        self.family = Family.FMA
        self.num_multiprocessors = 40
        self.expressions: list[str] = []

    def launch(
        self,
        source: str,
        expression: str,
        grid: tuple[int, int, int],
        threads: int,
        args: Arguments,
        shared_bytes: int = 0,
    ) -> None:
        assert shared_bytes <= 48 << 10, "more than a plain launch may ask for"
        structures = args if isinstance(args, tuple) else (args,)
        pointers = (ctypes.c_void_p * len(structures))(*map(ctypes.addressof, structures))
        self.expressions.append(expression)
        found = self._library.host_launch(expression.encode(), (ctypes.c_int * 3)(*grid), threads, pointers)
        assert found, f"{expression} was not compiled for the host"

    def check(self, code: object, doing: str) -> None:
        assert code == 0, doing


class HostUploader:
    """In place of pinned memory and streams."""

    def __init__(self, device: torch.device) -> None:
        pass

    def bytes(self, raw: RawTensor) -> torch.Tensor:
        return torch.from_numpy(np.array(raw.data))


def model_kernels(folder: Path) -> HostKernels:
    """What whole models of f16, Q8_0 and Q4_0 weights and heads of up to 64 elements are run with. Skips the
    test where there is no compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to run the device code on the host with")
    names = {f"fma_attention_prefill<{head}>": "AttentionArgs" for head in (32, 64)}
    names |= {f"fma_attention_decode<{head}>": "AttentionArgs, RopeArgs" for head in (32, 64)}
    names |= {"rope": "RopeArgs", "router": "RouterArgs", "combine": "CombineArgs"}
    names |= {"rms_norm": "NormArgs", "rms_operand": "OperandArgs", "gated<float>": "GatedArgs"}
    for name in ("F16", "Q8_0", "Q4_0"):
        names[f"embed<{name}>"] = "EmbedArgs"
        for rows in (1, 8, 16):
            for epilogue in ("STORE", "RESIDUAL", "GATED"):
                names[f"fma_linear<{name}, {name}, {rows}, {epilogue}, 8>"] = "LinearArgs"
    sources = ("fma_linear.cu", "fma_attention.cu", "rope.cu", "norm.cu", "experts.cu", "dequantize.cu")
    return HostKernels(compile_on_host(compiler, folder, sources, names))
