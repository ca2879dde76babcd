"""Which sampling a request gets: its own, the file's or the default, and what is refused."""

from __future__ import annotations

import math

import pytest

from common.errors import CorruptDataError, InvalidRequestError, UnsupportedModelError
from coordinator.sampling import file_sampling_defaults, resolve_sampling
from protos import stage_pb2
from protos.model_pb2 import LogitBias, SamplingOptions


def resolve(options: SamplingOptions, **defaults: float) -> stage_pb2.ResolvedSampling:
    return resolve_sampling(options, defaults, vocab_size=10, eog_ids=[9, 2], random_seed=77)


def test_defaults_are_llama_cpps() -> None:
    resolved = resolve(SamplingOptions())
    assert resolved == stage_pb2.ResolvedSampling(
        temperature=0.8,
        top_k=40,
        top_p=0.95,
        min_p=0.05,
        typical_p=1.0,
        repeat_penalty=1.0,
        repeat_last_n=64,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        seed=77,
    )


def test_the_request_goes_before_the_file_and_the_file_before_the_default() -> None:
    resolved = resolve(SamplingOptions(temperature=0.0, seed=0), temperature=0.3, top_k=7)
    assert (resolved.temperature, resolved.top_k, resolved.seed) == (0.0, 7, 0)
    assert resolved.top_p == pytest.approx(0.95)


def test_ignore_eos_bans_every_end_of_generation_token() -> None:
    assert list(resolve(SamplingOptions()).banned_token_ids) == []
    assert list(resolve(SamplingOptions(ignore_eos=True)).banned_token_ids) == [2, 9]


def test_an_infinite_negative_bias_bans() -> None:
    bias = [LogitBias(token_id=3, bias=-math.inf), LogitBias(token_id=4, bias=-2.5)]
    resolved = resolve(SamplingOptions(logit_bias=bias))
    assert list(resolved.banned_token_ids) == [3]
    assert list(resolved.logit_bias) == bias[1:]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (SamplingOptions(temperature=-1), "temperature is -1, it must be a finite number of at least 0"),
        (SamplingOptions(temperature=math.nan), "temperature is nan"),
        (SamplingOptions(temperature=math.inf), "temperature is inf"),
        (SamplingOptions(top_p=2), "top_p is 2, it must be between 0 and 1"),
        (SamplingOptions(top_p=-0.5), "top_p is -0.5"),
        (SamplingOptions(min_p=1.5), "min_p is 1.5"),
        (SamplingOptions(typical_p=math.nan), "typical_p is nan"),
        (SamplingOptions(repeat_penalty=0), "repeat_penalty is 0, it must be a finite number"),
        (SamplingOptions(repeat_penalty=-1), "repeat_penalty is -1"),
        (SamplingOptions(presence_penalty=-0.1), "presence_penalty is -0.1"),
        (SamplingOptions(frequency_penalty=-math.inf), "frequency_penalty is -inf"),
        (SamplingOptions(logit_bias=[LogitBias(token_id=10)]), "token id 10 is outside the vocabulary of 10"),
        (SamplingOptions(logit_bias=[LogitBias(token_id=1, bias=math.nan)]), "the bias of token 1 is nan"),
        (SamplingOptions(logit_bias=[LogitBias(token_id=1, bias=math.inf)]), "the bias of token 1 is inf"),
        (SamplingOptions(logit_bias=[LogitBias(token_id=1)] * 2), "token id 1 is named twice"),
        (
            SamplingOptions(logit_bias=[LogitBias(token_id=i, bias=-math.inf) for i in range(10)]),
            "every token is banned",
        ),
    ],
    ids=lambda value: "" if isinstance(value, SamplingOptions) else value[:24],
)
def test_bad_values_are_refused_by_name(options: SamplingOptions, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        resolve(options)


def test_file_defaults_by_our_names() -> None:
    metadata: dict[str, object] = {
        "general.name": "x",
        "general.sampling.temp": 0.6,
        "general.sampling.top_k": 20,
        "general.sampling.penalty_repeat": 1.1,
        "general.sampling.penalty_last_n": -1,
        "general.sampling.xtc_probability": 0.0,
        "general.sampling.xtc_threshold": 0.1,
        "general.sampling.mirostat": 0,
    }
    defaults = file_sampling_defaults(metadata, "m.gguf")
    assert defaults == {
        "temperature": 0.6,
        "top_k": 20,
        "repeat_penalty": 1.1,
        "repeat_last_n": 2**32 - 1,
    }
    assert resolve(SamplingOptions(), **defaults).repeat_last_n == 2**32 - 1


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("temp", math.nan, CorruptDataError),
        ("top_p", 3.0, CorruptDataError),
        ("top_k", "many", CorruptDataError),
        ("mirostat", 2, UnsupportedModelError),
        ("xtc_probability", 0.5, UnsupportedModelError),
        ("sequence", "temperature", UnsupportedModelError),
    ],
)
def test_file_values_that_cannot_be_honoured_are_refused_by_name(
    key: str, value: object, error: type[Exception]
) -> None:
    with pytest.raises(error, match=rf"m\.gguf: general\.sampling\.{key} is"):
        file_sampling_defaults({f"general.sampling.{key}": value}, "m.gguf")
