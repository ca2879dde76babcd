"""Arguments of the Python API become messages, or an error that names the argument."""

import math
from typing import Any

import pytest

from client import requests
from client.events import Message
from client.requests import GenerationOptions
from common.errors import InvalidRequestError


def options(**given: Any) -> GenerationOptions:
    return given  # type: ignore[return-value]


def generate(prompt: Any = "p", **given: Any) -> Any:
    return requests.generate_request(prompt, "", True, False, options(**given))


def test_what_is_left_out_stays_absent() -> None:
    sent = generate().options
    assert not sent.HasField("max_tokens") and not sent.sampling.ListFields() and not sent.logprobs


def test_every_option_arrives() -> None:
    sent = generate(
        max_tokens=5, temperature=0.0, top_k=0, seed=2**64 - 1, stop="end", logprobs=3, return_ids=True,
        request_id="r", ignore_eos=True, logit_bias={7: -1.5},
    ).options  # fmt: skip
    assert (sent.max_tokens, sent.stop, sent.logprobs, sent.top_logprobs) == (5, ["end"], True, 3)
    assert (sent.return_ids, sent.request_id) == (True, "r")
    sampling = sent.sampling
    assert sampling.HasField("temperature") and sampling.HasField("top_k")  # zero is not absent
    assert (sampling.seed, sampling.ignore_eos) == (2**64 - 1, True)
    assert [(entry.token_id, entry.bias) for entry in sampling.logit_bias] == [(7, -1.5)]
    assert generate(stop=["a", "b"]).options.stop == ["a", "b"]
    assert generate(logprobs=0).options.logprobs


def test_ranges_are_left_to_the_coordinator() -> None:
    sampling = generate(temperature=math.nan, top_p=2.0).options.sampling
    assert math.isnan(sampling.temperature) and sampling.top_p == 2.0


def test_an_empty_list_of_ids_is_still_a_prompt_of_ids() -> None:
    assert generate([]).WhichOneof("prompt") == "ids"
    assert generate([1, 2]).ids.ids == [1, 2]
    assert generate("").WhichOneof("prompt") == "text"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_tokens": -1}, "max_tokens is -1: out of range"),
        ({"top_k": 1.5}, "top_k is 1.5: not of the right type"),
        ({"seed": 2**64}, "seed is 18446744073709551616: out of range"),
        ({"temperature": "hot"}, "temperature is 'hot': not of the right type"),
        ({"stop": [3]}, "stop is"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias is -1: out of range"),
        ({"prompt": [2**32]}, r"prompt is \[4294967296\]: out of range"),
        ({"prompt": "a\udcff"}, "prompt is .*: character 1 cannot be written as UTF-8"),
    ],
)
def test_what_a_message_cannot_hold_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        generate(**given)


def test_an_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="temprature"):
        generate(temprature=1.0)


def test_messages_are_dataclasses_or_mappings() -> None:
    sent = requests.chat_request(
        [Message("user", "a"), {"role": "assistant", "content": "b"}], "m", None, False, options()
    )
    assert [(entry.role, entry.content) for entry in sent.messages] == [("user", "a"), ("assistant", "b")]
    with pytest.raises(InvalidRequestError, match=r"messages\[0\] has the keys \['role', 'text'\]"):
        requests.chat_request([{"role": "user", "text": "a"}], "m", None, False, options())
    with pytest.raises(InvalidRequestError, match=r"messages\[0\].content is 5"):
        requests.chat_request([{"role": "user", "content": 5}], "m", None, False, options())  # type: ignore[dict-item]


def test_tools_travel_as_json() -> None:
    assert requests.template_request([], "", [{"name": "f"}], False).tools_json == '[{"name": "f"}]'
    assert requests.template_request([], "", None, False).tools_json == ""
    with pytest.raises(InvalidRequestError, match="tools cannot be written as JSON"):
        requests.template_request([], "", [{"name": object()}], False)
