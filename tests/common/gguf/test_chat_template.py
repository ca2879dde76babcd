from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.errors import DeadlineError, InvalidRequestError, PipeLLMError, UnsupportedModelError
from common.gguf.chat_template import ChatTemplate
from tests.conftest import ROOT

HELLO = [{"role": "user", "content": "hello"}]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
SELECT = "{% if messages[0].content == 'loop' %}" + ENDLESS + "{% endif %}{{ messages[0].content }}"


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>", where="m.gguf")


def render(source: str, messages: list[dict[str, Any]] = HELLO, **options: Any) -> str:
    with template(source) as compiled:
        return compiled.render(messages, **options)


def workers() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "common.gguf.template_worker" in p.cmdline()]


@pytest.fixture(autouse=True)
def no_worker_is_left() -> Iterator[None]:
    yield
    gc.collect()
    assert not workers()


def test_what_templates_use() -> None:
    source = (
        "{{ bos_token }}{% set ns = namespace(n=0) %}\n"
        "{% for m in messages %}\n"
        "    {% if m.skip %}{% continue %}{% endif %}\n"
        "    {%- set ns.n = ns.n + 1 %}\n"
        "{{ m['role'] }}: {% generation %}{{ m.content | trim }}{% endgeneration %}{{ eos_token }}\n"
        "    {%- if ns.n == 2 %}{% break %}{% endif %}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": " a\n"},
        {"role": "user", "content": "b", "skip": True},
        {"role": "user", "content": "<c>"},
        {"role": "user", "content": "d"},
    ]
    assert render(source, messages) == "<s>user: a</s>user: <c></s>assistant:"
    assert render(source, messages, add_generation_prompt=False) == "<s>user: a</s>user: <c></s>"


def test_tojson_is_plain_json() -> None:
    tools = [{"name": "<é>", "n": [1, None, True]}]
    assert render("{{ tools | tojson }}", tools=tools) == '[{"name": "<é>", "n": [1, null, true]}]'
    assert render("{{ tools[0].n | tojson(indent=2) }}", tools=tools) == "[\n  1,\n  null,\n  true\n]"
    escaped = render("{{ tools[0].name | tojson(ensure_ascii=True) }}", tools=tools)
    assert escaped == '"<\\u00e9>"'


@pytest.mark.parametrize("tools", [None, []])
def test_without_tools_the_variable_is_undefined(tools: list[Any] | None) -> None:
    assert render("{{ tools is defined }}{% for tool in tools %}x{% endfor %}", tools=tools) == "False"


def test_the_clock() -> None:
    source = "{{ strftime_now('%d %b %Y %H:%M') }}"
    assert render(source, now=datetime(2026, 11, 30, 9, 5)) == "30 Nov 2026 09:05"
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)


def test_raise_exception_carries_the_words_of_the_template() -> None:
    with pytest.raises(InvalidRequestError, match=r"^m\.gguf: .* refuses these messages: No system, please$"):
        render("{{ raise_exception('No system, please') }}")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", r"line 1: Expected an expression"),
        ("a\n{{ b | nosuchfilter }}", r"line 2: No filter named 'nosuchfilter'"),
        ("{% nosuchtag %}", r"unknown tag 'nosuchtag'"),
        ("{{ " + "(" * 3000 + ")" * 3000 + " }}", r"RecursionError"),
    ],
)
def test_no_template(source: str, message: str) -> None:
    with pytest.raises(
        UnsupportedModelError, match=rf"^m\.gguf: the chat template cannot be compiled: .*{message}"
    ):
        template(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ ''|attr('__class__') }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ strftime_now.__self__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
    ],
)
def test_the_sandbox(source: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"^m\.gguf: .* does what the sandbox forbids: access to"):
        render(source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ 'a' * 10**10 }}", "needs more than 1024 MiB"),
        ("{% set n = 10 %}{{ 'a' * 10**n }}", "needs more than 1024 MiB"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ range(10**9) }}", "Range too big"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
    ],
)
def test_templates_that_fail(source: str, message: str) -> None:
    with template(source) as compiled:
        for _ in range(2):  # it fails again, in a worker that lives
            with pytest.raises(InvalidRequestError, match=rf"^m\.gguf: the chat template fails .*{message}"):
                compiled.render(HELLO)


def test_an_endless_template_is_killed_and_the_next_call_is_served() -> None:
    with template(SELECT) as compiled:
        (first,) = workers()
        start = time.perf_counter()
        with pytest.raises(DeadlineError, match=r"^m\.gguf: .* not done after 0\.5 s; the template may loop"):
            compiled.render([{"role": "user", "content": "loop"}], timeout_s=0.5)
        assert time.perf_counter() - start < 5
        assert not first.is_running()
        assert compiled.render(HELLO) == "hello"
        (second,) = workers()
        assert compiled.render(HELLO) == "hello"
        assert workers() == [second]


def test_an_endless_constant_is_killed_at_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.gguf.chat_template._COMPILE_TIMEOUT_S", 0.5)
    with pytest.raises(UnsupportedModelError, match=r"cannot be compiled: not done after 0\.5 s"):
        template("{{ 7 ** (7 ** 12) }}")


def test_a_worker_that_dies_is_replaced() -> None:
    with template("{{ messages[0].content }}") as compiled:
        (worker,) = workers()
        worker.kill()
        worker.wait(5)
        assert compiled.render(HELLO) == "hello"


def test_a_worker_that_dies_at_work_is_an_error_of_the_request() -> None:
    with template(SELECT) as compiled:
        (worker,) = workers()
        threading.Timer(0.3, worker.kill).start()
        with pytest.raises(InvalidRequestError, match=r"its worker process ended with status -9"):
            compiled.render([{"role": "user", "content": "loop"}], timeout_s=20)
        assert compiled.render(HELLO) == "hello"


def test_messages_that_are_no_json() -> None:
    with template("{{ messages[0].content }}") as compiled:
        with pytest.raises(InvalidRequestError, match=r"the messages are no JSON: .*object"):
            compiled.render([{"role": "user", "content": object()}])
        assert compiled.render(HELLO) == "hello"


def test_long_text_and_all_of_unicode() -> None:
    content = "é🦙\0\u2028<&'\"" * 300_000
    assert (
        render("{{ messages[0].content }}", [{"role": "user", "content": content}], timeout_s=30) == content
    )


def test_several_threads() -> None:
    texts: dict[int, str] = {}
    with template("{{ messages[0].content }}") as compiled:

        def run(number: int) -> None:
            texts[number] = compiled.render([{"role": "user", "content": str(number)}], timeout_s=30)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(workers()) == 1
    assert texts == {number: str(number) for number in range(20)}


def test_closed() -> None:
    compiled = template("x")
    compiled.close()
    compiled.close()
    assert not workers()
    with pytest.raises(PipeLLMError, match="after it was closed"):
        compiled.render(HELLO)


def test_a_template_nobody_closes_leaves_no_worker() -> None:
    compiled = template("x")
    assert len(workers()) == 1
    del compiled  # the fixture looks for its worker


@pytest.mark.parametrize("content", ["idle", "loop"])
def test_no_worker_outlives_a_parent_that_is_killed(tmp_path: Path, content: str) -> None:
    # In another working directory, where a module of the same name must not be picked up either.
    (tmp_path / "jinja2.py").write_text("raise SystemExit('picked up')")
    script = (
        "import psutil\n"
        "from common.gguf.chat_template import ChatTemplate\n"
        f"template = ChatTemplate({SELECT!r}, bos_token='', eos_token='', where='m.gguf')\n"
        "print(*[p.pid for p in psutil.Process().children()], flush=True)\n"
        f"if {content!r} == 'idle': input()\n"
        f"template.render([{{'role': 'user', 'content': {content!r}}}], timeout_s=0.1)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(
        [sys.executable, "-P", "-c", script],
        cwd=tmp_path, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert parent.stdin is not None
    assert parent.stdout is not None
    with parent, parent.stdin, parent.stdout:
        worker = psutil.Process(int(parent.stdout.readline()))
        time.sleep(0.2)
        os.kill(parent.pid, signal.SIGKILL)
    worker.wait(timeout=30)  # its CPU time is limited to little more than the deadline
