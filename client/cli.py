"""`pipellm-client`: the command line. Here are the options and the exit codes; `client.commands` and
`client.chat` do the work, and are imported when one of them is wanted, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from common.arguments import at_least, number, whole_number

_EPILOG = """\
The coordinator is found by --coordinator ADDRESS, else PIPELLM_COORDINATOR, else 127.0.0.1:7070.
ADDRESS is host:port or unix:/path.

exit codes:
  0  done
  1  the request failed (the model is unknown, unsupported or not loaded, a fault inside, ...)
  2  wrong usage: an unknown option, a value out of range, a file that cannot be read
  3  no coordinator answers, or the mesh is not available just now: trying again later may help
  4  the deadline (--timeout) passed
  130  interrupted with Ctrl-C
"""

_MAX_TIMEOUT_S = 1e7
_CALL_TIMEOUT_S = 30.0  # for what a coordinator answers at once

_FLOATS = {
    "temperature": "0 is greedy",
    "top-p": "keep the most likely tokens that together have this probability",
    "min-p": "drop tokens below this share of the most likely one's probability",
    "typical-p": "locally typical sampling; 1 is off",
    "repeat-penalty": "penalty on repeated tokens; 1 is off",
    "presence-penalty": "penalty on tokens that occurred",
    "frequency-penalty": "penalty by how often a token occurred",
}
_INTEGERS = {
    "top-k": "keep the K most likely tokens; 0 keeps all",
    "repeat-last-n": "tokens the penalties look back",
    "seed": "the same seed gives the same text, where the same kernels compute it (README, Limits)",
    "max-tokens": "tokens to generate at most (default: to the context's end)",
}

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    arguments = make_parser().parse_args(argv)
    for ending in _ENDING:
        if ending != signal.SIGINT or arguments.command != "chat":  # a chat goes on after Ctrl-C
            signal.signal(ending, _leave)  # so that a mesh of its own is stopped
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal's encoding may lack what a model writes
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader left (as `| head` does); nothing more can be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(arguments: argparse.Namespace) -> int:
    from common.errors import DeadlineError, InvalidRequestError, PipeLLMError, UnavailableError

    try:
        command: Callable[[argparse.Namespace], None] = _commands()[arguments.command]
        command(arguments)
        sys.stdout.flush()
    except PipeLLMError as error:
        print(f"error: {error}", file=sys.stderr)
        codes = ((InvalidRequestError, 2), (UnavailableError, 3), (DeadlineError, 4))
        return next((code for kind, code in codes if isinstance(error, kind)), 1)
    return 0


def _commands() -> dict[str, Callable[[argparse.Namespace], None]]:
    from client import commands

    return {
        "chat": commands.chat,
        "generate": commands.generate,
        "models": commands.models,
        "load": commands.load,
        "unload": commands.unload,
        "status": commands.status,
        "tokenize": commands.tokenize,
        "detokenize": commands.detokenize,
    }


def _leave(received: int, frame: FrameType | None) -> None:
    for ending in _ENDING:  # a second one (`timeout` sends two) would break into the clean-up
        signal.signal(ending, signal.SIG_IGN)
    raise SystemExit(128 + received)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pipellm-client",
        description="Chat with, and look after, a PipeLLM mesh.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, json: bool = True) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.add_argument("--coordinator", metavar="ADDRESS", help="where the coordinator listens")
        if json:
            command.add_argument("--json", action="store_true", help="print JSON")
        return command

    _add_chat(add("chat", "talk with a model; with piped input, answer it and leave", json=False))
    _add_generate(add("generate", "continue a text, or token ids"))
    _timeout(add("models", "list the coordinator's models"))
    command = add("load", "load a model over the registered stages")
    command.add_argument("model", metavar="MODEL", help="a name from 'models', or a path")
    _context_length(command)
    command.add_argument("--force", action="store_true", help="end requests that still run")
    command = add("unload", "unload the model", json=False)
    command.add_argument("--force", action="store_true", help="end requests that still run")
    _timeout(command)
    command = add("status", "stages, layers, memory, queue, tokens/s")
    command.add_argument("--watch", action="store_true", help="go on until Ctrl-C, without a deadline")
    command.add_argument("--interval", type=number, default=1.0, metavar="S", help="seconds between (1)")
    _timeout(command)
    command = add("tokenize", "a text's token ids")
    _add_text_input(command)
    command.add_argument("--model", default="", help="default: the loaded one")
    command.add_argument("--pieces", action="store_true", help="a line a token: id and text")
    _add_special(command)
    _timeout(command)
    command = add("detokenize", "the text of token ids")
    command.add_argument("ids", nargs="*", metavar="ID", help="token ids (default: standard input)")
    command.add_argument("--model", default="", help="default: the loaded one")
    command.add_argument("--show-special", action="store_true", help="write special tokens out")
    _timeout(command)
    return parser


def _add_chat(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "model",
        nargs="?",
        default="",
        metavar="MODEL",
        help="a name the coordinator knows, or a .gguf file: with no coordinator running, a mesh of its own "
        "is started for it, one stage per GPU",
    )
    command.add_argument("--local", action="store_true", help="a mesh of its own in any case")
    some = at_least(1)
    command.add_argument("--stages", type=some, metavar="N", help="a mesh of its own with N CPU stages")
    command.add_argument("--threads", type=some, default=0, metavar="N", help="threads of a CPU stage")
    _context_length(command)
    command.add_argument("--system", type=_text, default="", metavar="TEXT", help="system message")
    command.add_argument("--plain", action="store_true", help="show the text as it comes, unrendered")
    _add_options(command)


def _add_generate(command: argparse.ArgumentParser) -> None:
    _add_text_input(command)
    command.add_argument("--ids", metavar="IDS", help="token ids instead of text, as 1,2,3")
    command.add_argument("--model", default="", help="default: the loaded one")
    command.add_argument("--return-ids", action="store_true", help="print token ids, a line each, not text")
    command.add_argument(
        "--logprobs",
        type=whole_number,
        metavar="N",
        help="a line a token: id, logprob, text, and the N likeliest",
    )
    _add_special(command)
    _add_options(command)


def _add_text_input(command: argparse.ArgumentParser) -> None:
    command.add_argument("text", nargs="?", metavar="TEXT", help="default: standard input")
    command.add_argument("--file", metavar="FILE", help="read the text from a file; - is standard input")


def _add_special(command: argparse.ArgumentParser) -> None:
    command.add_argument("--no-special", action="store_true", help="add no BOS or EOS token")
    command.add_argument("--parse-special", action="store_true", help="read special tokens in the text")


def _add_options(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("generation (what is left out takes the model's default)")
    for name, text in _INTEGERS.items():
        group.add_argument(f"--{name}", type=whole_number, metavar="N", help=text)
    for name, text in _FLOATS.items():
        group.add_argument(f"--{name}", type=number, metavar="X", help=text)
    group.add_argument("--stop", action="append", type=_text, metavar="TEXT", help="end there; repeatable")
    bias_help = "add to a token's logit; repeatable"
    group.add_argument("--logit-bias", action="append", type=_bias, metavar="ID=BIAS", help=bias_help)
    group.add_argument("--ignore-eos", action="store_true", default=None, help="never end by itself")
    group.add_argument("--timeout", type=_seconds, metavar="S", help="deadline for an answer, in seconds")


def _context_length(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--context-length", type=at_least(1), default=0, metavar="N", help="tokens a sequence may hold"
    )


def _timeout(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--timeout", type=_seconds, default=_CALL_TIMEOUT_S, metavar="S",
        help=f"deadline in seconds ({_CALL_TIMEOUT_S:g})",
    )  # fmt: skip


def _seconds(text: str) -> float:
    seconds = number(text)
    if not 0 < seconds <= _MAX_TIMEOUT_S:  # gRPC's clock would take a far deadline for a past one
        raise argparse.ArgumentTypeError(f"{text} is not a time above 0 and up to {_MAX_TIMEOUT_S:.0f} s")
    return seconds


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=BIAS, such as 42=-1.5") from None


def _text(text: str) -> str:
    """An argument that is text: its bytes must be UTF-8."""
    try:
        os.fsencode(text).decode("utf-8")
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(f"invalid UTF-8 at byte {error.start}") from None
    return text


if __name__ == "__main__":
    sys.exit(main())
