"""The CPU backend: native kernels on the GGUF's own bytes. See docs/cpu.md for which path does what."""

from stage.backends.cpu.backend import CpuBackend, variants

__all__ = ["CpuBackend", "variants"]
