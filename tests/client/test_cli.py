"""The command line without a coordinator: usage, input, exit codes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from client.cli import main, make_parser

NOWHERE = ["--coordinator", "unix:/nonexistent/socket"]


def run(*argv: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIPELLM_")}
    return subprocess.run(
        [sys.executable, "-m", "client.cli", *argv], input=stdin, capture_output=True, env=env, timeout=60
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["sing"], "invalid choice: 'sing'"),
        (["status", "--colour"], "unrecognized arguments: --colour"),
        (["generate", "x", "--temp", "1"], "unrecognized arguments: --temp"),  # no guessing at abbreviations
        (["generate", "x", "--top-k", "many"], "--top-k: 'many' is not a whole number, such as 8"),
        (["generate", "x", "--temperature", "hot"], "--temperature: 'hot' is not a number, such as 0.5"),
        (["generate", "x", "--timeout", "soon"], "--timeout: 'soon' is not a number"),
        (["chat", "m.gguf", "--stages", "all"], "--stages: 'all' is not a whole number"),
        (["generate", "x", "--logit-bias", "5"], "'5' is not ID=BIAS"),
        (["generate", "x", "--timeout", "nan"], "nan is not a time above 0"),
        (["generate", "x", "--timeout", "1e300"], "1e300 is not a time above 0 and up to 10000000 s"),
        (["status", "--timeout", "inf"], "inf is not a time above 0"),
        (["chat", "m.gguf", "--stages", "0"], "0 is not at least 1"),
    ],
)
def test_wrong_usage_is_told_and_exits_with_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(argv)
    assert leaving.value.code == 2
    told = capsys.readouterr()
    assert message in told.err and told.out == ""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["generate", "x", "--ids", "1"], "give --ids or a text, not both"),
        (["generate", "x", "--file", "y"], "give a text or --file, not both"),
        (["generate", "--ids", "1,two"], "'two' is not a token id"),
        (["detokenize", "-3"], "'-3' is not a token id"),
        (["tokenize", "--file", "/nonexistent/text"], "cannot read /nonexistent/text: No such file"),
        (["status", "--coordinator", "somewhere"], "address 'somewhere': expected host:port or unix:/path"),
        (["chat", "--local"], "no question on standard input"),
    ],
)
def test_wrong_input_is_told_and_exits_with_2(argv: list[str], message: str) -> None:
    done = run(*argv)
    assert (done.returncode, done.stdout) == (2, b"")
    assert message in done.stderr.decode()


def test_invalid_utf8_is_refused_with_its_offset(tmp_path: Path) -> None:
    file = tmp_path / "latin1.txt"
    file.write_bytes("gr\xfc\xdfe".encode("latin-1"))
    for argv, stdin in (
        (["generate", "--file", str(file)], b""),
        (["generate", "--file", "-"], file.read_bytes()),
        (["tokenize"], file.read_bytes()),
        (["chat"], file.read_bytes()),
    ):
        done = run(*argv, stdin=stdin)
        assert done.returncode == 2
        assert b"invalid UTF-8 at byte 2 (0xfc)" in done.stderr


@pytest.mark.parametrize(
    "argv",
    [["status"], ["models"], ["generate", "x"], ["tokenize", "x"], ["detokenize", "1"], ["load", "m"]],
)
def test_without_a_coordinator_the_exit_code_is_3(argv: list[str]) -> None:
    done = run(*argv, *NOWHERE)
    assert (done.returncode, done.stdout) == (3, b"")
    assert b"unix:/nonexistent/socket cannot be reached" in done.stderr


@pytest.mark.parametrize(
    "argv",
    [["status"], ["models"], ["unload"], ["tokenize", "x"], ["detokenize", "1"]],
    ids=lambda argv: argv[0],
)
def test_a_coordinator_that_is_silent_is_not_waited_for_without_end(argv: list[str]) -> None:
    assert make_parser().parse_args(argv).timeout == 30.0
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        done = run(*argv, "--coordinator", address, "--timeout", "0.3")
    assert (done.returncode, done.stdout) == (4, b"")
    assert f"{address} did not answer within the deadline" in done.stderr.decode()


def test_a_chat_without_coordinator_and_model_says_what_to_do() -> None:
    done = run("chat", *NOWHERE, stdin=b"hello\n")
    assert (done.returncode, done.stdout) == (3, b"")
    assert b"pipellm-client chat MODEL.gguf" in done.stderr
    done = run("chat", "missing.gguf", *NOWHERE, stdin=b"hello\n")
    assert done.returncode == 1
    assert b"missing.gguf: no such file (and no coordinator answers" in done.stderr


def test_help_needs_nothing_heavy() -> None:
    script = (
        "import sys, contextlib, io\n"
        "from client.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "    main(['--help'])\n"
        "heavy = ('grpc', 'rich', 'torch', 'numpy', 'prompt_toolkit')\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_api_is_imported_without_torch_and_in_parts() -> None:
    script = (
        "import sys, client\n"
        "assert 'grpc' not in sys.modules\n"
        "for name in client.__all__:\n"
        "    getattr(client, name)\n"
        "assert 'torch' not in sys.modules and 'prompt_toolkit' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
