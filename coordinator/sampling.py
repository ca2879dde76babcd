"""Sampling options: checked, and every default filled in. The request's own, else the model file's, else
llama.cpp's."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from common.errors import CorruptDataError, InvalidRequestError, UnsupportedModelError
from protos import model_pb2, stage_pb2

_PREFIX = "general.sampling."


@dataclass(frozen=True)
class _Number:
    default: float
    least: float
    most: float = math.inf
    file_key: str = ""  # below general.sampling; none if files cannot say
    whole: bool = False

    def accepts(self, value: float) -> bool:
        """False for NaN and infinity too, and where a float32 cannot hold it."""
        return math.isfinite(value) and self.least <= value <= min(self.most, 3.4e38)

    @property
    def range(self) -> str:
        if self.most == math.inf:
            return f"a finite number of at least {self.least:g}"
        return f"between {self.least:g} and {self.most:g}"


_NUMBERS: Mapping[str, _Number] = {
    "temperature": _Number(0.8, 0.0, file_key="temp"),
    "top_k": _Number(40, 0, 2**32 - 1, "top_k", whole=True),
    "top_p": _Number(0.95, 0.0, 1.0, "top_p"),
    "min_p": _Number(0.05, 0.0, 1.0, "min_p"),
    "typical_p": _Number(1.0, 0.0, 1.0),
    "repeat_penalty": _Number(1.0, 1e-3, file_key="penalty_repeat"),
    "repeat_last_n": _Number(64, 0, 2**32 - 1, "penalty_last_n", whole=True),
    "presence_penalty": _Number(0.0, 0.0),
    "frequency_penalty": _Number(0.0, 0.0),
}
# Samplers this build does not have: a file may name them as long as it leaves them off.
_NEUTRAL = {"xtc_probability": 0.0, "mirostat": 0}
_MEANINGLESS_WHEN_OFF = ("xtc_threshold", "mirostat_tau", "mirostat_eta")
# llama.cpp's spellings of "all": every token, the whole context.
_ALL = {("top_k", -1): 0, ("repeat_last_n", -1): 2**32 - 1}


def file_sampling_defaults(metadata: Mapping[str, object], where: str) -> dict[str, float]:
    """The sampling a model file recommends (`general.sampling.*`), by the names of SamplingOptions.

    CorruptDataError for a value out of range; UnsupportedModelError for a sampler this build does not have.
    """
    names = {number.file_key: name for name, number in _NUMBERS.items() if number.file_key}
    defaults: dict[str, float] = {}
    for full_key, value in metadata.items():
        if not full_key.startswith(_PREFIX):
            continue
        key = full_key.removeprefix(_PREFIX)
        if key in _MEANINGLESS_WHEN_OFF or (key in _NEUTRAL and value == _NEUTRAL[key]):
            continue
        if key not in names:
            raise UnsupportedModelError(f"{where}: {full_key} is {value!r}; this build does not sample so")
        name = names[key]
        number = _NUMBERS[name]
        if isinstance(value, int):
            value = _ALL.get((name, value), value)
        if not isinstance(value, int | float) or not number.accepts(value):
            raise CorruptDataError(f"{where}: {full_key} is {value!r}, it must be {number.range}")
        defaults[name] = value
    return defaults


def resolve_sampling(
    options: model_pb2.SamplingOptions,
    defaults: Mapping[str, float],
    vocab_size: int,
    eog_ids: Collection[int],
    random_seed: int,
) -> stage_pb2.ResolvedSampling:
    """Every option filled in; `defaults` are the file's. InvalidRequestError names an option out of range."""
    resolved = stage_pb2.ResolvedSampling(seed=options.seed if options.HasField("seed") else random_seed)
    for name, number in _NUMBERS.items():
        value = defaults.get(name, number.default)
        if options.HasField(name):
            value = getattr(options, name)
            if not number.accepts(value):
                raise InvalidRequestError(f"{name} is {value:g}, it must be {number.range}")
        setattr(resolved, name, int(value) if number.whole else float(value))
    banned = set(eog_ids) if options.ignore_eos else set()
    biased: set[int] = set()
    for bias in options.logit_bias:
        if bias.token_id >= vocab_size:
            raise InvalidRequestError(
                f"logit_bias: token id {bias.token_id} is outside the vocabulary of {vocab_size} tokens"
            )
        if bias.token_id in biased:
            raise InvalidRequestError(f"logit_bias: token id {bias.token_id} is named twice")
        biased.add(bias.token_id)
        if bias.bias == -math.inf:
            banned.add(bias.token_id)
        elif math.isfinite(bias.bias):
            resolved.logit_bias.add(token_id=bias.token_id, bias=bias.bias)
        else:
            raise InvalidRequestError(
                f"logit_bias: the bias of token {bias.token_id} is {bias.bias:g}, it must be finite, or -inf"
                " to ban the token"
            )
    if len(banned) >= vocab_size:
        raise InvalidRequestError("logit_bias: every token is banned, so none could be drawn")
    resolved.banned_token_ids.extend(sorted(banned))
    return resolved
