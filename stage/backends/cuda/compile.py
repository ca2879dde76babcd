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
from functools import cache
from pathlib import Path

from common.errors import PipeLLMError, UnsupportedModelError

KERNELS = Path(__file__).parent / "kernels"

# Compute capabilities the kernels are written for (matrix units with f16 operands and float32 sums,
# cp.async).
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121")


@dataclass(frozen=True)
class KernelName:
    """One kernel: its source file, and the instantiation as C++ names it."""

    source: str  # e.g. "matvec.cu"
    expression: str  # e.g. "matvec<Q4_K, Q4_K, STORE>"


@dataclass(frozen=True)
class Compiled:
    cubin: bytes
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
def _compiler_version() -> str:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise PipeLLMError(
            "the CUDA backend needs cuda-core with NVRTC: pip install 'pipellm[gpu]' "
            f"(or 'cuda-core[cu13]'); {error}"
        ) from error
    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"


def _path(name: KernelName, arch: str) -> Path:
    text = "\0".join((_sources_digest(), _compiler_version(), arch, name.source, name.expression))
    return cache_folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:40]}.cubin"


def compile_kernel(name: KernelName, arch: str, report: io.StringIO | None = None) -> Compiled:
    """The kernel for one architecture ("sm_90"), from the cache or compiled now.

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
    return Compiled(cubin, symbol.decode()) if cubin.startswith(b"\x7fELF") else None


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
    if arch not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"the CUDA kernels do not support {arch}; they are written for {', '.join(ARCHITECTURES)}"
        )
    options = ProgramOptions(
        name=name.source,
        arch=arch,
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
