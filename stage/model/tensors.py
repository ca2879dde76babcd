"""The tensors of a file as an architecture asks for them, checked, and a record of which it asked for.

Shapes are in numpy's order here, [out_features, in_features]; messages show them as GGUF tools do, columns
first. What a tensor is for is not known here.
"""

from __future__ import annotations

from common.errors import CorruptDataError, UnsupportedModelError
from common.gguf.reader import GGUFFile
from stage.model.spec import LinearSpec, NormSpec, TensorRef
from stage.weights.quants import BLOCK_LAYOUTS

_MAX_NAMES_SHOWN = 8


class TensorTable:
    """The tensor table of one file.

    The methods that hand out references raise `CorruptDataError` for a tensor that is missing or has another
    shape, and `UnsupportedModelError` for one of a type that is not read.
    """

    def __init__(self, file: GGUFFile) -> None:
        self._tensors = file.tensors
        self._source = str(file.paths[0])
        self._read: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self._tensors

    def rows(self, name: str) -> int | None:
        """Rows of a matrix as the file has it; None where there is no such matrix."""
        tensor = self._tensors.get(name)
        return tensor.shape[1] if tensor is not None and len(tensor.shape) == 2 else None

    def ref(self, name: str, shape: tuple[int, ...]) -> TensorRef:
        """A whole tensor of this shape."""
        tensor = self._tensors.get(name)
        expected = list(shape[::-1])
        if tensor is None:
            raise CorruptDataError(
                f"{self._source}: tensor {name!r} is missing, expected with shape {expected}"
            )
        if list(tensor.shape) != expected:
            raise CorruptDataError(
                f"{self._source}: tensor {name!r} has shape {list(tensor.shape)}, expected is {expected}"
            )
        if tensor.ggml_type not in BLOCK_LAYOUTS:
            known = ", ".join(ggml_type.name for ggml_type in BLOCK_LAYOUTS)
            raise UnsupportedModelError(
                f"{self._source}: tensor {name!r} is stored as {tensor.ggml_type.name}, which is not "
                f"supported (supported are {known})"
            )
        self._read.add(name)
        return TensorRef(name)

    def linear(self, name: str, out_features: int, in_features: int, num_experts: int = 0) -> LinearSpec:
        """NAME.weight, and NAME.bias where the file has it; a stack of `num_experts` where that is given."""
        return self.linears(name, (out_features,), in_features, num_experts)[0]

    def linears(
        self, name: str, out_features: tuple[int, ...], in_features: int, num_experts: int = 0
    ) -> tuple[LinearSpec, ...]:
        """Several linears whose rows follow one another in NAME.weight (and in NAME.bias)."""
        stack = (num_experts,) if num_experts else ()
        rows = sum(out_features)
        self.ref(f"{name}.weight", (*stack, rows, in_features))
        has_bias = self.has(f"{name}.bias")
        if has_bias:
            self.ref(f"{name}.bias", (*stack, rows))
        specs = []
        start = 0
        for features in out_features:
            end = start + features
            whole = features == rows
            specs.append(
                LinearSpec(
                    weight=_rows(f"{name}.weight", start, end, whole),
                    in_features=in_features,
                    out_features=features,
                    bias=_rows(f"{name}.bias", start, end, whole) if has_bias else None,
                )
            )
            start = end
        return tuple(specs)

    def norm(self, name: str, size: int, eps: float) -> NormSpec:
        return NormSpec(self.ref(f"{name}.weight", (size,)).name, size, eps)

    def refuse_unread(self) -> None:
        """Raises `UnsupportedModelError` naming the tensors that no part of the model reads."""
        unread = [name for name in self._tensors if name not in self._read]
        if unread:
            more = f" and {len(unread) - _MAX_NAMES_SHOWN} more" if len(unread) > _MAX_NAMES_SHOWN else ""
            raise UnsupportedModelError(
                f"{self._source}: these tensors have no part in a model of this architecture as it is "
                f"supported: {', '.join(unread[:_MAX_NAMES_SHOWN])}{more}"
            )


def _rows(name: str, start: int, end: int, whole: bool) -> TensorRef:
    return TensorRef(name) if whole else TensorRef(name, start, end)
