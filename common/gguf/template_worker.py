"""The child process that renders chat templates: `python -m common.gguf.template_worker`.

A template is a program out of a downloaded file. Jinja's immutable sandbox keeps it from reaching Python, but
bounds neither its time nor its memory, so it runs here: the parent kills this process at a deadline, the
process limits its own memory and CPU time, and it ends when the parent's end of the socket closes.

Frames on the socket (file descriptor 0), both ways: u32 little-endian length, then JSON. A request names the
template's `source` and, to render it, the `variables`; the answer is {"text": ...} or {"error": kind,
"message": ...}. Knows nothing of tokens or models.
"""

from __future__ import annotations

import json
import math
import resource
import signal
import socket
import struct
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_MEMORY_BYTES = 1 << 30
MAX_FRAME_BYTES = 256 << 20
LENGTH = struct.Struct("<I")


class TemplateRaisedError(Exception):
    """The template called raise_exception."""


class _Environment(ImmutableSandboxedEnvironment):
    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        # Jinja would hand out an undefined value here, which prints as nothing.
        raise SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__}")


class _GenerationExtension(Extension):
    """{% generation %}...{% endgeneration %} marks what a model wrote, for training; here its body counts."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Unlike Jinja's own filter this one does not escape HTML, which models never saw in training.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRaisedError(message)


@lru_cache(maxsize=4)
def compile_template(source: str) -> jinja2.Template:
    """`source` as templates are written for: block lines leave no blank lines, loops may break."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationExtension, LoopControlExtension]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(source)


def answer(request: dict[str, Any]) -> dict[str, str]:
    """Compile, and render where the request has variables. Every failure becomes an error answer."""
    try:
        template = compile_template(request["source"])
        if "variables" not in request:
            return {"text": ""}
        now = datetime.fromisoformat(request["now"])
        return {"text": template.render(request["variables"], strftime_now=now.strftime)}
    except TemplateRaisedError as error:
        return {"error": "raised", "message": str(error)}
    except jinja2.TemplateSyntaxError as error:
        return {"error": "syntax", "message": f"line {error.lineno}: {error.message}"}
    except SecurityError as error:
        return {"error": "security", "message": str(error)}
    except MemoryError:
        return {"error": "failed", "message": f"it needs more than {MAX_MEMORY_BYTES >> 20} MiB of memory"}
    except Exception as error:
        return {"error": "failed", "message": f"{type(error).__name__}: {error}"}


def send_frame(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send one frame; ValueError when it is larger than a frame may be."""
    data = json.dumps(message).encode()
    if len(data) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(data)} bytes is larger than {MAX_FRAME_BYTES}")
    connection.sendall(LENGTH.pack(len(data)) + data)


def receive_frame(receive: Callable[[int], bytes]) -> dict[str, Any] | None:
    """One frame through `receive` (socket.recv or like it); None when the other end has closed."""
    header = _receive(receive, LENGTH.size)
    if header is None:
        return None
    (length,) = LENGTH.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes is larger than {MAX_FRAME_BYTES}")
    data = _receive(receive, length)
    if data is None:
        return None
    message: dict[str, Any] = json.loads(data)
    return message


def _receive(receive: Callable[[int], bytes], size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = receive(min(size - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)


def _limit(what: int, soft: int) -> None:
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _limit_cpu_time(timeout_s: float) -> None:
    # The parent kills this process at the deadline; this is for when the parent is gone.
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + timeout_s))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    _limit(resource.RLIMIT_AS, MAX_MEMORY_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    connection = socket.socket(fileno=0)
    send_frame(connection, {"ready": True})
    while (request := receive_frame(connection.recv)) is not None:
        _limit_cpu_time(request["timeout_s"])
        try:
            send_frame(connection, answer(request))
        except (MemoryError, ValueError):
            send_frame(connection, {"error": "failed", "message": "the text it makes is too long"})


if __name__ == "__main__":
    main()
