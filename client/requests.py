"""From Python arguments to request messages: what the blocking and the asyncio client share.

Ranges are the coordinator's to judge; here only what a message cannot hold is refused
(InvalidRequestError with the argument's name).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from client.events import Message
from common.errors import InvalidRequestError
from protos import coordinator_pb2 as pb
from protos import model_pb2

MessageLike = Message | Mapping[str, str]


class GenerationOptions(TypedDict, total=False):
    """Keyword arguments that `generate` and `chat` share. What is left out takes the model's default.

    max_tokens: tokens to generate at most (default: to the context's end).
    stop: a string, or several, that end the answer; it is not part of the text.
    temperature ... logit_bias: see `SamplingOptions` in protos/model.proto.
    logprobs: report the log-probability of each token, and of that many likely ones beside it (0 to 20).
    return_ids: report token ids in each `Delta`.
    request_id: a name for `abort` and the logs; made up when left out.
    """

    max_tokens: int | None
    stop: str | Sequence[str]
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    repeat_penalty: float | None
    repeat_last_n: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    logit_bias: Mapping[int, float]
    ignore_eos: bool
    logprobs: int | None
    return_ids: bool
    request_id: str


SAMPLING_NUMBERS: Mapping[str, type[int] | type[float]] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "typical_p": float,
    "repeat_penalty": float,
    "repeat_last_n": int,
    "presence_penalty": float,
    "frequency_penalty": float,
    "seed": int,
}


def generate_request(
    prompt: str | Sequence[int],
    model: str,
    add_special: bool,
    parse_special: bool,
    options: GenerationOptions,
) -> pb.GenerateRequest:
    request = pb.GenerateRequest(
        model=model,
        options=_options(options),
        no_special=not add_special,
        parse_special=parse_special,
    )
    if isinstance(prompt, str):
        _set(request, "text", prompt, "prompt")
    else:
        request.ids.SetInParent()  # an empty list is still a list, and refused as an empty prompt
        _extend(request.ids, "ids", prompt, "prompt")
    return request


def chat_request(
    messages: Iterable[MessageLike],
    model: str,
    tools: Sequence[Mapping[str, Any]] | None,
    continue_last: bool,
    options: GenerationOptions,
) -> pb.ChatRequest:
    return pb.ChatRequest(
        model=model,
        messages=_messages(messages),
        options=_options(options),
        tools_json=_tools_json(tools),
        continue_last=continue_last,
    )


def template_request(
    messages: Iterable[MessageLike],
    model: str,
    tools: Sequence[Mapping[str, Any]] | None,
    continue_last: bool,
) -> pb.ApplyTemplateRequest:
    return pb.ApplyTemplateRequest(
        model=model,
        messages=_messages(messages),
        tools_json=_tools_json(tools),
        continue_last=continue_last,
    )


def tokenize_request(text: str, model: str, add_special: bool, parse_special: bool) -> pb.TokenizeRequest:
    request = pb.TokenizeRequest(model=model, no_special=not add_special, parse_special=parse_special)
    _set(request, "text", text, "text")
    return request


def detokenize_request(ids: Sequence[int], model: str, show_special: bool) -> pb.DetokenizeRequest:
    request = pb.DetokenizeRequest(model=model, show_special=show_special)
    _extend(request, "ids", ids, "ids")
    return request


def load_request(model: str, context_length: int, force: bool) -> pb.LoadModelRequest:
    request = pb.LoadModelRequest(force=force)
    _set(request, "model", model, "model")
    _set(request, "context_length", context_length, "context_length")
    return request


def _options(options: GenerationOptions) -> pb.GenerationOptions:
    unknown = set(options) - GenerationOptions.__optional_keys__
    if unknown:
        raise TypeError(f"unknown generation options: {', '.join(sorted(unknown))}")
    stop = options.get("stop", ())
    logprobs = options.get("logprobs")
    message = pb.GenerationOptions(
        sampling=_sampling(options),
        logprobs=logprobs is not None,
        return_ids=options.get("return_ids", False),
    )
    _set(message, "max_tokens", options.get("max_tokens"), "max_tokens")
    _set(message, "top_logprobs", logprobs, "logprobs")
    _set(message, "request_id", options.get("request_id"), "request_id")
    _extend(message, "stop", [stop] if isinstance(stop, str) else stop, "stop")
    return message


def _sampling(options: GenerationOptions) -> model_pb2.SamplingOptions:
    message = model_pb2.SamplingOptions(ignore_eos=options.get("ignore_eos", False))
    for name in SAMPLING_NUMBERS:
        _set(message, name, options.get(name), name)
    for token_id, bias in options.get("logit_bias", {}).items():
        entry = message.logit_bias.add()
        _set(entry, "token_id", token_id, "logit_bias")
        _set(entry, "bias", bias, "logit_bias")
    return message


def _messages(messages: Iterable[MessageLike]) -> list[pb.ChatMessage]:
    result = []
    for index, message in enumerate(messages):
        if not isinstance(message, Message):
            if set(message) != {"role", "content"}:
                raise InvalidRequestError(
                    f"messages[{index}] has the keys {sorted(message)}, expected 'role' and 'content'"
                )
            message = Message(message["role"], message["content"])
        entry = pb.ChatMessage()
        _set(entry, "role", message.role, f"messages[{index}].role")
        _set(entry, "content", message.content, f"messages[{index}].content")
        result.append(entry)
    return result


def _tools_json(tools: Sequence[Mapping[str, Any]] | None) -> str:
    if not tools:
        return ""
    try:
        return json.dumps(list(tools))
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"tools cannot be written as JSON: {error}") from error


def _set(message: Any, field: str, value: Any, argument: str) -> None:
    if value is None:
        return
    try:
        setattr(message, field, value)
    except (TypeError, ValueError) as error:
        raise _refused(argument, value, error) from error


def _extend(message: Any, field: str, values: Iterable[Any], argument: str) -> None:
    try:
        getattr(message, field).extend(values)
    except (TypeError, ValueError) as error:
        raise _refused(argument, values, error) from error


def _refused(argument: str, value: Any, error: Exception) -> InvalidRequestError:
    if isinstance(error, UnicodeEncodeError):
        why = f"character {error.start} cannot be written as UTF-8"
    elif isinstance(error, ValueError):
        why = "out of range"
    else:
        why = "not of the right type"
    text = repr(value)
    return InvalidRequestError(f"{argument} is {text if len(text) <= 60 else text[:57] + '...'}: {why}")
