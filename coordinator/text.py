"""Text to token ids and back for one model: tokenizer, chat template, and the file's sampling defaults."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from common.errors import DeadlineError, InvalidRequestError, UnsupportedModelError
from common.gguf.chat import encode_chat
from common.gguf.chat_template import ChatTemplate
from common.gguf.reader import GGUFFile
from common.gguf.tokenizer import Tokenizer
from coordinator.request import prompt_too_long
from coordinator.sampling import file_sampling_defaults
from protos import coordinator_pb2

# What Tokenize and Detokenize take at once: seconds of work.
MAX_TEXT_CHARS = 12_000_000
MAX_IDS = 1_000_000

ROLES = ("system", "user", "assistant", "tool")


class ModelText:
    """Everything about one model's text. Methods are pure and may run in worker threads."""

    def __init__(self, name: str, file: GGUFFile) -> None:
        metadata = file.metadata
        self.name = name
        self.tokenizer: Tokenizer | None = None
        self.template: ChatTemplate | None = None
        self.sampling_defaults = file_sampling_defaults(metadata, str(file.paths[0]))
        if not Tokenizer.present(metadata):
            return
        self.tokenizer = tokenizer = Tokenizer.from_metadata(metadata, str(file.paths[0]))
        self._max_token_bytes = tokenizer.max_token_bytes()
        source = metadata.get("tokenizer.chat_template")
        if source is not None:
            self.template = ChatTemplate(
                str(source),
                bos_token=_piece(tokenizer, tokenizer.bos_id),
                eos_token=_piece(tokenizer, tokenizer.eos_id),
                where=name,
            )

    def close(self) -> None:
        if self.template is not None:
            self.template.close()

    def require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UnsupportedModelError(
                f"model {self.name!r} has no tokenizer; give token ids and read token ids"
            )
        return self.tokenizer

    def encode_prompt(self, request: coordinator_pb2.GenerateRequest, context_length: int) -> list[int]:
        """The prompt's token ids. Raises InvalidRequestError for an empty prompt, or one that is longer than
        the context whatever its tokens."""
        if request.WhichOneof("prompt") == "ids":
            if len(request.ids.ids) >= context_length:
                raise prompt_too_long(f"{len(request.ids.ids)} tokens", context_length)
            ids = list(request.ids.ids)
        else:
            ids = self._encode_text_prompt(request, context_length)
        if not ids:
            raise InvalidRequestError("the prompt is empty; give some text or token ids")
        return ids

    def _encode_text_prompt(
        self, request: coordinator_pb2.GenerateRequest, context_length: int
    ) -> list[int]:
        tokenizer = self.require_tokenizer()
        if not request.text:
            return []  # BOS alone, which some models would begin with, is no prompt
        num_bytes = len(request.text.encode())
        if num_bytes > context_length * self._max_token_bytes:
            # Plain before it is cut into tokens, which could take long.
            size = f"{num_bytes} bytes (a token has at most {self._max_token_bytes})"
            raise prompt_too_long(size, context_length)
        return tokenizer.encode(
            request.text, add_special=not request.no_special, parse_special=request.parse_special
        )

    def tokenize(self, request: coordinator_pb2.TokenizeRequest) -> coordinator_pb2.TokenizeResponse:
        tokenizer = self.require_tokenizer()
        if len(request.text) > MAX_TEXT_CHARS:
            raise InvalidRequestError(f"text: {len(request.text)} characters, at most {MAX_TEXT_CHARS}")
        ids = tokenizer.encode(
            request.text, add_special=not request.no_special, parse_special=request.parse_special
        )
        pieces = [tokenizer.token_bytes(token_id, special=True) for token_id in ids]
        return coordinator_pb2.TokenizeResponse(ids=ids, pieces=pieces)

    def detokenize(self, request: coordinator_pb2.DetokenizeRequest) -> coordinator_pb2.DetokenizeResponse:
        tokenizer = self.require_tokenizer()
        if len(request.ids) > MAX_IDS:
            raise InvalidRequestError(f"there are {len(request.ids)} token ids, at most {MAX_IDS}")
        unknown = next((token_id for token_id in request.ids if token_id >= tokenizer.vocab_size), None)
        if unknown is not None:
            raise InvalidRequestError(f"token id {unknown}: the vocabulary has {tokenizer.vocab_size}")
        text = tokenizer.decode(list(request.ids), skip_special=not request.show_special)
        return coordinator_pb2.DetokenizeResponse(text=text)

    def render_chat(
        self, messages: Sequence[coordinator_pb2.ChatMessage], tools_json: str, continue_last: bool
    ) -> tuple[str, list[int]]:
        """The dialogue through the chat template: its text and token ids."""
        tokenizer = self.require_tokenizer()
        if self.template is None:
            raise UnsupportedModelError(
                f"model {self.name!r} has no chat template; it is a base model: use generate"
            )
        if not messages:
            raise InvalidRequestError("the dialogue is empty; give at least one message")
        num_chars = sum(len(message.content) for message in messages)
        if num_chars > MAX_TEXT_CHARS:
            raise InvalidRequestError(f"the dialogue has {num_chars} characters, at most {MAX_TEXT_CHARS}")
        for number, message in enumerate(messages):
            if message.role not in ROLES:
                raise InvalidRequestError(
                    f"message {number} has the unknown role {message.role[:40]!r}; "
                    f"known are {', '.join(ROLES)}"
                )
        try:
            return encode_chat(
                tokenizer,
                self.template,
                [{"role": message.role, "content": message.content} for message in messages],
                tools=_tools(tools_json),
                continue_last=continue_last,
            )
        except DeadlineError as error:  # the template's own, not the caller's
            raise InvalidRequestError(str(error)) from error


def _piece(tokenizer: Tokenizer, token_id: int | None) -> str:
    return "" if token_id is None else tokenizer.piece(token_id)


def _tools(tools_json: str) -> list[Any] | None:
    if not tools_json:
        return None
    try:
        tools = json.loads(tools_json)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"tools_json is no JSON: {error}") from None
    if not isinstance(tools, list):
        raise InvalidRequestError(f"tools_json holds a {type(tools).__name__}, expected a list")
    return tools
