"""One client's request: its options checked and resolved, its tokens turned into text, its end found.

Pure: accepted tokens go in, events for the client come out. Queueing and computing are the scheduler's.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from common.errors import InvalidRequestError
from coordinator import sequence
from protos import coordinator_pb2, model_pb2, stage_pb2

MAX_TOP_LOGPROBS = 20

# Default, and the key of general.sampling.* in a model file.
_NUMBERS: Mapping[str, tuple[float, str]] = {
    "temperature": (0.8, "temp"),
    "top_k": (40, "top_k"),
    "top_p": (0.95, "top_p"),
    "min_p": (0.05, "min_p"),
    "typical_p": (1.0, "typical_p"),
    "repeat_penalty": (1.0, "penalty_repeat"),
    "repeat_last_n": (64, "penalty_last_n"),
    "presence_penalty": (0.0, "penalty_present"),
    "frequency_penalty": (0.0, "penalty_freq"),
}
_WHOLE_NUMBERS = ("top_k", "repeat_last_n")
_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "repeat_penalty": (0.001, 1000.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
}

FinishReason = coordinator_pb2.FinishReason
Event = coordinator_pb2.GenerationDelta | coordinator_pb2.GenerationFinished


class TextDecoder(Protocol):
    """Token ids to text; never half a character."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class Vocabulary(Protocol):
    def token_bytes(self, token_id: int, *, special: bool = False) -> bytes: ...

    def stream_decoder(self, *, after: int | None = None) -> TextDecoder: ...


@dataclass(frozen=True)
class ModelLimits:
    """What a request must know of its model."""

    name: str
    vocab_size: int
    context_length: int
    eog_ids: Collection[int]
    sampling_defaults: Mapping[str, Any]  # the file's general.sampling.*, without the prefix
    vocabulary: Vocabulary | None  # None: token ids only


class Request:
    """A checked request; `sequence` is what a scheduler takes.

    Raises InvalidRequestError, naming the field, for anything that cannot be done.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        options: coordinator_pb2.GenerationOptions,
        model: ModelLimits,
        sequence_id: int,
        arrived_s: float,
    ) -> None:
        _check_options(options, model)
        _check_prompt(prompt, model)
        sampling = resolve_sampling(options.sampling, model)
        self._options = options
        self._model = model
        self._ends = frozenset() if options.sampling.ignore_eos else frozenset(model.eog_ids)
        vocabulary = model.vocabulary
        self._decoder = None if vocabulary is None else vocabulary.stream_decoder(after=prompt[-1])
        self._held = ""  # text that may turn out to begin a stop string
        self.sequence = sequence.Sequence(
            sequence_id=sequence_id,
            tokens=list(prompt),
            sampling=sampling,
            max_tokens=options.max_tokens if options.HasField("max_tokens") else model.context_length,
            logprobs=options.logprobs,
            top_logprobs=options.top_logprobs,
            arrived_s=arrived_s,
        )
        self.started = coordinator_pb2.GenerationStarted(
            request_id=options.request_id or secrets.token_hex(8),
            model=model.name,
            prompt_tokens=len(prompt),
            seed=sampling.seed,
            context_length=model.context_length,
        )

    def push(self, token: stage_pb2.SampledToken) -> list[Event]:
        """The events of one accepted token; the last one is a GenerationFinished if the request ends."""
        if token.token_id in self._ends:
            return self._end(FinishReason.FINISH_REASON_STOP)
        delta = coordinator_pb2.GenerationDelta()
        if self._options.return_ids:
            delta.token_ids.append(token.token_id)
        if self._options.logprobs:
            delta.tokens.append(self._token_info(token))
        self._held += self._decoder.push(token.token_id) if self._decoder is not None else ""
        stop = self._first_stop()
        if stop is not None:
            delta.text = self._held[: self._held.index(stop)]
            self._held = ""
            finished = self._finished(FinishReason.FINISH_REASON_STOP_STRING, stop)
            return [delta, finished]
        kept = self._num_held_back()
        delta.text, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        if len(self.sequence.tokens) < self.sequence.max_length:
            return [delta] if delta.text or delta.token_ids or delta.tokens else []
        full = self.sequence.max_length == self._model.context_length
        out_of_tokens = self.sequence.num_generated >= self.sequence.max_tokens
        reason = (
            FinishReason.FINISH_REASON_CONTEXT_END
            if full and not out_of_tokens
            else FinishReason.FINISH_REASON_MAX_TOKENS
        )
        return [delta, *self._end(reason)]

    def abort(self) -> list[Event]:
        """The events of an end by Abort."""
        return self._end(FinishReason.FINISH_REASON_ABORTED)

    def _end(self, reason: coordinator_pb2.FinishReason) -> list[Event]:
        """What was held back, and the finish."""
        text = self._held + (self._decoder.finish() if self._decoder is not None else "")
        self._held = ""
        finished = self._finished(reason, "")
        return [coordinator_pb2.GenerationDelta(text=text), finished] if text else [finished]

    def _first_stop(self) -> str | None:
        """The stop string that begins first in the text so far."""
        found = [(self._held.find(stop), stop) for stop in self._options.stop]
        return min((pair for pair in found if pair[0] >= 0), default=(0, None))[1]

    def _num_held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        for length in range(min(len(self._held), max(map(len, self._options.stop), default=1) - 1), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._options.stop):
                return length
        return 0

    def _finished(self, reason: coordinator_pb2.FinishReason, stop: str) -> coordinator_pb2.GenerationFinished:
        own = self.sequence
        first_step = own.first_step_s if own.first_step_s is not None else own.arrived_s
        first_token = own.first_token_s if own.first_token_s is not None else first_step
        last_token = own.last_token_s if own.last_token_s is not None else first_token
        return coordinator_pb2.GenerationFinished(
            reason=reason,
            stop_string=stop,
            prompt_tokens=own.num_prompt,
            generated_tokens=own.num_generated,
            cached_tokens=own.cached_tokens,
            queue_s=first_step - own.arrived_s,
            prefill_s=first_token - first_step,
            decode_s=last_token - first_token,
            context_length=self._model.context_length,
        )

    def _token_info(self, token: stage_pb2.SampledToken) -> model_pb2.TokenInfo:
        def named(token_id: int, logprob: float) -> model_pb2.TokenLogprob:
            vocabulary = self._model.vocabulary
            text = vocabulary.token_bytes(token_id, special=True) if vocabulary is not None else b""
            return model_pb2.TokenLogprob(token_id=token_id, logprob=logprob, text=text)

        return model_pb2.TokenInfo(
            chosen=named(token.token_id, token.logprob),
            top=[named(one.token_id, one.logprob) for one in token.top],
        )


def resolve_sampling(
    options: model_pb2.SamplingOptions, model: ModelLimits
) -> stage_pb2.ResolvedSampling:
    """Every option filled in: the request's, else the model file's, else llama.cpp's default."""
    resolved = stage_pb2.ResolvedSampling(
        seed=options.seed if options.HasField("seed") else secrets.randbits(64),
        logit_bias=options.logit_bias,
        banned_token_ids=sorted(model.eog_ids) if options.ignore_eos else (),
    )
    for name, (default, key) in _NUMBERS.items():
        if options.HasField(name):
            value = getattr(options, name)
            _check_number(name, value)
        else:
            value = model.sampling_defaults.get(key, default)
            if not isinstance(value, int | float) or isinstance(value, bool):
                value = default
        setattr(resolved, name, int(value) if name in _WHOLE_NUMBERS else float(value))
    return resolved


def _check_number(name: str, value: float) -> None:
    low, high = _RANGES.get(name, (0, math.inf))
    if not low <= value <= high:  # NaN is in no range
        raise InvalidRequestError(f"{name} is {value:g}, it must be between {low:g} and {high:g}")


def _check_options(options: coordinator_pb2.GenerationOptions, model: ModelLimits) -> None:
    if options.HasField("max_tokens") and options.max_tokens < 1:
        raise InvalidRequestError("max_tokens is 0, at least 1 is needed")
    if options.top_logprobs > MAX_TOP_LOGPROBS:
        raise InvalidRequestError(f"top_logprobs is {options.top_logprobs}, at most {MAX_TOP_LOGPROBS}")
    if any(not stop for stop in options.stop):
        raise InvalidRequestError("stop: an empty stop string would end every answer at once")
    if options.stop and model.vocabulary is None:
        raise InvalidRequestError(f"stop: model {model.name!r} has no tokenizer, so no text to stop at")
    for bias in options.sampling.logit_bias:
        if bias.token_id >= model.vocab_size:
            raise InvalidRequestError(f"logit_bias: token id {bias.token_id} of {model.vocab_size}")
        if math.isnan(bias.bias):
            raise InvalidRequestError(f"logit_bias: the bias of token {bias.token_id} is not a number")


def _check_prompt(prompt: Sequence[int], model: ModelLimits) -> None:
    if not prompt:
        raise InvalidRequestError("the prompt is empty; give some text or token ids")
    if len(prompt) >= model.context_length:
        raise InvalidRequestError(
            f"the prompt has {len(prompt)} tokens, the context holds {model.context_length} and needs room "
            "for an answer; shorten the prompt or load the model with a longer context"
        )
    if max(prompt) >= model.vocab_size:
        raise InvalidRequestError(f"prompt: token id {max(prompt)} of a vocabulary of {model.vocab_size}")
