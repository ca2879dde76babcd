"""From metadata to a `RopeSpec`: which scaling a file asks for, and with which constants."""

from __future__ import annotations

from common.errors import CorruptDataError, UnsupportedModelError
from stage.model.hyperparameters import Hyperparameters
from stage.model.spec import RopeKind, RopeSpec, YarnSpec
from stage.model.tensors import TensorTable

_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_FACTORS = "rope_freqs.weight"


def read_rope(
    hyperparameters: Hyperparameters,
    tensors: TensorTable,
    kind: RopeKind,
    head_dim: int,
    context_length: int,
) -> RopeSpec:
    """The rotation of a model's (global) layers.

    `context_length`: tokens the model is run with. LongRoPE's long factors hold when it exceeds the
    original context length, the short ones otherwise.
    """
    dim = hyperparameters.count("rope.dimension_count", head_dim)
    if dim > head_dim or dim % 2:
        raise CorruptDataError(
            f"{hyperparameters.where('rope.dimension_count')} is {dim}, expected is an even number, at most "
            f"a head's size, {head_dim}"
        )
    freq_base = hyperparameters.number("rope.freq_base", 10000.0)
    if freq_base <= 1:
        raise CorruptDataError(
            f"{hyperparameters.where('rope.freq_base')} is {freq_base}, expected is above 1"
        )
    scaling = hyperparameters.text("rope.scaling.type", "linear")
    if scaling not in ("none", "linear", "yarn", "longrope"):
        raise UnsupportedModelError(
            f"{hyperparameters.where('rope.scaling.type')} is {scaling!r}; supported are none, linear, yarn "
            "and longrope"
        )
    return RopeSpec(
        kind=kind,
        dim=dim,
        freq_base=freq_base,
        linear_factor=_factor(hyperparameters) if scaling == "linear" else 1.0,
        yarn=_yarn(hyperparameters) if scaling == "yarn" else None,
        factors=_factors(hyperparameters, tensors, dim, scaling, context_length),
        magnitude=hyperparameters.positive("rope.scaling.attn_factor", 1.0),
    )


def _factor(hyperparameters: Hyperparameters) -> float:
    """By how much positions are compressed; `rope.scale_linear` is the key's old name, 0 means 1."""
    old = hyperparameters.number("rope.scale_linear", 0.0)
    factor = hyperparameters.number("rope.scaling.factor", old) or 1.0
    if factor < 0:
        raise CorruptDataError(
            f"{hyperparameters.where('rope.scaling.factor')} is {factor}, expected is a number above 0"
        )
    return factor


def _yarn(hyperparameters: Hyperparameters) -> YarnSpec:
    original = hyperparameters.count("context_length")
    return YarnSpec(
        factor=_factor(hyperparameters),
        original_context_length=hyperparameters.count("rope.scaling.original_context_length", original),
        beta_fast=hyperparameters.positive("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=hyperparameters.positive("rope.scaling.yarn_beta_slow", 1.0),
        ext_factor=hyperparameters.number("rope.scaling.yarn_ext_factor", 1.0),
        attn_factor=hyperparameters.positive("rope.scaling.yarn_attn_factor", 1.0),
    )


def _factors(
    hyperparameters: Hyperparameters,
    tensors: TensorTable,
    dim: int,
    scaling: str,
    context_length: int,
) -> str | None:
    """The tensor of frequency factors that holds at this context length, if the model has one."""
    if scaling == "longrope" or tensors.has(_LONG) or tensors.has(_SHORT):
        long, short = (tensors.ref(name, (dim // 2,)).name for name in (_LONG, _SHORT))
        original = hyperparameters.count(
            "rope.scaling.original_context_length", hyperparameters.count("context_length")
        )
        return long if context_length > original else short
    return tensors.ref(_FACTORS, (dim // 2,)).name if tensors.has(_FACTORS) else None
