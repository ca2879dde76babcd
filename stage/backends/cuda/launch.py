"""Kernels on one GPU: loads what `compile` makes, and launches it through the driver on torch's stream.

Kernels take C structures. Launches are programmatic (a kernel's blocks may start while its
predecessor drains, and wait inside for its results) where the GPU can: every kernel of ours waits before it
reads what another has written.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch

from common.errors import DeviceLostError, PipeLLMError
from stage.backends.cuda.compile import KernelName, capability, compile_kernel, family_of

_PLAIN_SHARED_BYTES = 44 * 1024  # more must be asked for: beyond 48 KiB with what a kernel has itself


Arguments = ctypes.Structure | tuple[ctypes.Structure, ...]


class LaunchObserver(Protocol):
    """Hears of every launch, on the stream that it is put on."""

    def before(self) -> None: ...

    def after(self, expression: str, grid: tuple[int, int, int], args: Arguments) -> None: ...


class Kernels:
    """The loaded kernels of one device; makes each on first use.

    `arch`: another than the device's own, as PTX that its driver compiles ("compute_75"): so that the kernels
    for older GPUs run on a newer one."""

    def __init__(self, device: torch.device, programmatic: bool = True, arch: str | None = None) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self.device = device
        torch.cuda.init()
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # makes the context that modules are loaded into
            torch.zeros(1, device=device)
            properties = torch.cuda.get_device_properties(device)
        self.arch = arch or f"sm_{properties.major}{properties.minor}"
        self.family = family_of(self.arch)
        self.num_multiprocessors: int = properties.multi_processor_count
        self.programmatic = programmatic and capability(self.arch) >= 90
        self.observer: LaunchObserver | None = None
        self._functions: dict[tuple[str, str], Any] = {}
        self._shared: dict[tuple[str, str], int] = {}
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        self._attributes = [attribute]

    def check(self, code: Any, doing: str) -> None:
        if int(code) != 0:
            _, name = self._driver.cuGetErrorName(code)
            _, text = self._driver.cuGetErrorString(code)
            # From 700 on (an illegal address is 700) the context is broken for good; 2 is out of memory.
            kind = DeviceLostError if int(code) >= 700 or int(code) == 2 else PipeLLMError
            raise kind(f"CUDA error while {doing}: {name.decode()}: {text.decode()}")

    def prepare(self, names: set[tuple[str, str]]) -> None:
        """Compiles what is not in the cache, several at a time, and loads all. (source, expression) each."""
        missing = sorted(names - self._functions.keys())
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda n: compile_kernel(KernelName(*n), self.arch), missing))
        for name in missing:
            self._load(name)

    def _load(self, name: tuple[str, str]) -> Any:
        compiled = compile_kernel(KernelName(*name), self.arch)
        with torch.cuda.device(self.device):
            code, module = self._driver.cuModuleLoadData(compiled.cubin)
            self.check(code, f"loading {name[1]}")
            code, function = self._driver.cuModuleGetFunction(module, compiled.symbol.encode())
            self.check(code, f"loading {name[1]}")
        self._functions[name] = function
        return function

    def launch(
        self,
        source: str,
        expression: str,
        grid: tuple[int, int, int],
        threads: int,
        args: Arguments,
        shared_bytes: int = 0,
    ) -> None:
        """Puts one launch on torch's current stream. Arguments are copied; pointers in them must stay
        valid."""
        name = (source, expression)
        function = self._functions.get(name) or self._load(name)
        driver = self._driver
        if shared_bytes > max(_PLAIN_SHARED_BYTES, self._shared.get(name, 0)):
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (code,) = driver.cuFuncSetAttribute(function, limit, shared_bytes)
            self.check(code, f"asking for {shared_bytes} bytes of shared memory for {expression}")
            self._shared[name] = shared_bytes
        stream = torch.cuda.current_stream(self.device).cuda_stream
        structures = args if isinstance(args, tuple) else (args,)
        pointers = (ctypes.c_void_p * len(structures))(*map(ctypes.addressof, structures))
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared_bytes
        config.hStream = driver.CUstream(stream)
        if self.programmatic:
            config.attrs = self._attributes
            config.numAttrs = 1
        if self.observer is not None:
            self.observer.before()
        (code,) = driver.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0)
        self.check(code, f"launching {expression}")
        if self.observer is not None:
            self.observer.after(expression, grid, args)
