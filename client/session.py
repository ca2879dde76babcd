"""A chat's state and its commands: dialogue, system message, settings, files. No terminal, no mesh.

A line is a command when it begins with one slash; two slashes begin an ordinary message with one. The
questions and answers alternate in `messages`; while an answer is under way its question is the last.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from client.events import Message
from client.requests import SAMPLING_NUMBERS, GenerationOptions
from client.text_input import decode_utf8
from common.errors import InvalidRequestError

_FORMAT = "pipellm-chat"
_SETTINGS: dict[str, type] = {**SAMPLING_NUMBERS, "max_tokens": int, "stop": str, "ignore_eos": bool}

COMMANDS = {
    "help": ("", "this list"),
    "reset": ("", "forget the dialogue (system message and settings stay)"),
    "system": ("TEXT", "set the system message; without TEXT, remove it"),
    "undo": ("", "take back the last question and its answer"),
    "retry": ("", "answer the last question anew"),
    "set": ("NAME VALUE", "change a setting; VALUE 'default' gives it back to the model"),
    "show": ("", "model, settings, system message and context use"),
    "save": ("FILE", "write the dialogue to a file"),
    "load": ("FILE", "go on with a saved dialogue"),
    "read": ("FILE", "put a text file before your next message"),
    "exit": ("", "leave (so does Ctrl-D)"),
}


@dataclass(frozen=True)
class Outcome:
    """What a command did: `text` to show, and whether to leave or to answer the last question now."""

    text: str = ""
    leave: bool = False
    answer: bool = False


@dataclass
class ChatSession:
    """The dialogue with one model. Methods raise InvalidRequestError for what the user got wrong."""

    model: str = ""
    system: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    attachments: list[str] = field(default_factory=list)
    context_used: int = 0
    context_length: int = 0

    def ask(self, line: str) -> None:
        """Takes the user's message, with the files that /read put before it."""
        text = line[1:] if line.startswith("//") else line
        self.messages.append(Message("user", "\n\n".join([*self.attachments, text])))
        self.attachments.clear()

    def answered(self, text: str) -> None:
        """Keeps an answer, whole or stopped early."""
        self.messages.append(Message("assistant", text))

    def withdraw(self) -> None:
        """Takes back a question that got no answer."""
        if self.messages and self.messages[-1].role == "user":
            self.messages.pop()

    def to_send(self) -> list[Message]:
        system = [Message("system", self.system)] if self.system else []
        return [*system, *self.messages]

    def options(self) -> GenerationOptions:
        options: GenerationOptions = {}
        options.update(self.settings)  # type: ignore[typeddict-item]
        return options

    def run(self, line: str) -> Outcome:
        """Carries out a command line."""
        name, *rest = line[1:].split(None, 1) or [""]
        argument = rest[0].strip() if rest else ""
        if name not in COMMANDS:
            hint = "/help lists them; begin a message with // to send it as it is"
            raise InvalidRequestError(f"unknown command /{name}; {hint}")
        action: Callable[[str], Outcome] = getattr(self, f"_run_{name}")
        wants, _ = COMMANDS[name]
        if wants == "FILE" and not argument:
            raise InvalidRequestError(f"/{name} needs a file: /{name} FILE")
        if not wants and argument:
            raise InvalidRequestError(f"/{name} takes nothing after it")
        return action(argument)

    def _run_help(self, _: str) -> Outcome:
        rows = [(f"/{name} {wants}".rstrip(), text) for name, (wants, text) in COMMANDS.items()]
        width = max(len(usage) for usage, _ in rows)
        keys = "Enter sends, Alt-Enter starts a new line, Ctrl-C stops an answer. A paste is one message."
        return Outcome("\n".join([*(f"{usage:{width}}  {text}" for usage, text in rows), "", keys]))

    def _run_reset(self, _: str) -> Outcome:
        self._replace_dialogue([])
        self.attachments.clear()
        return Outcome("the dialogue is forgotten")

    def _run_system(self, text: str) -> Outcome:
        self.system = text
        return Outcome("system message set" if text else "system message removed")

    def _run_undo(self, _: str) -> Outcome:
        question = self._last_question()
        text = self.messages[question].content
        self._replace_dialogue(self.messages[:question])
        return Outcome(f"taken back: {_shortened(text)}")

    def _run_retry(self, _: str) -> Outcome:
        self._replace_dialogue(self.messages[: self._last_question() + 1])
        return Outcome(answer=True)

    def _run_set(self, argument: str) -> Outcome:
        name, _, value = argument.partition(" ")
        name, value = name.replace("-", "_"), value.strip()
        if name not in _SETTINGS:
            given = f"no setting {name!r}" if name else "/set needs a name and a value"
            raise InvalidRequestError(f"{given}; there are {', '.join(_SETTINGS)}")
        if not value:
            raise InvalidRequestError(f"/set {name} needs a value (or 'default')")
        if value == "default":
            self.settings.pop(name, None)
            return Outcome(f"{name} is the model's default")
        self.settings[name] = _parse_setting(name, value)
        return Outcome(f"{name} is {self.settings[name]}")

    def _run_show(self, _: str) -> Outcome:
        settings = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        lines = [
            f"model     {self.model}",
            f"system    {_shortened(self.system) if self.system else '(none)'}",
            f"settings  {settings or '(the defaults)'}",
            f"messages  {len(self.messages)}",
        ]
        if self.context_length:
            lines.append(f"context   {self.context_used} of {self.context_length} tokens")
        if self.attachments:
            lines.append(f"waiting   {sum(map(len, self.attachments))} characters for your next message")
        return Outcome("\n".join(lines))

    def _run_save(self, argument: str) -> Outcome:
        path = _path("write", argument)
        with _refusing("write", path):
            exists = path.exists()
        if exists:
            _read_saved(path)  # overwrites nothing but a saved chat
        document = {
            "format": _FORMAT,
            "model": self.model,
            "system": self.system,
            "settings": {
                name: value
                for name, value in self.settings.items()
                if name in _SETTINGS and isinstance(value, _SETTINGS[name])  # what /set could have set
            },
            "messages": [asdict(message) for message in self.messages],
        }
        with _refusing("write", path):
            data = (json.dumps(document, ensure_ascii=False, indent=1) + "\n").encode("utf-8")
            _replace(path, data)
        return Outcome(f"{len(self.messages)} messages written to {path}")

    def _run_load(self, argument: str) -> Outcome:
        path = _path("read", argument)
        saved = _read_saved(path)
        self.system, self.settings = saved.system, saved.settings
        self._replace_dialogue(saved.messages)
        return Outcome(f"{len(self.messages)} messages read from {path}")

    def _run_read(self, argument: str) -> Outcome:
        path = _path("read", argument)
        text = decode_utf8(_read_bytes(path), str(path))
        self.attachments.append(text)
        return Outcome(f"{len(text)} characters of {path} go before your next message")

    def _run_exit(self, _: str) -> Outcome:
        return Outcome(leave=True)

    def _last_question(self) -> int:
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index].role == "user":
                return index
        raise InvalidRequestError("there is no question yet")

    def _replace_dialogue(self, messages: list[Message]) -> None:
        self.messages = messages
        self.context_used = 0


def _parse_setting(name: str, value: str) -> Any:
    kind = _SETTINGS[name]
    if kind is bool:
        words = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}
        if value.lower() not in words:
            raise InvalidRequestError(f"{name} is on or off, not {value!r}")
        return words[value.lower()]
    try:
        return kind(value)
    except ValueError:
        number = "a whole number" if kind is int else "a number"
        raise InvalidRequestError(f"{name} is {number}, not {value!r}") from None


def _read_saved(path: Path) -> ChatSession:
    """The system message, settings and dialogue of a file that /save wrote."""
    try:
        document = json.loads(decode_utf8(_read_bytes(path), str(path)))
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise InvalidRequestError(f"{path} is not a saved chat")
    try:
        system, settings = document["system"], document["settings"]
        messages = [Message(entry["role"], entry["content"]) for entry in document["messages"]]
        texts = [system, *(text for message in messages for text in (message.role, message.content))]
        sound = all(isinstance(text, str) for text in texts) and all(
            isinstance(value, _SETTINGS[name]) for name, value in settings.items()
        )
        if sound:
            "".join([*texts, settings.get("stop", "")]).encode("utf-8")  # JSON can name half a character
    except (KeyError, TypeError, AttributeError, UnicodeEncodeError):
        sound = False
    if not sound:
        raise InvalidRequestError(f"{path} is a damaged saved chat")
    return ChatSession(system=system, settings=settings, messages=messages)


def _path(doing: str, argument: str) -> Path:
    """The file a command names, with ~ written out; `doing` it is what the command is about."""
    with _refusing(doing, argument):
        return Path(argument).expanduser()


def _read_bytes(path: Path) -> bytes:
    with _refusing("read", path):
        return path.read_bytes()


def _replace(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all. Only its owner may read it: what people ask is their own affair."""
    number, part = tempfile.mkstemp(prefix=".pipellm-", suffix=".part", dir=path.parent)
    try:
        with open(number, "wb") as file:
            file.write(data)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


@contextlib.contextmanager
def _refusing(doing: str, path: Path | str) -> Iterator[None]:
    """Within it, whatever Python and the system object to in a path is an InvalidRequestError.

    That is OSError, RuntimeError for the home of a user who does not exist, and ValueError for a NUL
    character and for text that is not Unicode.
    """
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise InvalidRequestError(f"cannot {doing} {path}: {why}") from error


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:57]}..."
