"""The repacking kernels on the host's CPU: repack.cu itself, compiled as C++."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from stage.backends.cuda.compile import KERNELS
from stage.backends.cuda.repack import CONVERTED_TYPES
from stage.backends.cuda.repacker import (
    MatrixRecipe,
    arguments,
    chunk_fields,
    chunk_tiles,
    conversion,
    element_bytes,
)
from stage.backends.cuda.tile_map import tile_map

HERE = Path(__file__).parent


class HostRepack:
    """Stands where `Repacker` does. Skips the test where there is no compiler."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            pytest.skip("no C++ compiler to run the device code on the host with")
        source = (KERNELS / "repack.cu").read_text()
        source = re.sub(r'#include "common.cuh"', "", source)
        (folder / "repack.h").write_text(source.replace("extern __shared__ uint4 shared[];", ""))
        library = folder / "repack.so"
        command = [compiler, "-O1", "-std=c++17", "-fPIC", "-shared", "-w"]
        command += [f'-DKERNEL="{folder / "repack.h"}"', str(HERE / "host_repack.cpp"), "-o", str(library)]
        subprocess.run(command, check=True)
        self._library = ctypes.CDLL(str(library))

    def run(self, recipe: MatrixRecipe, blob: int, slot: int) -> None:
        """Addresses."""
        if recipe.ggml_type in CONVERTED_TYPES:
            args, grid = conversion(recipe, blob, slot)
            self._library.run_convert(element_bytes(recipe.ggml_type), ctypes.byref(args), *grid)
            return
        found = tile_map(recipe.ggml_type)
        tiles = chunk_tiles(found)
        fields, flips = chunk_fields(found, tiles), found.flips
        args, grid = arguments(recipe, found, tiles, blob, slot)
        args.fields, args.flips = fields.ctypes.data, flips.ctypes.data
        self._library.run(found.field_bits, ctypes.byref(args), *grid)


def aligned_bytes(nbytes: int) -> np.ndarray:
    """uint8, of which nothing is to be relied on, at a multiple of 64."""
    memory = np.full(nbytes + 64, 0xEE, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes]
