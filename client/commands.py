"""What the subcommands of `pipellm-client` do. Results go to stdout, everything else to stderr."""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from client.client import Client, coordinator_address
from client.events import Delta, Finished, Started, TokenInfo
from client.mesh_state import Model, Plan
from client.requests import SAMPLING_NUMBERS, GenerationOptions
from client.text_input import argument_text, read_file, read_stdin
from common.errors import InvalidRequestError, PipeLLMError


def chat(arguments: Namespace) -> None:
    from client.chat import ChatSettings, run
    from client.connect import Target

    run(
        ChatSettings(
            target=Target(
                address=coordinator_address(arguments.coordinator),
                model=arguments.model,
                local=arguments.local,
                stages=arguments.stages,
                context_length=arguments.context_length,
                threads=arguments.threads,
            ),
            system=arguments.system,
            plain=arguments.plain,
            options=_options(arguments),
            timeout_s=arguments.timeout,
        )
    )


def generate(arguments: Namespace) -> None:
    if arguments.ids is not None:
        if arguments.text is not None or arguments.file is not None:
            raise InvalidRequestError("give --ids or a text, not both")
        prompt: str | list[int] = _parse_ids([arguments.ids])
    else:
        prompt = _input_text(arguments)
    options = _options(arguments)
    if arguments.logprobs is not None:
        options["logprobs"] = arguments.logprobs
    options["return_ids"] = True
    printer = _JsonAnswer() if arguments.json else _PrintedAnswer(arguments)
    with (
        Client(arguments.coordinator) as client,
        client.generate(
            prompt,
            model=arguments.model,
            add_special=not arguments.no_special,
            parse_special=arguments.parse_special,
            timeout_s=arguments.timeout,
            **options,
        ) as events,
    ):
        try:
            for event in events:
                if isinstance(event, Started):
                    printer.started(event)
                elif isinstance(event, Delta):
                    printer.delta(event)
                else:
                    printer.finished(event)
        except PipeLLMError:
            printer.broken()
            raise


class _PrintedAnswer:
    """Text, ids or logprobs as they come."""

    def __init__(self, arguments: Namespace) -> None:
        self._ids = arguments.return_ids
        self._logprobs = arguments.logprobs is not None
        self._last = "\n"

    def started(self, event: Started) -> None:
        pass

    def delta(self, event: Delta) -> None:
        if self._logprobs:
            text = "".join(f"{_logprob_line(info)}\n" for info in event.tokens)
        elif self._ids:
            text = "".join(f"{token_id}\n" for token_id in event.token_ids)
        else:
            text = event.text
        if text:
            self._last = text[-1]
            sys.stdout.write(text)
            sys.stdout.flush()

    def finished(self, event: Finished) -> None:
        self.broken()

    def broken(self) -> None:
        """Ends the line, so that what follows (a prompt, an error) has its own."""
        if self._last != "\n":
            sys.stdout.write("\n")
            sys.stdout.flush()


class _JsonAnswer:
    """One JSON object at the end."""

    def __init__(self) -> None:
        self._result: dict[str, Any] = {}
        self._text: list[str] = []
        self._ids: list[int] = []
        self._infos: list[TokenInfo] = []

    def started(self, event: Started) -> None:
        self._result |= asdict(event)

    def delta(self, event: Delta) -> None:
        self._text.append(event.text)
        self._ids += event.token_ids
        self._infos += event.tokens

    def broken(self) -> None:
        """Nothing: half an answer is no JSON."""

    def finished(self, event: Finished) -> None:
        self._result |= {"text": "".join(self._text), "token_ids": self._ids}
        if self._infos:
            self._result["tokens"] = [asdict(info) for info in self._infos]
        _print_json(self._result | asdict(event) | {"decode_tokens_per_s": event.decode_tokens_per_s})


def _logprob_line(info: TokenInfo) -> str:
    tokens = (info.chosen, *info.top)
    return "\t".join(f"{token.token_id} {token.logprob:.4f} {_piece(token.text)}" for token in tokens)


def models(arguments: Namespace) -> None:
    with Client(arguments.coordinator) as client:
        found = client.models(timeout_s=arguments.timeout)
    if arguments.json:
        _print_json([asdict(model) for model in found])
        return
    from client.tables import print_models

    print_models(found)


def load(arguments: Namespace) -> None:
    from client.progress import load_progress
    from client.tables import print_plan

    plan: Plan | None = None
    loaded: Model | None = None
    with (
        Client(arguments.coordinator) as client,
        load_progress() as show,
        client.load_model(
            arguments.model, context_length=arguments.context_length, force=arguments.force
        ) as events,
    ):
        for event in events:
            show(event)
            plan = event if isinstance(event, Plan) else plan
            loaded = event if isinstance(event, Model) else loaded
    if arguments.json:
        _print_json({"model": loaded and asdict(loaded), "plan": plan and asdict(plan)})
    elif plan and loaded:
        print(f"{loaded.name} is loaded, context {loaded.context_length} tokens")
        print_plan(plan)


def unload(arguments: Namespace) -> None:
    with Client(arguments.coordinator) as client:
        client.unload_model(force=arguments.force, timeout_s=arguments.timeout)


def status(arguments: Namespace) -> None:
    from client.tables import print_status, watch_status

    with Client(arguments.coordinator) as client:
        if not arguments.watch:
            now = client.status(timeout_s=arguments.timeout)
            if arguments.json:
                _print_json(asdict(now))
            else:
                print_status(now)
            return
        with client.watch_status(arguments.interval) as states:
            if not arguments.json:
                watch_status(states)
            for state in states:
                print(json.dumps(_plain(asdict(state)), ensure_ascii=False), flush=True)


def tokenize(arguments: Namespace) -> None:
    text = _input_text(arguments)
    with Client(arguments.coordinator) as client:
        pieces = client.tokenize_pieces(
            text,
            model=arguments.model,
            add_special=not arguments.no_special,
            parse_special=arguments.parse_special,
            timeout_s=arguments.timeout,
        )
    if arguments.json:
        _print_json({"ids": [token for token, _ in pieces], "pieces": [piece for _, piece in pieces]})
    elif arguments.pieces:
        for token_id, piece in pieces:
            print(f"{token_id}\t{_piece(piece)}")
    else:
        print(*(token_id for token_id, _ in pieces))


def detokenize(arguments: Namespace) -> None:
    ids = _parse_ids(arguments.ids or [read_stdin()])
    with Client(arguments.coordinator) as client:
        text = client.detokenize(
            ids, model=arguments.model, show_special=arguments.show_special, timeout_s=arguments.timeout
        )
    if arguments.json:
        _print_json({"text": text})
    else:
        print(text)


def _options(arguments: Namespace) -> GenerationOptions:
    names = (*SAMPLING_NUMBERS, "max_tokens", "stop", "ignore_eos")
    given = {name: getattr(arguments, name) for name in names}
    given["logit_bias"] = dict(arguments.logit_bias) if arguments.logit_bias else None
    options: GenerationOptions = {}
    options.update({name: value for name, value in given.items() if value is not None})  # type: ignore[typeddict-item]
    return options


def _input_text(arguments: Namespace) -> str:
    if arguments.text is not None:
        if arguments.file is not None:
            raise InvalidRequestError("give a text or --file, not both")
        return argument_text(arguments.text)
    return read_file(arguments.file or "-")


def _parse_ids(parts: Sequence[str]) -> list[int]:
    """Ids separated by commas or blanks."""
    words = " ".join(parts).replace(",", " ").split()
    for word in words:
        if not (word.isascii() and word.isdigit()):
            raise InvalidRequestError(f"{word!r} is not a token id: ids are whole numbers from 0")
    return [int(word) for word in words]


def _piece(data: bytes) -> str:
    """A token's bytes on one line: as a JSON string, bytes that are no text as \\xNN."""
    return json.dumps(data.decode("utf-8", errors="backslashreplace"), ensure_ascii=False)


def _print_json(value: Any) -> None:
    print(json.dumps(_plain(value), ensure_ascii=False))


def _plain(value: Any) -> Any:
    """For JSON: bytes as text (bytes that are none as \\xNN), numbers that are not finite as null."""
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="backslashreplace")
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
