"""A chat's state and commands."""

import json
from pathlib import Path

import pytest

from client.events import Message
from client.session import COMMANDS, ChatSession
from common.errors import InvalidRequestError


@pytest.fixture
def session() -> ChatSession:
    session = ChatSession(model="m")
    for number in (1, 2):
        session.ask(f"question {number}")
        session.answered(f"answer {number}")
    return session


def texts(session: ChatSession) -> list[str]:
    return [message.content for message in session.messages]


def test_question_and_answer_alternate_behind_the_system_message(session: ChatSession) -> None:
    session.run("/system be brief")
    session.ask("question 3")
    assert session.to_send() == [
        Message("system", "be brief"),
        Message("user", "question 1"),
        Message("assistant", "answer 1"),
        Message("user", "question 2"),
        Message("assistant", "answer 2"),
        Message("user", "question 3"),
    ]
    session.run("/system")
    assert session.to_send()[0].role == "user"


def test_a_question_without_an_answer_can_be_withdrawn(session: ChatSession) -> None:
    session.ask("too much")
    session.withdraw()
    assert texts(session)[-1] == "answer 2"
    session.withdraw()  # an answered one stays
    assert texts(session)[-1] == "answer 2"


def test_undo_takes_back_one_exchange_at_a_time(session: ChatSession) -> None:
    assert "question 2" in session.run("/undo").text
    assert texts(session) == ["question 1", "answer 1"]
    session.run("/undo")
    assert texts(session) == []
    with pytest.raises(InvalidRequestError, match="no question"):
        session.run("/undo")


def test_retry_drops_the_answer_and_asks_for_another(session: ChatSession) -> None:
    assert session.run("/retry").answer
    assert texts(session) == ["question 1", "answer 1", "question 2"]


def test_reset_keeps_system_message_and_settings(session: ChatSession) -> None:
    session.run("/system s")
    session.run("/set seed 5")
    session.run("/reset")
    assert (session.messages, session.system, session.options()) == ([], "s", {"seed": 5})


def test_settings_are_typed_and_can_be_given_back() -> None:
    session = ChatSession()
    for line in ("/set temperature 0.5", "/set top-k 10", "/set ignore_eos on", "/set stop a b"):
        session.run(line)
    assert session.options() == {"temperature": 0.5, "top_k": 10, "ignore_eos": True, "stop": "a b"}
    session.run("/set temperature default")
    assert "temperature" not in session.options()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set", "needs a name and a value; there are temperature"),
        ("/set colour 1", "no setting 'colour'"),
        ("/set top_k", "needs a value"),
        ("/set top_k many", "top_k is a whole number, not 'many'"),
        ("/set ignore_eos perhaps", "on or off"),
        ("/quit", "unknown command /quit"),
        ("/", "unknown command /"),
        ("/save", "needs a file"),
        ("/reset now", "takes nothing"),
        ("/load /nowhere/x", "cannot read /nowhere/x: No such file"),
        ("/save /nowhere/x", "cannot write /nowhere/x"),
        ("/save ~nosuch-user/x", "cannot write ~nosuch-user/x: Could not determine home"),
        ("/load ~nosuch-user/x", "cannot read ~nosuch-user/x: Could not determine home"),
        ("/read ~nosuch-user/x", "cannot read ~nosuch-user/x: Could not determine home"),
        (f"/save /tmp/{'x' * 300}", "File name too long"),
        (f"/load /tmp/{'x' * 300}", "File name too long"),
        ("/read a\0b", "cannot read a\0b: embedded null"),
        ("/save /tmp/a\0b", "cannot write /tmp/a\0b: embedded null"),
        ("/save /tmp/a\0b/c", "cannot write /tmp/a\0b/c: embedded null"),
    ],
)
def test_a_wrong_command_says_what_is_right(line: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        ChatSession().run(line)


def test_help_names_every_command() -> None:
    text = ChatSession().run("/help").text
    assert all(f"/{name}" in text for name in COMMANDS)


def test_two_slashes_begin_a_message_with_one() -> None:
    session = ChatSession()
    session.ask("//etc is a folder")
    assert texts(session) == ["/etc is a folder"]


def test_a_saved_dialogue_comes_back(session: ChatSession, tmp_path: Path) -> None:
    session.run("/system über")
    session.run("/set temperature 0.25")
    session.settings["logit_bias"] = {3: 1.0}  # from the command line: not part of a saved chat
    file = tmp_path / "my chat.json"
    session.run(f"/save {file}")
    session.run(f"/save {file}")  # a saved chat may be written over
    other = ChatSession(model="other")
    assert "4 messages" in other.run(f"/load {file}").text
    assert other.to_send() == session.to_send()
    assert other.settings == {"temperature": 0.25}
    assert other.model == "other"
    assert [path.name for path in tmp_path.iterdir()] == ["my chat.json"]


def test_save_writes_over_nothing_else(session: ChatSession, tmp_path: Path) -> None:
    file = tmp_path / "letter.txt"
    file.write_text("dear")
    with pytest.raises(InvalidRequestError, match="not a saved chat"):
        session.run(f"/save {file}")
    assert file.read_text() == "dear"


def test_a_file_nested_without_end_is_not_a_saved_chat(tmp_path: Path) -> None:
    file = tmp_path / "deep.json"
    file.write_text("[" * 200_000)
    with pytest.raises(InvalidRequestError, match=r"deep.json is not a saved chat"):
        ChatSession().run(f"/load {file}")


def test_a_save_that_fails_leaves_nothing(session: ChatSession, tmp_path: Path) -> None:
    session.system = "half a character: \ud800"
    with pytest.raises(InvalidRequestError, match="cannot write .*surrogates"):
        session.run(f"/save {tmp_path}/chat.json")
    session.system = ""
    with pytest.raises(InvalidRequestError, match="null"):
        session.run(f"/save {tmp_path}/a\0b")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        {"messages": [{"role": "user"}]},
        {"messages": "none"},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"system": 5},
        {"system": "\udfff"},
        {"settings": {"stop": "\ud800"}},
        {"settings": {"colour": 1}},
        {"settings": {"top_k": "x"}},
    ],
)
def test_a_damaged_file_changes_nothing(
    session: ChatSession, tmp_path: Path, change: dict[str, object]
) -> None:
    file = tmp_path / "chat.json"
    session.run(f"/save {file}")
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    other = ChatSession(system="kept")
    with pytest.raises(InvalidRequestError, match="damaged"):
        other.run(f"/load {file}")
    assert other == ChatSession(system="kept")


def test_read_puts_files_before_the_next_message_only(tmp_path: Path) -> None:
    for name, content in (("a", "first"), ("b", "second")):
        (tmp_path / name).write_text(content)
    session = ChatSession()
    session.run(f"/read {tmp_path}/a")
    session.run(f"/read {tmp_path}/b")
    assert "11 characters" in session.run("/show").text
    session.ask("what is it?")
    session.ask("and this?")
    assert texts(session) == ["first\n\nsecond\n\nwhat is it?", "and this?"]


def test_read_refuses_what_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(b"abc\xff")
    with pytest.raises(InvalidRequestError, match=r"image: invalid UTF-8 at byte 3 \(0xff\)"):
        ChatSession().run(f"/read {tmp_path}/image")
