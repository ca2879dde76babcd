"""The streamed answer: where Markdown is cut, what reaches the terminal."""

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from client.answer_view import AnswerView, split_blocks, visible


@pytest.mark.parametrize(
    ("text", "done"),
    [
        ("one", ""),
        ("one\n\n", ""),
        ("one\n\ntwo", "one\n\n"),
        ("one\n\ntwo\n\nthree", "one\n\ntwo\n\n"),
        ("- a\n\n  more of a", ""),
        ("```\na\n\nb", ""),
        ("```\na\n\nb\n```\n\nc", "```\na\n\nb\n```\n\n"),
        ("````\n```\n\nx\n````\n\ny", "````\n```\n\nx\n````\n\n"),
        ("~~~\n\n```\n\nx", ""),
    ],
)
def test_only_whole_blocks_are_cut_off(text: str, done: str) -> None:
    assert split_blocks(text) == (done, text[len(done) :])


def render(pieces: list[str], plain: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=60, height=10, color_system=None)
    with AnswerView(console, plain) as view:
        for piece in pieces:
            view.feed(piece)
    return out.getvalue()


def screen(output: str, width: int = 60) -> list[str]:
    """What a terminal would show at the end: cursor-up and erase-line carried out."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[\??[\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", output):
        if part == "\n":
            row += 1
            while len(lines) <= row:
                lines.append("")
        elif part == "\r":
            pass
        elif part.startswith("\x1b"):
            if part.endswith("A"):
                row -= int(part[2:-1] or 1)
            elif part.endswith("K"):
                lines[row] = ""
        else:
            lines[row] += part
    return [line.rstrip() for line in lines]


def test_markdown_is_drawn_block_by_block_and_stays() -> None:
    shown = "\n".join(screen(render(list("# Title\n\nSome *words*.\n\n- a\n- b"), plain=False)))
    assert shown.split("\n\n", 1)[0].strip() == "Title"
    assert "Some words." in shown and " • a\n • b" in shown
    assert "*" not in shown
    assert shown.count("Some words.") == 1


def test_an_answer_longer_than_the_screen_is_shown_whole() -> None:
    code = "```\n" + "".join(f"line{number}\n" for number in range(40)) + "```"
    shown = "\n".join(screen(render([code[at : at + 7] for at in range(0, len(code), 7)], plain=False)))
    assert re.findall(r"line(\d+)", shown) == [str(number) for number in range(40)]


def test_plain_text_comes_as_it_is() -> None:
    assert render(["# a\n", "*b", "*"], plain=True) == "# a\n*b*\n"


def test_an_empty_answer_leaves_no_line_behind() -> None:
    assert render([], plain=True) == ""
    assert [line for line in screen(render([], plain=False)) if line] == []


@given(st.text())
def test_no_control_character_reaches_the_terminal(text: str) -> None:
    shown = visible(text)
    assert len(shown) == len(text)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
