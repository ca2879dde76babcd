"""Compiles the CUDA sources for the GPU that is there, at first use, and keeps the result on disk.

NVRTC (through cuda-core) needs neither a CUDA toolkit nor a GPU. A compiled kernel is found again by what
made it: all sources, the options, the architecture and the compiler's version. Several processes may start at
once: a file appears whole, by renaming, so that the worst case is the same work done twice.
"""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
import threading
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path

from common.errors import PipeLLMError, UnsupportedModelError

KERNELS = Path(__file__).parent / "kernels"

# Compute capabilities the kernels are written for. CUDA 13's compiler knows no 7.0, CUDA 12's does.
ARCHITECTURES = (
    *("sm_70", "sm_75", "sm_80", "sm_86", "sm_89"),
    *("sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121"),
)


class Family(Enum):
    """Which kernels compute products and attention."""

    MATRIX = "matrix units with f16 operands and float32 sums (m16n8k16), cp.async"
    FMA = "float32 multiply-adds alone"


def capability(arch: str) -> int:
    """90 of "sm_90" or "compute_90"."""
    return int(arch.partition("_")[2])


def family_of(arch: str) -> Family:
    return Family.MATRIX if capability(arch) >= 80 else Family.FMA


# Sources for one architecture alone, with all its own instructions ("sm_90a").
SPECIFIC = {"warpgroup.cu": "sm_90", "attention_warpgroup.cu": "sm_90"}


@dataclass(frozen=True)
class KernelName:
    """One kernel: its source file, and the instantiation as C++ names it."""

    source: str  # e.g. "matvec.cu"
    expression: str  # e.g. "matvec<Q4_K, Q4_K, STORE>"


@dataclass(frozen=True)
class Compiled:
    cubin: bytes  # or PTX, for the driver to compile, where the architecture is a virtual one
    symbol: str  # the mangled name


def cache_folder() -> Path:
    """Where compiled kernels are kept: $PIPELLM_CACHE, else pipellm/ under the user's cache folder."""
    root = os.environ.get("PIPELLM_CACHE")
    if root:
        return Path(root) / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pipellm" / "kernels"


@cache
def _sources_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(KERNELS.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@cache
def _compiler() -> tuple[str, frozenset[str]]:
    """NVRTC's version and the architectures it knows."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise PipeLLMError(
            "the CUDA backend needs cuda-core with NVRTC: pip install 'pipellm[gpu]' "
            f"(or 'cuda-core[cu13]'); {error}"
        ) from error
    _, major, minor = nvrtc.nvrtcVersion()
    _, known = nvrtc.nvrtcGetSupportedArchs()
    return f"{major}.{minor}", frozenset(f"sm_{number}" for number in known)


def compiler_knows(arch: str) -> bool:
    return f"sm_{capability(arch)}" in _compiler()[1]


def _path(name: KernelName, arch: str) -> Path:
    text = "\0".join((_sources_digest(), _compiler()[0], arch, name.source, name.expression))
    return cache_folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:40]}.cubin"


def compile_kernel(name: KernelName, arch: str, report: io.StringIO | None = None) -> Compiled:
    """The kernel for one architecture ("sm_90", or "compute_75": as PTX), from the cache or compiled now.

    `report`, if given, always compiles and receives ptxas's account of registers and spills.
    Raises PipeLLMError with the compiler's message when a source does not compile.
    """
    path = _path(name, arch)
    if report is None and (compiled := _read(path)) is not None:
        return compiled
    compiled = _compile(name, arch, report)
    _write(path, compiled)
    return compiled


def _read(path: Path) -> Compiled | None:
    """File layout: the symbol, a newline, the cubin."""
    try:
        symbol, _, cubin = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    return Compiled(cubin, symbol.decode()) if cubin.startswith((b"\x7fELF", b"//")) else None


def _write(path: Path, compiled: Compiled) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(compiled.symbol.encode() + b"\n" + compiled.cubin)
        os.replace(file.name, path)
    except OSError:
        return  # a cache that cannot be written costs time at the next start, nothing else


_importing = threading.Lock()  # cuda.core cannot be imported by two threads at once


def _compile(name: KernelName, arch: str, report: io.StringIO | None) -> Compiled:
    with _importing:
        from cuda.core import Program, ProgramOptions
    real = f"sm_{capability(arch)}"
    if real not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"the CUDA kernels do not support {arch}; they are written for {', '.join(ARCHITECTURES)}"
        )
    if not compiler_knows(arch):
        raise UnsupportedModelError(
            f"the installed compiler (NVRTC {_compiler()[0]}) does not know {arch}; CUDA 12's knows 7.0: "
            "pip install 'pipellm[gpu-cu12]', with a torch that has kernels for that GPU (docs/gpu.md)"
        )
    if arch != real:
        return _compile_ptx(name, arch)
    options = ProgramOptions(
        name=name.source,
        arch=f"{arch}a" if name.source in SPECIFIC else arch,
        std="c++17",
        include_path=str(KERNELS),
        ptxas_options=["-v"] if report is not None else None,
    )
    try:
        program = Program((KERNELS / name.source).read_text(), "c++", options)
        code = program.compile("cubin", name_expressions=(name.expression,), logs=report)
        symbol = code.symbol_mapping[name.expression]
    except Exception as error:
        raise PipeLLMError(
            f"{name.source}: {name.expression} does not compile for {arch}: {error}"
        ) from error
    return Compiled(bytes(code.code), symbol.decode() if isinstance(symbol, bytes) else symbol)


def _compile_ptx(name: KernelName, arch: str) -> Compiled:
    """Through NVRTC's own interface: cuda-core would ask the driver, and there need be none."""
    from cuda.bindings import nvrtc

    source, expression = (KERNELS / name.source).read_bytes(), name.expression.encode()
    options = (f"--gpu-architecture={arch}", "--std=c++17", f"--include-path={KERNELS}")
    _, program = nvrtc.nvrtcCreateProgram(source, name.source.encode(), 0, [], [])
    nvrtc.nvrtcAddNameExpression(program, expression)
    (code,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if int(code) != 0:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise PipeLLMError(
            f"{name.source}: {name.expression} does not compile for {arch}: {log.decode(errors='replace')}"
        )
    _, symbol = nvrtc.nvrtcGetLoweredName(program, expression)
    _, size = nvrtc.nvrtcGetPTXSize(program)
    ptx = b" " * size  # with the zero that the driver expects at its end
    nvrtc.nvrtcGetPTX(program, ptx)
    return Compiled(ptx.lstrip(), symbol.decode())
