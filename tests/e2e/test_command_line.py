"""`pipellm-client` against a running coordinator."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.e2e.daemons import Mesh

PROMPT = "Once upon a time"
GREEDY = ["--temperature", "0", "--max-tokens", "12", "--ignore-eos"]


def run(mesh: Mesh, *argv: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "client.cli", *argv, "--coordinator", mesh.address]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=60)


def output(mesh: Mesh, *argv: str, stdin: bytes = b"") -> str:
    done = run(mesh, *argv, stdin=stdin)
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout.decode()


@pytest.fixture(scope="module")
def answer(mesh: Mesh) -> dict[str, object]:
    printed = output(mesh, "generate", PROMPT, "--json", "--logprobs", "2", *GREEDY)
    result: dict[str, object] = json.loads(printed)
    return result


def test_json_has_text_ids_logprobs_and_numbers(answer: dict[str, object]) -> None:
    assert answer["text"] and answer["reason"] == "max_tokens" and answer["model"] == "tiny"
    ids, tokens = answer["token_ids"], answer["tokens"]
    assert isinstance(ids, list) and isinstance(tokens, list) and len(ids) == len(tokens) == 12
    assert [token["chosen"]["token_id"] for token in tokens] == ids
    for token in tokens:  # greedy: the chosen one is the likeliest
        assert len(token["top"]) == 2 and token["top"][0] == token["chosen"]
        assert token["top"][1]["logprob"] <= token["chosen"]["logprob"] <= 0


def test_generate_prints_the_text_however_the_prompt_comes(
    mesh: Mesh, answer: dict[str, object], tmp_path: Path
) -> None:
    file = tmp_path / "prompt"
    file.write_text(PROMPT)
    ids = output(mesh, "tokenize", PROMPT).split()
    expected = str(answer["text"]).removesuffix("\n") + "\n"
    assert output(mesh, "generate", PROMPT, *GREEDY) == expected
    assert output(mesh, "generate", "--file", str(file), *GREEDY) == expected
    assert output(mesh, "generate", *GREEDY, stdin=PROMPT.encode()) == expected
    assert output(mesh, "generate", "--ids", ",".join(ids), *GREEDY) == expected


def test_generate_prints_ids_or_logprobs(mesh: Mesh, answer: dict[str, object]) -> None:
    assert isinstance(answer["token_ids"], list)
    ids = [str(token_id) for token_id in answer["token_ids"]]
    assert output(mesh, "generate", PROMPT, "--return-ids", *GREEDY).split() == ids
    lines = output(mesh, "generate", PROMPT, "--logprobs", "1", *GREEDY).splitlines()
    assert [line.split()[0] for line in lines] == ids
    assert all(len(line.split("\t")) == 2 for line in lines)


def test_text_becomes_ids_and_comes_back(mesh: Mesh) -> None:
    text = "the little dog, ü and\ttab"
    ids = output(mesh, "tokenize", text, "--no-special").split()
    assert output(mesh, "detokenize", *ids) == f"{text}\n"
    assert output(mesh, "detokenize", stdin=",".join(ids).encode()) == f"{text}\n"
    assert json.loads(output(mesh, "tokenize", text, "--json"))["ids"] == [1, *map(int, ids)]  # BOS
    assert len(output(mesh, "tokenize", text, "--no-special", "--pieces").splitlines()) == len(ids)
    assert json.loads(output(mesh, "detokenize", *ids, "--json")) == {"text": text}
    assert output(mesh, "tokenize", "</s>", "--parse-special", "--no-special").split() == ["2"]
    assert output(mesh, "tokenize", "</s>", "--no-special").split() != ["2"]


def test_models_and_status_tell_people_and_programs(mesh: Mesh) -> None:
    (model,) = json.loads(output(mesh, "models", "--json"))
    assert (model["name"], model["loaded"], model["num_layers"]) == ("tiny", True, 6)
    assert "tiny" in output(mesh, "models") and "loaded" in output(mesh, "models")
    status = json.loads(output(mesh, "status", "--json"))
    assert status["state"] == "ready"
    assert [stage["state"] for stage in status["stages"]] == ["serving", "serving"]
    assert {stage["stage_id"] for stage in status["stages"]} == {"s0", "s1"}
    table = output(mesh, "status")
    for fact in ("ready", "tiny", "s0", "s1", "0 to", "to 5", "reference", "tokens/s", "waiting"):
        assert fact in table


def test_watching_the_status_ends_with_ctrl_c(mesh: Mesh) -> None:
    command = [sys.executable, "-m", "client.cli", "status", "--watch", "--json", "--interval", "0.1"]
    process = subprocess.Popen([*command, "--coordinator", mesh.address], stdout=subprocess.PIPE)
    try:
        assert process.stdout
        states = [json.loads(process.stdout.readline())["state"] for _ in range(3)]
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
    finally:
        process.kill()
        process.wait()
    assert states == ["ready"] * 3


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["generate", ""], 2, "prompt"),
        (["generate", "x", "--temperature", "-1"], 2, "temperature"),
        (["generate", "x", "--temperature", "nan"], 2, "temperature"),
        (["generate", "x", "--top-p", "2"], 2, "top_p"),
        (["generate", "x", "--max-tokens", "0"], 2, "max_tokens"),
        (["generate", "x", "--max-tokens", "-1"], 2, "max_tokens is -1: out of range"),
        (["generate", "x", "--logprobs", "21"], 2, "20"),
        (["generate", "x " * 600], 2, "512"),
        (["generate", "x", "--model", "other"], 1, "other"),
        (["generate", "x", "--timeout", "0.001"], 4, "deadline"),
        (["tokenize", "x", "--model", "other"], 1, "other"),
        (["detokenize", "512"], 2, "512"),
        (["load", "other"], 1, "other"),
        (["load", "/etc/hosts"], 2, "/etc/hosts"),
        (["status", "--watch", "--interval", "0.01"], 2, "0.1"),
        (["chat", "other"], 1, "it has: tiny"),
    ],
)
def test_a_refusal_has_its_exit_code_and_reason(mesh: Mesh, argv: list[str], code: int, message: str) -> None:
    done = run(mesh, *argv, stdin=b"hello")
    assert (done.returncode, done.stdout) == (code, b"")
    assert message in done.stderr.decode() and done.stderr.startswith(b"error: ")


def test_a_reader_that_leaves_is_no_failure(mesh: Mesh) -> None:
    command = f"{sys.executable} -m client.cli generate x --max-tokens 400 --ignore-eos"
    script = f"{command} --coordinator {mesh.address} | head -c 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


def test_ctrl_c_while_generating_frees_the_blocks(mesh: Mesh) -> None:
    command = [sys.executable, "-m", "client.cli", "generate", "x", "--ignore-eos", "--temperature", "0"]
    process = subprocess.Popen([*command, "--coordinator", mesh.address], stdout=subprocess.PIPE)
    try:
        assert process.stdout and os.read(process.stdout.fileno(), 1)
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
    finally:
        process.kill()
        process.wait()
    mesh.wait(lambda: mesh.client.status().requests_running == 0, "the request to end", 10)


def test_unload_and_load_again(mesh: Mesh) -> None:
    """Last here: the module's other tests want the model loaded throughout."""
    assert output(mesh, "unload") == ""
    assert run(mesh, "generate", "x").returncode == 1
    assert run(mesh, "unload").returncode == 1
    asked = run(mesh, "chat", stdin=b"who")
    assert asked.returncode == 1 and b"no model loaded" in asked.stderr and b"there are: tiny" in asked.stderr
    assert output(mesh, "chat", "tiny", "--max-tokens", "4", "--ignore-eos", stdin=b"who").strip()  # loads it
    assert output(mesh, "unload") == ""
    loaded = output(mesh, "load", "tiny", "--context-length", "256")
    assert "tiny is loaded, context 256 tokens" in loaded and "s0" in loaded and "s1" in loaded
    assert output(mesh, "unload") == ""
    result = json.loads(output(mesh, "load", "tiny", "--json"))
    assert result["model"]["loaded"] and len(result["plan"]["windows"]) == 2
    deadline = time.monotonic() + 20
    while not mesh.client.is_ready() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert mesh.client.is_ready()


@pytest.mark.parametrize("gap_s", [0.0, 0.001, 0.005])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_two_signals_at_once_end_it_all_the_same(mesh: Mesh, number: signal.Signals, gap_s: float) -> None:
    """As `timeout` sends them: the second must not break into the clean-up after the first."""
    argv = [sys.executable, "-m", "client.cli", "generate", "once", "--ignore-eos"]
    argv += ["--coordinator", mesh.address]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert program.stdout
        program.stdout.read(1)
        program.send_signal(number)
        time.sleep(gap_s)
        program.send_signal(number)
        try:
            assert program.wait(15) == 128 + number
            assert program.stderr and b"Traceback" not in program.stderr.read()
        finally:
            program.kill()
