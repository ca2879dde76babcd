"""Every kernel compiles for the supported architectures, without a GPU, and spills little."""

from __future__ import annotations

import importlib.util
import io
import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest

from common.errors import UnsupportedModelError
from stage.backends.cuda.compile import (
    ARCHITECTURES,
    Family,
    KernelName,
    compile_kernel,
    compiler_knows,
    family_of,
)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None,
    reason="needs cuda-core with NVRTC: pip install 'pipellm[gpu]'",
)

TYPES = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "MXFP4", "F16"),
)
EPILOGUES = ("STORE", "RESIDUAL", "GATED")
HEADS = (32, 64, 96, 128, 160, 192, 256)
# Each generation's instruction set; PIPELLM_ALL_KERNELS=1 takes every architecture and instantiation.
SOME_ARCHITECTURES = ("sm_70", "sm_75", "sm_80", "sm_90", "sm_120")
EVERYTHING = bool(os.environ.get("PIPELLM_ALL_KERNELS"))


def kernels(everything: bool, family: Family) -> list[KernelName]:
    """All instantiations, or one of each kernel and each type."""
    names = [
        KernelName("norm.cu", "rms_norm"),
        KernelName("norm.cu", "rms_operand"),
        *(KernelName("norm.cu", f"gated<{element}>") for element in ("float", "u16")),
        KernelName("rope.cu", "rope"),
        KernelName("experts.cu", "router"),
        KernelName("experts.cu", "combine"),
        KernelName("read.cu", "read_memory"),
        *(KernelName("sample.cu", name) for name in ("greedy", "adjust", "sample<false>", "sample<true>")),
        *(KernelName("repack.cu", f"repack<{bits}>") for bits in (1, 2, 4, 8)),
        *(KernelName("repack.cu", f"convert<{size}>") for size in (2, 4)),
    ]
    if family == Family.FMA:
        return names + fma_kernels(everything)
    for head in HEADS if everything else (128, 256):
        names.append(KernelName("attention.cu", f"attention_prefill<{head}>"))
        names += [KernelName("attention.cu", f"attention_decode<{head}, {warps}>") for warps in (4, 8)]
    for i, name in enumerate(TYPES):
        names += [KernelName("dequantize.cu", f"{kernel}<{name}>") for kernel in ("dequantize", "embed")]
        for j, epilogue in enumerate(EPILOGUES):
            if not everything and j != i % 3:
                continue
            for single in ("true", "false"):
                names += [KernelName("matvec.cu", f"matvec<{name}, {name}, {epilogue}, {single}, 8>")]
            for n in (2, 4, 8) if everything else (8,) if name in ("Q4_K", "Q6_K", "F16") else ():
                names += [KernelName("matmul.cu", f"matmul<{name}, {name}, {n}, {epilogue}>")]
    return names


def fma_kernels(everything: bool) -> list[KernelName]:
    """In place of the matrix units'."""
    names = [
        KernelName("fma_attention.cu", f"fma_attention_{what}<{head}>")
        for head in (HEADS if everything else (128, 256))
        for what in ("prefill", "decode")
    ]
    for i, name in enumerate(TYPES):
        names += [KernelName("dequantize.cu", f"{kernel}<{name}>") for kernel in ("dequantize", "embed")]
        for rows in (1, 2, 4, 8, 16) if everything else (16,) if name in ("Q4_K", "Q6_K", "F16") else (1,):
            for epilogue in EPILOGUES if everything else EPILOGUES[i % 3 : i % 3 + 1]:
                expression = f"fma_linear<{name}, {name}, {rows}, {epilogue}, 8>"
                names.append(KernelName("fma_linear.cu", expression))
    return names


def warpgroup_kernels(everything: bool) -> list[KernelName]:
    """Those for sm_90 alone."""
    names = [
        KernelName("attention_warpgroup.cu", f"attention_warpgroup<{head}, 3>")
        for head in HEADS
        if head <= 128 and (everything or head == 128)
    ]
    for i, name in enumerate(TYPES):
        for rows in (16, 32, 64) if everything else (64,):
            for epilogue in EPILOGUES if everything else EPILOGUES[i % 3 : i % 3 + 1]:
                for groups, splits in ((4, 1), (2, 8)):
                    expression = f"matmul_warpgroup<{name}, {name}, {rows}, {epilogue}, {groups}, {splits}>"
                    names.append(KernelName("warpgroup.cu", expression))
    return names


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("arch", ARCHITECTURES if EVERYTHING else SOME_ARCHITECTURES)
def test_all_kernels_compile(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not compiler_knows(arch):
        pytest.skip(f"the installed NVRTC does not know {arch}: run with CUDA 12's")
    monkeypatch.setenv("PIPELLM_CACHE", str(tmp_path))

    def compile_one(name: KernelName) -> tuple[str, int, int]:
        report = io.StringIO()
        compiled = compile_kernel(name, arch, report)
        assert compiled.cubin.startswith(b"\x7fELF")
        text = report.getvalue()
        registers = max(map(int, re.findall(r"Used (\d+) registers", text)))
        spilled = max(map(int, re.findall(r"(\d+) bytes spill stores", text)))
        return name.expression, registers, spilled

    with ThreadPoolExecutor(2) as pool:
        names = kernels(EVERYTHING, family_of(arch)) + (
            warpgroup_kernels(EVERYTHING) if arch == "sm_90" else []
        )
        rows = list(pool.map(compile_one, names))
    report = [
        f"{arch} {expression:48s} {registers:4d} registers {spilled:4d} bytes spilled"
        for expression, registers, spilled in rows
    ]
    with capsys.disabled() if EVERYTHING else nullcontext():
        print(*report, sep="\n")
    assert max(spilled for _, _, spilled in rows) <= 1024


def test_a_compiled_kernel_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELLM_CACHE", str(tmp_path))
    name = KernelName("norm.cu", "rms_norm")
    first = compile_kernel(name, "sm_90")
    (path,) = (tmp_path / "kernels").iterdir()
    stamp = path.stat().st_mtime_ns
    assert compile_kernel(name, "sm_90") == first
    assert path.stat().st_mtime_ns == stamp
    path.write_bytes(b"half a file")
    assert compile_kernel(name, "sm_90") == first


def test_ptx_for_the_driver_to_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELLM_CACHE", str(tmp_path))
    name = KernelName("fma_linear.cu", "fma_linear<Q4_K, Q6_K, 1, STORE, 8>")
    made = compile_kernel(name, "compute_75")
    assert made.cubin.startswith(b"//")
    assert made.cubin.endswith(b"\0")
    assert made.symbol.encode() in made.cubin
    assert compile_kernel(name, "compute_75") == made


@pytest.mark.parametrize("arch", ["sm_52", "compute_60"])
def test_an_architecture_that_is_not_supported_says_so(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELLM_CACHE", str(tmp_path))
    with pytest.raises(UnsupportedModelError, match=f"do not support {arch}"):
        compile_kernel(KernelName("norm.cu", "rms_norm"), arch)


def test_an_unwritable_cache_only_costs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("PIPELLM_CACHE", str(blocker))
    assert compile_kernel(KernelName("norm.cu", "rms_norm"), "sm_80").cubin.startswith(b"\x7fELF")
