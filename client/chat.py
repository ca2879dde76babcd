"""`pipellm-client chat`: a conversation on the terminal, or one question from a pipe.

Talks to the coordinator where one runs, else to a mesh of its own. The dialogue itself is
`client.session`'s, its drawing `client.answer_view`'s, the input line `client.line_editor`'s.
"""

from __future__ import annotations

import signal
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from rich.console import Console

from client.answer_view import AnswerView, visible
from client.client import Client
from client.connect import Target, connected
from client.events import Delta, Event, Finished, FinishReason
from client.requests import GenerationOptions
from client.session import ChatSession
from client.streams import EventStream
from client.text_input import read_stdin
from common.errors import InvalidRequestError, PipeLLMError

_ENDINGS = {
    FinishReason.MAX_TOKENS: "cut at max_tokens",
    FinishReason.CONTEXT_END: "the context is full: /undo or /reset makes room",
    FinishReason.ABORTED: "aborted",
}


@dataclass(frozen=True)
class ChatSettings:
    """What the command line says about a chat."""

    target: Target
    system: str
    plain: bool
    options: GenerationOptions
    timeout_s: float | None


def run(settings: ChatSettings) -> None:
    """The whole chat. Raises PipeLLMError when it cannot start, or in a pipe when the answer fails."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    question = "" if interactive else read_stdin()
    if not interactive and not question.strip():
        raise InvalidRequestError("no question on standard input")
    with connected(settings.target) as (client, model):
        session = ChatSession(model.name, settings.system, dict(settings.options))
        if interactive:
            with _quiet_terminal():
                Conversation(client, session, settings).run()
        else:
            session.ask(question.rstrip("\n"))
            _answer_to_pipe(client, session, settings.timeout_s)


def _answer_to_pipe(client: Client, session: ChatSession, timeout_s: float | None) -> None:
    text = ""
    with _chat(client, session, timeout_s) as events:
        for event in events:
            if isinstance(event, Delta):
                text = event.text or text
                sys.stdout.write(event.text)
                sys.stdout.flush()
    if not text.endswith("\n"):
        sys.stdout.write("\n")


def _chat(client: Client, session: ChatSession, timeout_s: float | None) -> EventStream[Event]:
    options = session.options()
    options["return_ids"] = True  # counted
    return client.chat(session.to_send(), model=session.model, timeout_s=timeout_s, **options)


class Conversation:
    """Questions and answers on the terminal until the user leaves."""

    def __init__(self, client: Client, session: ChatSession, settings: ChatSettings) -> None:
        self._client = client
        self._session = session
        self._plain = settings.plain
        self._timeout_s = settings.timeout_s
        self._console = Console(highlight=False)

    def run(self) -> None:
        from client.line_editor import make_editor  # only a terminal needs it

        editor = make_editor()
        self._note(f"{self._session.model}. /help lists commands; Ctrl-D leaves.")
        while True:
            try:
                line: str = editor.prompt("> ")
            except KeyboardInterrupt:
                self._note("Ctrl-D or /exit leaves.")
                continue
            except EOFError:
                return
            try:
                if line.strip() and not self._handle(line.strip("\n")):
                    return
            except KeyboardInterrupt:
                self._note("stopped")

    def _handle(self, line: str) -> bool:
        """Answers a message or carries out a command; False to leave."""
        try:
            if line.startswith("/") and not line.startswith("//"):
                outcome = self._session.run(line)
                if outcome.text:
                    self._note(outcome.text)
                if outcome.answer:
                    self._answer()
                return not outcome.leave
            self._session.ask(line)
            self._answer()
        except PipeLLMError as error:
            self._console.out(f"error: {visible(str(error))}", style="red", highlight=False)
        return True

    def _answer(self) -> None:
        """Streams the answer to the session's last question into it; Ctrl-C ends it early."""
        text, generated, finished = "", 0, None
        sent_at = time.monotonic()
        first_at = last_at = sent_at
        try:
            events = _chat(self._client, self._session, self._timeout_s)
            view = AnswerView(self._console, self._plain)
            with events, _interrupts(events), view:
                for event in events:
                    if isinstance(event, Delta):
                        last_at = time.monotonic()
                        first_at = first_at if generated else last_at
                        generated += len(event.token_ids)
                        text += event.text
                        view.feed(event.text)
                    elif isinstance(event, Finished):
                        finished = event
        finally:
            if text or finished:
                self._session.answered(text)
            else:
                self._session.withdraw()
        if finished:
            self._session.context_used = finished.prompt_tokens + finished.generated_tokens
            self._session.context_length = finished.context_length
            self._note(summary(finished, first_at - sent_at))
        else:
            rate = (generated - 1) / (last_at - first_at) if last_at > first_at else 0.0
            self._note(f"stopped after {generated} tokens, {rate:.1f} tokens/s")

    def _note(self, text: str) -> None:
        self._console.out(visible(text), style="dim", highlight=False)


def summary(finished: Finished, first_token_s: float) -> str:
    """The line after an answer: tokens/s and context use, and why it ended if that is unusual."""
    used = finished.prompt_tokens + finished.generated_tokens
    share = used / finished.context_length if finished.context_length else 0.0
    parts = [
        f"{finished.generated_tokens} tokens, {finished.decode_tokens_per_s:.1f} tokens/s",
        f"first after {first_token_s:.2f} s",
        f"context {used} of {finished.context_length} ({share:.0%})",
    ]
    if finished.reason in _ENDINGS:
        parts.append(_ENDINGS[finished.reason])
    return " · ".join(parts)


@contextmanager
def _quiet_terminal() -> Iterator[None]:
    """Between prompts, typing is not echoed into what is being drawn; it waits for the next prompt."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    quiet = termios.tcgetattr(fd)
    quiet[0] &= ~termios.ICRNL  # the editor tells Enter by its carriage return
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(fd, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextmanager
def _interrupts(events: EventStream[Any]) -> Iterator[None]:
    """Within it, Ctrl-C closes the stream instead of raising: no drawing is torn in the middle."""

    def close(number: int, frame: FrameType | None) -> None:
        events.close()

    before = signal.signal(signal.SIGINT, close)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
