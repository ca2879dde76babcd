"""A request from its options to its finish: what is refused, what is told, and where it ends."""

from __future__ import annotations

import codecs

import pytest

from common.errors import InvalidRequestError, UnsupportedModelError
from coordinator.request import Event, ModelLimits, Request
from protos.coordinator_pb2 import FinishReason, GenerationDelta, GenerationFinished, GenerationOptions
from protos.model_pb2 import SamplingOptions, TokenLogprob
from protos.stage_pb2 import SampledToken

EOG = 256  # after the 256 bytes


class Decoder:
    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(bytes([token_id]))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class Bytes:
    """A vocabulary of the 256 bytes and one special token."""

    def token_bytes(self, token_id: int, *, special: bool = False) -> bytes:
        if token_id == EOG:
            return b"<end>" if special else b""
        return bytes([token_id])

    def stream_decoder(self, *, after: int | None = None) -> Decoder:
        return Decoder()


MODEL = ModelLimits(
    name="bytes",
    vocab_size=257,
    context_length=64,
    eog_ids=(EOG,),
    sampling_defaults={"temperature": 0.25},
    vocabulary=Bytes(),
)
WITHOUT_TEXT = ModelLimits("ids", 257, 64, (EOG,), {}, vocabulary=None)


def request(options: GenerationOptions | None = None, model: ModelLimits = MODEL, prompt: int = 3) -> Request:
    made = Request([104] * prompt, options or GenerationOptions(), model, sequence_id=1, arrived_s=10.0)
    own = made.sequence  # as the scheduler sets it
    own.max_length = min(own.num_prompt + own.max_tokens, model.context_length)
    return made


def feed(made: Request, answer: bytes | list[int]) -> list[Event]:
    """The events of an answer's tokens, up to the finish; nothing may follow it."""
    events: list[Event] = []
    for token_id in answer:
        made.sequence.tokens.append(token_id)
        position = len(made.sequence.tokens) - 1
        reason = made.push(SampledToken(sequence_id=1, position=position, token_id=token_id))
        events += made.take()
        assert bool(reason) == bool(events and isinstance(events[-1], GenerationFinished))
        if reason:
            assert finish(events).reason == reason
            break
    return events


def deltas(events: list[Event]) -> list[GenerationDelta]:
    return [event for event in events if isinstance(event, GenerationDelta)]


def text(events: list[Event]) -> str:
    return "".join(delta.text for delta in deltas(events))


def finish(events: list[Event]) -> GenerationFinished:
    assert isinstance(events[-1], GenerationFinished)
    assert sum(isinstance(event, GenerationFinished) for event in events) == 1
    return events[-1]


# --- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (GenerationOptions(max_tokens=0), "max_tokens is 0"),
        (GenerationOptions(logprobs=True, top_logprobs=21), "top_logprobs is 21, at most 20"),
        (GenerationOptions(top_logprobs=2), "top_logprobs is 2, but logprobs are not asked for"),
        (GenerationOptions(stop=["a", ""]), "empty stop string"),
        (GenerationOptions(stop=["x" * 1001]), "1001 characters, at most 1000"),
        (GenerationOptions(stop=["x"] * 33), "33 stop strings, at most 32"),
        (GenerationOptions(request_id="a\nb"), "request_id must be printable"),
        (GenerationOptions(sampling=SamplingOptions(top_p=2)), "top_p is 2"),
    ],
    ids=lambda value: "" if isinstance(value, GenerationOptions) else value[:24],
)
def test_bad_options_are_refused_by_name(options: GenerationOptions, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        request(options)


def test_bad_prompts_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="the prompt is empty"):
        request(prompt=0)
    with pytest.raises(InvalidRequestError, match="has 64 tokens, the context holds 64"):
        request(prompt=64)
    request(prompt=63)
    with pytest.raises(InvalidRequestError, match="token id 257 is outside the vocabulary of 257"):
        Request([257], GenerationOptions(), MODEL, 1, 0.0)


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(UnsupportedModelError, match="'ids' has no tokenizer"):
        request(GenerationOptions(stop=["x"]), WITHOUT_TEXT)


# --- what a scheduler and a client are told ---------------------------------------------------------------


def test_sequence_and_start() -> None:
    options = GenerationOptions(max_tokens=7, logprobs=True, top_logprobs=3, request_id="mine")
    options.sampling.seed = 5
    made = request(options)
    assert (made.sequence.max_tokens, made.sequence.logprobs, made.sequence.top_logprobs) == (7, True, 3)
    assert made.sequence.sampling.temperature == 0.25
    assert (made.started.request_id, made.started.prompt_tokens, made.started.seed) == ("mine", 3, 5)
    assert (made.started.model, made.started.context_length) == ("bytes", 64)


def test_names_and_seeds_are_made_up_when_absent() -> None:
    one, other = request().started, request().started
    assert one.request_id != other.request_id
    assert one.seed != other.seed


def test_text_comes_as_whole_characters() -> None:
    events = feed(request(), "h€".encode())
    assert [delta.text for delta in deltas(events)] == ["h", "€"]
    assert not any(delta.token_ids or delta.tokens for delta in deltas(events))


def test_ids_come_at_once_even_while_a_character_is_incomplete() -> None:
    events = feed(request(GenerationOptions(return_ids=True)), "€".encode())
    assert [(delta.text, list(delta.token_ids)) for delta in deltas(events)] == [
        ("", [0xE2]),
        ("", [0x82]),
        ("€", [0xAC]),
    ]


def test_what_comes_together_is_told_as_one() -> None:
    made = request(GenerationOptions(return_ids=True, logprobs=True, stop=["##"]))
    for token_id in "h€#!".encode():
        made.sequence.tokens.append(token_id)
        assert not made.push(SampledToken(token_id=token_id))
    (delta,) = made.take()
    assert isinstance(delta, GenerationDelta)
    assert (delta.text, list(delta.token_ids)) == ("h€#!", list("h€#!".encode()))
    assert [info.chosen.token_id for info in delta.tokens] == list(delta.token_ids)
    assert made.take() == []
    (last,) = feed(made, b"#")[:1]
    assert isinstance(last, GenerationDelta) and (last.text, list(last.token_ids)) == ("", [35])


def test_logprobs_name_the_bytes_of_tokens() -> None:
    made = request(GenerationOptions(logprobs=True, top_logprobs=1))
    made.sequence.tokens.append(EOG)
    made.push(SampledToken(token_id=EOG, logprob=-0.5, top=[TokenLogprob(token_id=0x82, logprob=-0.25)]))
    (delta, _) = made.take()
    assert isinstance(delta, GenerationDelta)
    (info,) = delta.tokens
    assert (info.chosen.token_id, info.chosen.logprob, info.chosen.text) == (EOG, -0.5, b"<end>")
    assert [(top.token_id, top.logprob, top.text) for top in info.top] == [(0x82, -0.25, b"\x82")]


def test_a_model_without_a_tokenizer_answers_in_ids() -> None:
    events = feed(request(model=WITHOUT_TEXT), [7, 8, EOG])
    assert [list(delta.token_ids) for delta in deltas(events)] == [[7], [8], [EOG]]
    assert text(events) == ""
    assert finish(events).reason == FinishReason.FINISH_REASON_STOP


# --- where it ends ----------------------------------------------------------------------------------------


def test_an_end_of_generation_token_ends_it_without_text() -> None:
    events = feed(request(GenerationOptions(return_ids=True)), [*b"ok", EOG, *b"more"])
    assert text(events) == "ok"
    assert [i for delta in deltas(events) for i in delta.token_ids] == [*b"ok", EOG]
    assert (finish(events).reason, finish(events).generated_tokens) == (FinishReason.FINISH_REASON_STOP, 3)


def test_ignore_eos_goes_on() -> None:
    options = GenerationOptions(max_tokens=3, sampling=SamplingOptions(ignore_eos=True))
    made = request(options, WITHOUT_TEXT)
    assert list(made.sequence.sampling.banned_token_ids) == [EOG]
    assert finish(feed(made, [1, EOG, 2])).reason == FinishReason.FINISH_REASON_MAX_TOKENS


def test_a_stop_string_across_tokens_ends_it_and_is_not_told() -> None:
    events = feed(request(GenerationOptions(stop=["###", "END"])), b"one ## EN two ###x")
    assert text(events) == "one ## EN two "
    ended = finish(events)
    assert (ended.reason, ended.stop_string) == (FinishReason.FINISH_REASON_STOP_STRING, "###")
    assert ended.generated_tokens == 17


def test_a_stop_string_in_the_last_allowed_token_is_a_stop() -> None:
    events = feed(request(GenerationOptions(max_tokens=4, stop=["###"])), b"a###")
    assert finish(events).reason == FinishReason.FINISH_REASON_STOP_STRING


@pytest.mark.parametrize(
    ("end", "reason"),
    [([EOG], FinishReason.FINISH_REASON_STOP), ([*b"b"], FinishReason.FINISH_REASON_MAX_TOKENS)],
)
def test_text_held_back_is_told_at_the_end(end: list[int], reason: FinishReason) -> None:
    options = GenerationOptions(max_tokens=4, stop=["##b##"])
    events = feed(request(options), [*b"a##", *end])
    assert text(events) == "a##" + ("b" if end == [*b"b"] else "")
    assert finish(events).reason == reason


def test_an_incomplete_character_at_the_end_is_replaced() -> None:
    assert text(feed(request(GenerationOptions(max_tokens=2)), b"a\xe2")) == "a\ufffd"
    events = feed(request(GenerationOptions(max_tokens=2, stop=["a\ufffd"])), b"a\xe2")
    assert text(events) == ""
    assert finish(events).reason == FinishReason.FINISH_REASON_STOP_STRING


def test_max_tokens_and_the_contexts_end() -> None:
    events = feed(request(GenerationOptions(max_tokens=2)), b"abc")
    assert text(events) == "ab"
    assert finish(events).reason == FinishReason.FINISH_REASON_MAX_TOKENS
    events = feed(request(prompt=60), b"abcdef")
    assert text(events) == "abcd"
    assert finish(events).reason == FinishReason.FINISH_REASON_CONTEXT_END
    events = feed(request(GenerationOptions(max_tokens=4), prompt=60), b"abcdef")
    assert finish(events).reason == FinishReason.FINISH_REASON_MAX_TOKENS
    events = feed(request(GenerationOptions(max_tokens=5), prompt=60), b"abcdef")
    assert finish(events).reason == FinishReason.FINISH_REASON_CONTEXT_END


def test_abort_tells_what_was_held_back() -> None:
    made = request(GenerationOptions(stop=["##"]))
    feed(made, b"a#")
    made.abort()
    events = made.take()
    assert text(events) == "#"
    assert finish(events).reason == FinishReason.FINISH_REASON_ABORTED


def test_times_and_counts_of_the_finish() -> None:
    made = request(GenerationOptions(max_tokens=2))
    own = made.sequence
    own.first_step_s, own.first_token_s, own.last_token_s, own.cached_tokens = 10.5, 11.0, 13.0, 2
    ended = finish(feed(made, b"ab"))
    assert (ended.queue_s, ended.prefill_s, ended.decode_s) == (0.5, 0.5, 2.0)
    assert (ended.prompt_tokens, ended.generated_tokens, ended.cached_tokens) == (3, 2, 2)
    assert ended.context_length == 64


def test_times_of_a_request_that_never_ran() -> None:
    made = request()
    made.abort()
    ended = finish(made.take())
    assert (ended.queue_s, ended.prefill_s, ended.decode_s, ended.generated_tokens) == (0, 0, 0, 0)
