"""`pipellm-client chat` for real: in a pipe, and on a terminal made with `pty`."""

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from tests.e2e.daemons import Mesh

QUESTION = "who is the little dog"
OPTIONS = ["--temperature", "0", "--max-tokens", "8", "--ignore-eos"]
PROMPT = ">"  # what follows it depends on how the editor moves the cursor
CTRL_C, CTRL_D = "\x03", "\x04"


def command(mesh: Mesh, *argv: str) -> list[str]:
    return [sys.executable, "-m", "client.cli", "chat", "--coordinator", mesh.address, *argv]


class Terminal:
    """The chat on a pseudo-terminal of 100 columns; what it shows without colours and cursor movement."""

    def __init__(self, argv: list[str], state: Path) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            termios.tcsetwinsize(0, (40, 100))
            os.execve(argv[0], argv, os.environ | {"TERM": "xterm", "XDG_STATE_HOME": str(state)})
        self.shown = ""
        self._seen = 0

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def expect(self, pattern: str, timeout_s: float = 20.0) -> str:
        """Waits for `pattern` after what was expected before; what was shown up to its end."""
        deadline = time.monotonic() + timeout_s
        while not (found := re.compile(pattern).search(self.shown, self._seen)):
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.shown[self._seen :]!r}"
            if select.select([self._fd], [], [], 0.1)[0]:
                data = os.read(self._fd, 65536).decode(errors="replace")
                if "\x1b[6n" in data:
                    self.type("\x1b[1;1R")  # where the cursor is, which prompt-toolkit asks
                self.shown += re.sub(r"\x1b\[[\d;?]*[ -/]*[@-~]|\x1b[=>]|\r", "", data)
        before, self._seen = self._seen, found.end()
        return self.shown[before : self._seen]

    def exit_code(self, timeout_s: float = 20.0) -> int:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if select.select([self._fd], [], [], 0.05)[0]:
                with contextlib.suppress(OSError):  # closed at the other end
                    self.shown += os.read(self._fd, 65536).decode(errors="replace")
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
        raise AssertionError(f"the chat is still there: {self.shown[-500:]!r}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._fd)


@pytest.fixture
def terminal(mesh: Mesh, tmp_path: Path) -> Iterator[Terminal]:
    with Terminal(command(mesh, "--plain", *OPTIONS), tmp_path) as terminal:
        terminal.expect("tiny. /help lists commands")
        terminal.expect(PROMPT)
        yield terminal


def ask(terminal: Terminal, text: str) -> str:
    """Sends a message; the answer with the line of figures after it."""
    terminal.type(f"{text}\r")
    shown = terminal.expect(r"tokens/s · first after [\d.]+ s · context \d+ of \d+ \(\d+%\).*\n")
    terminal.expect(PROMPT)
    return shown


def test_a_pipe_gets_the_answer_and_nothing_else(mesh: Mesh) -> None:
    done = subprocess.run(
        command(mesh, *OPTIONS), input=f"{QUESTION}\n".encode(), capture_output=True, timeout=60
    )
    events = mesh.client.chat(
        [{"role": "user", "content": QUESTION}], temperature=0.0, max_tokens=8, ignore_eos=True
    )
    answer = "".join(event.text for event in events if hasattr(event, "text"))
    assert answer.strip()
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode() == answer.removesuffix("\n") + "\n"


def test_the_system_message_and_settings_of_the_command_line_count(mesh: Mesh) -> None:
    answers = set()
    for more in ([], ["--system", "they play in the tree house"], ["--max-tokens", "3"]):
        argv = command(mesh, *OPTIONS, *more)
        answers.add(subprocess.check_output(argv, input=QUESTION.encode(), timeout=60))
    assert len(answers) == 3


def test_questions_commands_and_leaving(terminal: Terminal, tmp_path: Path) -> None:
    first = ask(terminal, QUESTION)
    assert "8 tokens, " in first and "cut at max_tokens" in first
    used = int(re.findall(r"context (\d+) of 512", first)[0])
    assert int(re.findall(r"context (\d+) of 512", ask(terminal, "what is it"))[0]) > used + 8
    terminal.type("/undo\r")
    terminal.expect("taken back: what is it")
    terminal.type("/retry\r")
    terminal.expect(rf"context {used} of 512")  # the first question alone, again
    terminal.type("/show\r")
    assert "messages  2" in terminal.expect(r"context   \d+ of 512 tokens")
    terminal.type("/set temperature hot\r")
    terminal.expect("error: temperature is a number, not 'hot'")
    terminal.type("/set temperature -1\r")
    terminal.expect("temperature is -1.0")
    terminal.type("hello\r")
    terminal.expect("error: .*temperature")  # the coordinator's refusal; the question is withdrawn
    terminal.type("/set temperature 0\r")
    terminal.expect("temperature is 0.0")
    terminal.type(f"/save {tmp_path}/chat.json\r")
    terminal.expect("2 messages written")
    terminal.type("/exit\r")
    assert terminal.exit_code() == 0
    assert QUESTION in (tmp_path / "pipellm" / "chat_history").read_text()
    assert (tmp_path / "pipellm" / "chat_history").stat().st_mode & 0o077 == 0


def test_a_pasted_text_is_one_message(terminal: Terminal, tmp_path: Path) -> None:
    terminal.type("\x1b[200~first line\nsecond line\nthird line\x1b[201~")  # bracketed paste
    terminal.expect("third line")
    ask(terminal, "")
    terminal.type(f"/save {tmp_path}/chat.json\r")
    terminal.expect("2 messages written")
    assert '"first line\\nsecond line\\nthird line"' in (tmp_path / "chat.json").read_text()


def test_ctrl_c_stops_the_answer_and_not_the_chat(mesh: Mesh, tmp_path: Path) -> None:
    argv = command(mesh, "--temperature", "0", "--ignore-eos")  # to the context's end, drawn as Markdown
    with Terminal(argv, tmp_path) as terminal:
        terminal.expect(PROMPT)
        terminal.type(f"{QUESTION}\r")
        mesh.wait(lambda: mesh.client.status().requests_running == 1, "the request to run", 10)
        time.sleep(0.2)
        terminal.type(CTRL_C)
        terminal.expect(r"stopped after \d+ tokens")
        mesh.wait(lambda: mesh.client.status().requests_running == 0, "the request to end", 10)
        terminal.expect(PROMPT)
        terminal.type(CTRL_C)
        terminal.expect("Ctrl-D or /exit leaves")
        terminal.type("/set max_tokens 5\r")
        terminal.expect("max_tokens is 5")
        assert "5 tokens, " in ask(terminal, "again")
        terminal.type(CTRL_D)
        assert terminal.exit_code() == 0


def test_what_is_typed_during_an_answer_waits_for_the_prompt(mesh: Mesh, tmp_path: Path) -> None:
    argv = command(mesh, "--temperature", "0", "--ignore-eos", "--max-tokens", "300")
    with Terminal(argv, tmp_path) as terminal:
        terminal.expect(PROMPT)
        terminal.type(f"{QUESTION}\r")
        mesh.wait(lambda: mesh.client.status().requests_running == 1, "the request to run", 10)
        terminal.type("/show\r")
        shown = terminal.expect("300 tokens, ")
        assert "/show" not in shown.partition(QUESTION)[2]
        terminal.expect(r"model     tiny")
        terminal.type("/exit\r")
        assert terminal.exit_code() == 0
