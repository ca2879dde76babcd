"""Builds the CPU backend's native library next to its Python code; everything else is in pyproject.toml.

The library is plain C++ behind a C interface (no Python headers), loaded with ctypes. Its kernels are one
source compiled once for each instruction set, with flags of its own; the choice is made at run time. Where no
compiler is found the installation still succeeds, and the reference backend serves.
"""

from __future__ import annotations

import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("stage/backends/cpu/native")
COMMON_FLAGS = [
    "-std=gnu++20",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
    "-pthread",
]
X86 = {
    "plain": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx2_vnni": ["-mavx2", "-mfma", "-mf16c", "-mavxvnni"],
    "avx512": [
        "-mavx512f",
        "-mavx512bw",
        "-mavx512vl",
        "-mavx512dq",
        "-mavx512vnni",
        "-mfma",
        "-mf16c",
        "-mprefer-vector-width=256",
    ],
}
ARM = {"plain": [], "neon": ["-march=armv8.2-a+dotprod"]}
MACHINES = {"x86_64": X86, "AMD64": X86, "aarch64": ARM, "arm64": ARM}
# For `make sanitize`: the kernel tests with every bad access and undefined operation an error.
SANITIZE = [
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
    "-g1",
    "-O1",
]
SANITIZE_VARIABLE = "PIPELLM_SANITIZE"
# The fallback favours a short build: it is for correctness where nothing better runs.
OPTIMISE = {"plain": "-O1"}


class BuildNative(build_ext):
    """Compiles the translation units side by side and links them into `_native.so`."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        try:
            self._build(ext)
        except Exception as error:  # no compiler, or one that is too old: whatever it was, say so and go on
            print(
                f"warning: the native CPU backend was not built ({error}); the slower reference backend "
                "serves instead. Install g++ (GCC 11 or newer) and install again to get it.",
                file=sys.stderr,
            )

    def _build(self, ext: Extension) -> None:
        checks = SANITIZE if os.environ.get(SANITIZE_VARIABLE) else []
        variants = MACHINES.get(platform.machine(), {"plain": []})
        units = [
            (str(path), path.stem, ["-O2"])
            for path in sorted(NATIVE.glob("*.cpp"))
            if path.name != "variant.cpp"
        ]
        for variant, flags in variants.items():
            optimise = OPTIMISE.get(variant, "-O3")
            defines = [f"-DPIPELLM_VARIANT={variant}"]
            units.append((str(NATIVE / "variant.cpp"), variant, [optimise, *defines, *flags]))

        def compile_unit(unit: tuple[str, str, list[str]]) -> str:
            source, name, flags = unit
            out = os.path.join(self.build_temp, name)
            (built,) = self.compiler.compile(
                [source], output_dir=out, extra_postargs=COMMON_FLAGS + flags + checks, depends=ext.depends
            )
            return built

        with ThreadPoolExecutor(os.cpu_count()) as workers:  # the longest first
            objects = list(workers.map(compile_unit, reversed(units)))
        self.compiler.link_shared_object(
            objects, self.get_ext_fullpath(ext.name), extra_postargs=["-pthread", *checks], target_lang="c++"
        )


setup(
    ext_modules=[
        Extension(
            "stage.backends.cpu._native",
            sources=[str(path) for path in sorted(NATIVE.glob("*.cpp"))],
            depends=[str(path) for path in sorted(NATIVE.glob("*.h"))],
            language="c++",
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildNative},
)
