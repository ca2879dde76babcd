"""Reads a model's hyperparameters, the metadata keys `<architecture>.*`, and remembers which were read.

Values are checked as they are read. What is left over in the end must be known to change nothing, or the
model is refused: a hyperparameter that is silently ignored gives plausible nonsense. Names of tensors and
what a hyperparameter means are not known here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

import numpy as np

from common.errors import CorruptDataError, UnsupportedModelError
from common.gguf.reader import GGUFFile

T = TypeVar("T")

# Keys that describe the model and change no arithmetic, whatever their value.
_DESCRIPTIVE = {
    "context_length",
    "vocab_size",  # the embedding's rows count, and are checked against the tokenizer
    "tensor_data_layout",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",  # read where YaRN and LongRoPE need it
}

# Keys of mechanisms that are not implemented, with the values that leave these out.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.shared_kv_layers": (0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0, 1),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_feed_forward_length": (0,),
    "expert_gating_func": (0, 1),  # 1: softmax
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0, 1),
    "interleave_moe_layer_step": (0, 1),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (0, 1),
    "rope.scaling.factor": (0, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
    "router_logit_softcapping": (0,),
    "use_parallel_residual": (False,),
}


class Hyperparameters:
    """The hyperparameters of one file. Keys are given without the architecture's name in front.

    Every reading method raises `CorruptDataError` for a value of another type or outside its range, and for
    a missing key when no default is given.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.architecture = file.require("general.architecture", str)
        self._file = file
        self._source = str(file.paths[0])
        self._read: set[str] = set()

    def where(self, key: str) -> str:
        """The file and the key, for a message about its value."""
        return f"{self._source}: metadata {self._full(key)!r}"

    def has(self, key: str) -> bool:
        return self._full(key) in self._file.metadata

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        return self._count(key, self._value(key, int, default))

    def optional_count(self, key: str) -> int | None:
        """A whole number of at least 1; None where it is 0 or missing."""
        value = self._value(key, int, 0)
        return self._count(key, value) if value else None

    def count_per_layer(
        self, key: str, num_layers: int, default: tuple[int, ...] | None = None
    ) -> tuple[int, ...]:
        """A whole number of at least 1 for each layer, from a single number or an array of them."""
        if default is not None and not self.has(key):
            return default
        if not self.is_array(key):
            return (self.count(key),) * num_layers
        return tuple(self._count(key, value) for value in self.array(key, num_layers))

    def is_array(self, key: str) -> bool:
        return isinstance(self._file.metadata.get(self._full(key)), np.ndarray | list)

    def array(self, key: str, length: int) -> list[int]:
        """An array of whole numbers or flags, one for each layer."""
        self._read.add(key)
        values = np.asarray(self._file.metadata[self._full(key)])
        if values.dtype.kind not in "iub":
            raise CorruptDataError(f"{self.where(key)} is not an array of whole numbers")
        if len(values) != length:
            raise CorruptDataError(
                f"{self.where(key)} has {len(values)} values, the model has {length} layers"
            )
        return [int(value) for value in values]

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._value(key, float, default)
        if not math.isfinite(value):
            raise CorruptDataError(f"{self.where(key)} is {value}, expected is a finite number")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.number(key, default)
        if value <= 0:
            raise CorruptDataError(f"{self.where(key)} is {value}, expected is a number above 0")
        return value

    def text(self, key: str, default: str) -> str:
        return self._value(key, str, default)

    def accept(self, key: str) -> None:
        """Counts a key as read: its value does not matter to this architecture."""
        self._read.add(key)

    def refuse_unread(self) -> None:
        """Raises `UnsupportedModelError` naming every key that was not read and could change the result."""
        prefix = self.architecture + "."
        unread = [
            f"{name} = {_shown(value)}"
            for name, value in self._file.metadata.items()
            if name.startswith(prefix) and not self._is_harmless(name.removeprefix(prefix), value)
        ]
        if unread:
            raise UnsupportedModelError(
                f"{self._source}: {self.architecture} with these hyperparameters is not supported: "
                + ", ".join(unread)
            )

    def _is_harmless(self, key: str, value: object) -> bool:
        return (
            key in self._read
            or key in _DESCRIPTIVE
            or (isinstance(value, bool | int | float) and value in _NEUTRAL.get(key, ()))
        )

    def _full(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def _value(self, key: str, kind: type[T], default: T | None) -> T:
        self._read.add(key)
        if default is None:
            return self._file.require(self._full(key), kind)
        return self._file.get(self._full(key), kind, default)

    def _count(self, key: str, value: int) -> int:
        if value < 1:
            raise CorruptDataError(f"{self.where(key)} is {value}, expected is at least 1")
        return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
