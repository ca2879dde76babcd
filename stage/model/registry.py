"""From a GGUF file to its `ModelSpec`: which architectures there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from common.errors import UnsupportedModelError
from common.gguf.reader import GGUFFile
from stage.model import gemma3, llama, phi3, qwen2, qwen3, qwen3moe
from stage.model.decoder import Decoder
from stage.model.spec import ModelSpec

ARCHITECTURES: Mapping[str, Callable[[Decoder], ModelSpec]] = {
    "gemma3": gemma3.build,
    "llama": llama.build,
    "phi3": phi3.build,
    "qwen2": qwen2.build,
    "qwen3": qwen3.build,
    "qwen3moe": qwen3moe.build,
}


def build_spec(file: GGUFFile, context_length: int | None = None) -> ModelSpec:
    """The model a file holds, with every hyperparameter and tensor accounted for.

    `context_length`: tokens the model is to be run with (it decides LongRoPE's factors); None: the model's
    own limit. Raises `UnsupportedModelError` naming an architecture, hyperparameter, tensor or tensor type
    that is not supported, `CorruptDataError` for what is missing or contradicts itself.
    """
    source = file.paths[0]
    kind = file.get("general.type", str, "model")
    if kind != "model":
        raise UnsupportedModelError(f"{source}: general.type is {kind!r}; only whole models are run")
    architecture = file.require("general.architecture", str)
    build = ARCHITECTURES.get(architecture)
    if build is None:
        raise UnsupportedModelError(
            f"{source}: architecture {architecture!r} is not supported (supported are "
            f"{', '.join(ARCHITECTURES)})"
        )
    return build(Decoder(file, context_length))
