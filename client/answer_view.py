"""A streamed answer on a terminal: Markdown, drawn while it grows.

Blocks that are complete are printed for good, so that they scroll as ordinary output; only the block that
still grows is redrawn, and of it only what fits the screen.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.spinner import Spinner

_REDRAWS_PER_S = 10
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
# A model's text must not be able to steer the terminal: control characters are shown as symbols.
_CONTROLS = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
_CONTROLS |= {0x7F: "\u2421"} | dict.fromkeys(range(0x80, 0xA0), "\ufffd")


def visible(text: str) -> str:
    """`text` with control characters, newline and tab apart, made visible and harmless."""
    return text.translate(_CONTROLS)


def split_blocks(text: str) -> tuple[str, str]:
    """Cuts Markdown into complete blocks and the rest, which may still grow.

    A cut lies at the last blank line that is outside a code fence and before a line that is not indented
    (an indented one may go on with a list item).
    """
    cut, offset, fence, blank = 0, 0, "", False
    for line in text.splitlines(keepends=True):
        if blank and not fence and line.strip() and not line[0].isspace():
            cut = offset
        opened = _FENCE.match(line)
        if fence:
            if opened and opened[1].startswith(fence) and not line.strip(" `~\r\n"):
                fence = ""
        elif opened:
            fence = opened[1]
        blank = not line.strip() and line.endswith("\n")
        offset += len(line)
    return text[:cut], text[cut:]


class AnswerView:
    """`with AnswerView(console, plain) as view:` and `view.feed(text)` for each piece of the answer."""

    def __init__(self, console: Console, plain: bool) -> None:
        self._console = console
        self._plain = plain
        self._rest = ""
        self._printed = False
        self._live = Live(
            Spinner("dots", style="dim"),
            console=console,
            transient=True,
            refresh_per_second=_REDRAWS_PER_S,
            vertical_overflow="visible",
        )

    def feed(self, text: str) -> None:
        text = visible(text)
        if self._plain:
            self._printed = self._printed or bool(text)
            self._console.out(text, end="", highlight=False)
            return
        done, self._rest = split_blocks(self._rest + text)
        self._live.update(_Block(self._rest, tail_only=True))
        if done:
            self._print(done)

    def __enter__(self) -> Self:
        if not self._plain:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._plain:
            if self._printed:
                self._console.out("")
            return
        self._live.update("")
        self._live.stop()
        if self._rest.strip():
            self._print(self._rest)

    def _print(self, block: str) -> None:
        if self._printed:
            self._console.print()
        self._console.print(_Block(block), end="")
        self._printed = True


class _Block:
    """Markdown without blank lines around it; with `tail_only`, as many last lines as the screen holds."""

    def __init__(self, text: str, tail_only: bool = False) -> None:
        self._content = Markdown(text, hyperlinks=False)  # a link's address is shown, not hidden
        self._tail_only = tail_only

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._content, options.update(height=None), pad=False)
        while lines and _is_blank(lines[0]):
            lines.pop(0)
        while lines and _is_blank(lines[-1]):
            lines.pop()
        for line in lines[-max(1, console.height - 2) :] if self._tail_only else lines:
            yield from line
            yield Segment.line()


def _is_blank(line: Sequence[Segment]) -> bool:
    return not any(segment.text.strip() or (segment.style and segment.style.bgcolor) for segment in line)
