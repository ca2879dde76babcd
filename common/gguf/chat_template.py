"""A model's chat template: messages to the text the model was trained on.

Rendering happens in a child process (see `template_worker`), kept warm, killed when it takes too long and
started again for the next call. Knows nothing of tokens; `chat` turns the text into ids.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from common.errors import (
    DeadlineError,
    InvalidRequestError,
    PipeLLMError,
    UnavailableError,
    UnsupportedModelError,
)
from common.gguf.template_worker import receive_frame, send_frame

_START_TIMEOUT_S = 60.0  # of Python itself, on a machine under load; the template is not running yet
_COMPILE_TIMEOUT_S = 5.0


class ChatTemplate:
    """One compiled template; a context manager. Methods block, and may be called from several threads."""

    def __init__(self, source: str, *, bos_token: str, eos_token: str, where: str) -> None:
        """Compile `source` in a worker process; `where` names the model in messages.

        Raises UnsupportedModelError when the template is no Jinja template this build can compile.
        """
        self._source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._where = where
        self._worker = _Worker()
        self._closer = weakref.finalize(self, self._worker.stop)
        try:
            answer = self._worker.ask({"source": source}, _COMPILE_TIMEOUT_S)
        except (DeadlineError, InvalidRequestError) as error:
            self.close()
            raise UnsupportedModelError(f"{where}: the chat template cannot be compiled: {error}") from None
        if "error" in answer:
            self.close()
            raise UnsupportedModelError(f"{where}: the chat template cannot be compiled: {answer['message']}")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
        timeout_s: float = 2.0,
    ) -> str:
        """The text of a dialogue. `now` is the clock templates see (default: the local time).

        Raises InvalidRequestError when the template refuses the messages (with its own words) or fails on
        them, UnsupportedModelError when it reaches for what the sandbox forbids, DeadlineError when it is not
        done after `timeout_s`.
        """
        variables = {
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
            **self._tokens,
        }
        if tools:  # some templates loop over them without asking: undefined passes, none does not
            variables["tools"] = list(tools)
        request = {
            "source": self._source,
            "now": (now or datetime.now().astimezone()).isoformat(),
            "variables": variables,
        }
        try:
            answer = self._worker.ask(request, timeout_s)
        except (DeadlineError, InvalidRequestError) as error:
            raise type(error)(f"{self._where}: rendering the chat template: {error}") from None
        if "error" not in answer:
            return str(answer["text"])
        kind, message = answer["error"], answer["message"]
        if kind == "raised":
            raise InvalidRequestError(f"{self._where}: the chat template refuses these messages: {message}")
        if kind == "security":
            raise UnsupportedModelError(
                f"{self._where}: the chat template does what the sandbox forbids: {message}"
            )
        raise InvalidRequestError(f"{self._where}: the chat template fails on these messages: {message}")

    def close(self) -> None:
        """End the worker process. Nothing can be rendered afterwards."""
        self._closer()

    def __enter__(self) -> ChatTemplate:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Worker:
    """The child process and the socket to it; one request at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._stopped = False

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The worker's answer. Raises DeadlineError when it takes too long, InvalidRequestError when the
        request cannot be sent or ends the worker; either way the next request gets a new worker.
        """
        with self._lock:
            if self._stopped:
                raise PipeLLMError("the chat template was used after it was closed")
            connection = self._running()
            try:
                return _exchange(connection, {**request, "timeout_s": timeout_s}, timeout_s)
            except (TypeError, ValueError, RecursionError) as error:
                raise InvalidRequestError(f"the messages are no JSON: {error}") from None
            except TimeoutError:
                self._kill()
                raise DeadlineError(
                    f"not done after {timeout_s:g} s; the template may loop forever"
                ) from None
            except OSError:
                status = self._kill()
                raise InvalidRequestError(f"its worker process ended with status {status}") from None

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            self._kill()

    def _running(self) -> socket.socket:
        if self._socket is not None and self._process is not None and self._process.poll() is None:
            return self._socket
        self._kill()
        root = Path(__file__).resolve().parents[2]
        search_path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "common.gguf.template_worker"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": search_path},
            )
        try:
            _receive(self._socket, time.monotonic() + _START_TIMEOUT_S)
        except OSError as error:
            status = self._kill()
            raise UnavailableError(
                f"the process that renders chat templates does not start (status {status}): {error}"
            ) from error
        return self._socket

    def _kill(self) -> int | None:
        """Leave no process behind; its exit status (negative: the signal that ended it)."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is None:
            return None
        process, self._process = self._process, None
        process.kill()
        return process.wait()


def _exchange(connection: socket.socket, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    connection.settimeout(timeout_s)
    send_frame(connection, dict(request))
    return _receive(connection, deadline)


def _receive(connection: socket.socket, deadline: float) -> dict[str, Any]:
    def receive(size: int) -> bytes:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        return connection.recv(size)

    answer = receive_frame(receive)
    if answer is None:
        raise ConnectionResetError("it closed the connection")
    return answer
