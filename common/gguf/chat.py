"""A dialogue to token ids through the model's chat template, safe against special tokens in messages.

A template spells the model's special tokens as text, so its output has to be parsed for them; but a message
that contains "<|im_end|>" must stay text. So before rendering, a border mark (a number nobody can guess) is
put into every string of the messages and tools wherever a special token stands, could begin at its end or
could end at its start; after rendering the text is cut at the marks, and no special token is looked for
across a cut. The marks then vanish: pieces form over the cuts as in the plain text.

A message without such places gets no marks, so a template sees it as it was written, and may trim, split or
compare it. Marks are digits in order to come through trimming, changes of case and JSON.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from common.errors import InvalidRequestError
from common.gguf.chat_template import ChatTemplate
from common.gguf.special_tokens import SpecialTokens
from common.gguf.tokenizer import Tokenizer


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Any] | None = None,
    continue_last: bool = False,
    now: datetime | None = None,
) -> tuple[str, list[int]]:
    """The rendered dialogue and its ids, ready for the model to answer.

    With `continue_last` the last message is the beginning of an answer and nothing follows it. Raises what
    `ChatTemplate.render` raises, and InvalidRequestError when the last message cannot be continued.
    """
    guard = _Guard(tokenizer.special_tokens)
    guarded = [guard.protect(message) for message in messages]
    end = _new_mark()
    if continue_last:
        last = guarded[-1] if guarded else {}
        if last.get("role") != "assistant" or not isinstance(last.get("content"), str):
            raise InvalidRequestError("only a last message of the assistant, with text, can be continued")
        guarded[-1] = {**last, "content": last["content"] + end}
    text = template.render(
        guarded, tools=guard.protect(tools), add_generation_prompt=not continue_last, now=now
    )
    if continue_last:
        text, found, _ = text.rpartition(end)
        if not found:
            raise InvalidRequestError(
                "the chat template leaves the last message out, so it cannot be continued"
            )
    segments = text.split(guard.mark)
    return "".join(segments), tokenizer.encode_segments(segments)


class _Guard:
    """Puts one mark into strings so that no special token can be made of them."""

    def __init__(self, special_tokens: SpecialTokens) -> None:
        self.mark = _new_mark()
        self._special_tokens = special_tokens

    def protect(self, value: Any) -> Any:
        """`value` (as JSON) with marks in all its strings, keys too."""
        if isinstance(value, str):
            return self._protect_text(value)
        if isinstance(value, Mapping):
            return {self.protect(key): self.protect(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.protect(item) for item in value]
        return value

    def _protect_text(self, text: str) -> str:
        parts = []
        start = 0
        for border in sorted(self._borders(text)):
            parts.append(text[start:border])
            start = border
        return self.mark.join([*parts, text[start:]])

    def _borders(self, text: str) -> set[int]:
        special = self._special_tokens
        borders = {start + 1 for start in special.starts(text)}
        reach = special.max_length - 1
        # Templates trim: what is an edge then is one now.
        for end in {len(text), len(text.rstrip())}:
            partial = (i for i in range(max(0, end - reach), end) if special.any_starts_with(text[i:end]))
            borders |= {i + 1 for i in partial}
        for begin in {0, len(text) - len(text.lstrip())}:
            ends = range(begin + 1, min(begin + reach, len(text)) + 1)
            borders |= {i - 1 for i in ends if special.any_ends_with(text[begin:i])}
        # The whole string between two parts of a template: '<' + key + '>'. Words are let be, for templates
        # compare them (role == "user").
        core = text.strip()
        if core and not core.isidentifier() and special.any_contains(core):
            borders.add(text.index(core))
        return borders


def _new_mark() -> str:
    # The first digit is not repeated, so a mark cannot be found a place too early, after digits of the text.
    return "9" + "".join(secrets.choice("012345678") for _ in range(24))
