"""One client's request: its options checked and resolved, its tokens turned into text, its end found.

Pure: accepted tokens go in one by one, events for the client come out, many tokens in one if the client
was told nothing meanwhile. Queueing and computing are the scheduler's.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.errors import InvalidRequestError, UnsupportedModelError
from coordinator import sequence
from coordinator.sampling import resolve_sampling
from coordinator.stop_strings import StopStrings
from protos import coordinator_pb2, model_pb2, stage_pb2

MAX_TOP_LOGPROBS = 20
MAX_STOPS = 32
MAX_STOP_CHARACTERS = 1000
MAX_REQUEST_ID_CHARACTERS = 200

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
    sampling_defaults: Mapping[str, float]  # the file's, as `file_sampling_defaults` gives them
    vocabulary: Vocabulary | None  # None: token ids only


class Request:
    """A checked request; `sequence` is what a scheduler takes, `started` the first event for the client.

    InvalidRequestError, naming the field, for anything that cannot be done; UnsupportedModelError for text
    wanted of a model without a tokenizer.
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
        sampling = resolve_sampling(
            options.sampling,
            model.sampling_defaults,
            model.vocab_size,
            model.eog_ids,
            random_seed=secrets.randbits(32),
        )
        self._model = model
        self._with_logprobs = options.logprobs
        self._with_ids = options.return_ids or model.vocabulary is None
        self._ends = frozenset() if options.sampling.ignore_eos else frozenset(model.eog_ids)
        vocabulary = model.vocabulary
        self._decoder = None if vocabulary is None else vocabulary.stream_decoder(after=prompt[-1])
        self._stops = StopStrings(options.stop)
        # What the client has not been told yet.
        self._text: list[str] = []
        self._ids: list[int] = []
        self._infos: list[model_pb2.TokenInfo] = []
        self._finished: coordinator_pb2.GenerationFinished | None = None
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

    def push(self, token: stage_pb2.SampledToken) -> FinishReason:
        """Takes in the sequence's newest token; returns why it ends the request, unspecified if it does not.

        An end-of-generation token is reported (id, logprobs) and counted, but has no text.
        """
        token_id = token.token_id
        if self._with_ids:
            self._ids.append(token_id)
        if self._with_logprobs:
            self._infos.append(self._token_info(token))
        if token_id in self._ends:
            return self._end(FinishReason.FINISH_REASON_STOP)
        if self._decoder is not None:
            text, stop = self._stops.push(self._decoder.push(token_id))
            self._text.append(text)
            if stop:
                return self._finish(FinishReason.FINISH_REASON_STOP_STRING, stop)
        if len(self.sequence.tokens) >= self.sequence.max_length:
            return self._end(self._length_reason())
        return FinishReason.FINISH_REASON_UNSPECIFIED

    def abort(self) -> None:
        self._end(FinishReason.FINISH_REASON_ABORTED)

    def take(self) -> list[Event]:
        """What the client is to be told now: a delta if there is anything new, the finish if it ended."""
        events: list[Event] = []
        text = "".join(self._text)
        if text or self._ids or self._infos:
            delta = coordinator_pb2.GenerationDelta(text=text, token_ids=self._ids, tokens=self._infos)
            events.append(delta)
        self._text, self._ids, self._infos = [], [], []
        if self._finished is not None:
            events.append(self._finished)
        return events

    def _length_reason(self) -> FinishReason:
        if self.sequence.num_generated >= self.sequence.max_tokens:
            return FinishReason.FINISH_REASON_MAX_TOKENS
        return FinishReason.FINISH_REASON_CONTEXT_END

    def _end(self, reason: FinishReason) -> FinishReason:
        """Ends with the text that was held back."""
        rest, stop = self._stops.push("" if self._decoder is None else self._decoder.finish())
        self._text.append(rest + self._stops.finish())
        if stop:  # begun before, completed by the U+FFFD of a character that never was
            reason = FinishReason.FINISH_REASON_STOP_STRING
        return self._finish(reason, stop)

    def _finish(self, reason: FinishReason, stop: str) -> FinishReason:
        own = self.sequence
        first_step = own.first_step_s if own.first_step_s is not None else own.arrived_s
        first_token = own.first_token_s if own.first_token_s is not None else first_step
        last_token = own.last_token_s if own.last_token_s is not None else first_token
        self._finished = coordinator_pb2.GenerationFinished(
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
        return reason

    def _token_info(self, token: stage_pb2.SampledToken) -> model_pb2.TokenInfo:
        def named(token_id: int, logprob: float) -> model_pb2.TokenLogprob:
            vocabulary = self._model.vocabulary
            text = vocabulary.token_bytes(token_id, special=True) if vocabulary is not None else b""
            return model_pb2.TokenLogprob(token_id=token_id, logprob=logprob, text=text)

        return model_pb2.TokenInfo(
            chosen=named(token.token_id, token.logprob),
            top=[named(one.token_id, one.logprob) for one in token.top],
        )


def _check_options(options: coordinator_pb2.GenerationOptions, model: ModelLimits) -> None:
    if options.HasField("max_tokens") and options.max_tokens < 1:
        raise InvalidRequestError("max_tokens is 0, at least 1 is needed")
    if options.top_logprobs > MAX_TOP_LOGPROBS:
        raise InvalidRequestError(f"top_logprobs is {options.top_logprobs}, at most {MAX_TOP_LOGPROBS}")
    if options.top_logprobs > model.vocab_size:
        raise InvalidRequestError(
            f"top_logprobs is {options.top_logprobs}, the vocabulary has {model.vocab_size} tokens"
        )
    if options.top_logprobs and not options.logprobs:
        raise InvalidRequestError(f"top_logprobs is {options.top_logprobs}, but logprobs are not asked for")
    if options.stop and model.vocabulary is None:
        raise UnsupportedModelError(f"stop: model {model.name!r} has no tokenizer, so no text to stop at")
    if len(options.stop) > MAX_STOPS:
        raise InvalidRequestError(f"stop: {len(options.stop)} stop strings, at most {MAX_STOPS}")
    for stop in options.stop:
        if not stop:
            raise InvalidRequestError("stop: an empty stop string would end every answer at once")
        if len(stop) > MAX_STOP_CHARACTERS:
            raise InvalidRequestError(
                f"stop: a stop string of {len(stop)} characters, at most {MAX_STOP_CHARACTERS}"
            )
    if len(options.request_id) > MAX_REQUEST_ID_CHARACTERS or not options.request_id.isprintable():
        raise InvalidRequestError(
            f"request_id must be printable, and of at most {MAX_REQUEST_ID_CHARACTERS} characters"
        )


def prompt_too_long(what: str, context_length: int) -> InvalidRequestError:
    """The refusal of a prompt of `what` ("700 tokens")."""
    return InvalidRequestError(
        f"the prompt has {what}, the context holds {context_length} tokens and needs room for an answer; "
        "shorten the prompt or load the model with a longer context"
    )


def _check_prompt(prompt: Sequence[int], model: ModelLimits) -> None:
    if not prompt:
        raise InvalidRequestError("the prompt is empty; give some text or token ids")
    if len(prompt) >= model.context_length:
        raise prompt_too_long(f"{len(prompt)} tokens", model.context_length)
    if max(prompt) >= model.vocab_size:
        raise InvalidRequestError(
            f"prompt: token id {max(prompt)} is outside the vocabulary of {model.vocab_size} tokens"
        )
