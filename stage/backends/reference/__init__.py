"""The reference backend: plain torch, float32, on the CPU. The living definition of every operation."""

from stage.backends.reference.backend import ReferenceBackend

__all__ = ["ReferenceBackend"]
