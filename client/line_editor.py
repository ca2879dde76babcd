"""The chat's input line: editing, history over sessions, completion of commands, pastes kept whole."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from client.session import COMMANDS


def make_editor() -> PromptSession[str]:
    """`.prompt("> ")` returns a message, which may have several lines.

    It raises KeyboardInterrupt for Ctrl-C and EOFError for Ctrl-D on an empty line.
    """
    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return PromptSession(
        history=_history(),
        multiline=True,  # so that a paste may hold line ends
        key_bindings=keys,
        completer=_CommandCompleter(),
        complete_while_typing=False,
        prompt_continuation="  ",
    )


class _CommandCompleter(Completer):
    """Completes /commands, and the paths of those that take a file."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        name, space, argument = text[1:].partition(" ")
        if not space:
            for command in COMMANDS:
                if command.startswith(name):
                    yield Completion(command, -len(name))
        elif COMMANDS.get(name, ("", ""))[0] == "FILE":
            yield from self._paths.get_completions(Document(argument, len(argument)), complete_event)


def history_path() -> Path:
    """`pipellm/chat_history` in the user's state folder."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state, "pipellm", "chat_history")


def _history() -> History:
    path = history_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)  # what people ask is their own affair
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))
