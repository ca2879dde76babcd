"""Model files that cannot be served, or not in every way: the class of the error, a sentence, and no harm.

One mesh of two stages; the second one has a model directory of its own.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from client.events import Delta, Finished
from client.mesh_state import Model
from common.errors import (
    CorruptDataError,
    InvalidRequestError,
    NotReadyError,
    OutOfCapacityError,
    PipeLLMError,
    UnsupportedModelError,
)
from tests.common.gguf.raw_gguf import gguf_bytes
from tests.e2e.daemons import Mesh
from tests.gguf_files import spoil_token, write_tiny_llama

PROMPT = "Once upon a time"
STAGE_MEMORY_BYTES = 6_000_000
SPOILT = 411  # a token
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def write_bad_models(folder: Path) -> None:
    (folder / "picture.gguf").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(200))
    (folder / "version1.gguf").write_bytes(gguf_bytes(version=1))
    big_endian = b"GGUF" + (3).to_bytes(4, "big") + bytes(16)
    (folder / "bigendian.gguf").write_bytes(big_endian)
    whole = write_tiny_llama(folder / "cut.gguf", layers=1).read_bytes()
    (folder / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    write_tiny_llama(folder / "rwkv.gguf", layers=1, extra_metadata={"general.architecture": "rwkv6"})
    write_tiny_llama(
        folder / "ternary.gguf", layers=1, width=256, ff=256, quantization=GGMLQuantizationType.TQ1_0
    )
    write_tiny_llama(folder / "pretokenizer.gguf", layers=1, extra_metadata={
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "of-my-own", "tokenizer.ggml.merges": ["t h"],
    })  # fmt: skip
    write_tiny_llama(folder / "broken-template.gguf", layers=1, chat_template="{% if %}")
    write_tiny_llama(folder / "large.gguf", layers=8, width=256, ff=1024)


def write_odd_models(folder: Path) -> None:
    write_tiny_llama(folder / "endless.gguf", layers=2, chat_template=ENDLESS)
    write_tiny_llama(folder / "nosy.gguf", layers=2, chat_template="{{ messages.__class__.__mro__ }}")
    write_tiny_llama(folder / "wordless.gguf", layers=2, tokenizer=False)
    spoil_token(write_tiny_llama(folder / "spoilt.gguf", layers=2), SPOILT)
    spoil_token(write_tiny_llama(folder / "hopeless.gguf", layers=2), 1)  # every prompt's first token


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Mesh]:
    models, others = (tmp_path_factory.mktemp(name) for name in ("models", "others"))
    served = shutil.copy(tiny_model, models / tiny_model.name)
    write_bad_models(models)
    write_odd_models(models)
    for path in models.iterdir():
        (others / path.name).symlink_to(path)
    write_tiny_llama(models / "differs.gguf", layers=2)
    write_tiny_llama(others / "differs.gguf", layers=2, context=256)
    running = Mesh(tmp_path_factory.mktemp("mesh"), Path(served), 2, carrier="grpc")
    try:
        running.start_coordinator()
        running.start_stage("s0", "--memory", str(STAGE_MEMORY_BYTES))
        running.start_stage("s1", "--memory", str(STAGE_MEMORY_BYTES), "--model-dir", str(others))
        running.wait_ready()
        yield running
    finally:
        running.__exit__()


def load(mesh: Mesh, model: str) -> Model:
    *_, last = mesh.client.load_model(model, timeout_s=60)
    assert isinstance(last, Model) and last.loaded and last.name == model
    return last


def epoch(mesh: Mesh) -> int:
    plan = mesh.client.status(timeout_s=5).plan
    return plan.epoch if plan is not None else 0


def answers(mesh: Mesh, prompt: str | list[int] = PROMPT) -> bool:
    return isinstance(list(mesh.client.generate(prompt, max_tokens=3, timeout_s=20))[-1], Finished)


@pytest.fixture
def serves(mesh: Mesh, tiny_model: Path) -> Iterator[Callable[[], None]]:
    """Asserts that the tiny model answers, at once or soon; done at the test's end too."""

    def check() -> None:
        mesh.wait_ready()
        served = mesh.client.status(timeout_s=5).model
        assert served is not None and served.name == tiny_model.stem
        assert answers(mesh)

    check()
    yield check
    served = mesh.client.status(timeout_s=5).model
    if served is not None and served.name != tiny_model.stem:
        load(mesh, tiny_model.stem)
    check()


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        ("picture", CorruptDataError, "picture.gguf.*PNG"),
        ("version1", NotReadyError, "version1.gguf.*version 1"),
        ("bigendian", NotReadyError, "bigendian.gguf.*big-endian"),
        ("cut", CorruptDataError, "cut.gguf.*cut off"),
    ],
)
def test_a_file_that_cannot_be_read_disturbs_nothing(
    mesh: Mesh, serves: Callable[[], None], model: str, error: type[PipeLLMError], words: str
) -> None:
    before = epoch(mesh)
    with pytest.raises(error, match=words):
        load(mesh, model)
    assert epoch(mesh) == before != 0
    assert answers(mesh)
    listed = {entry.name: entry for entry in mesh.client.models(timeout_s=10)}[model]
    assert re.search(words, listed.problem)


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        ("rwkv", UnsupportedModelError, "rwkv6"),
        ("ternary", UnsupportedModelError, "TQ1_0"),
        ("pretokenizer", UnsupportedModelError, "of-my-own"),
        ("hopeless", CorruptDataError, "logits are not numbers"),
        ("broken-template", UnsupportedModelError, "broken-template.*chat template"),
        (
            "differs",
            NotReadyError,
            "stage s1.*differs.gguf is not the coordinator's file.*copy the same file",
        ),
    ],
)
def test_what_was_served_is_served_again_after_a_refused_load(
    mesh: Mesh, serves: Callable[[], None], model: str, error: type[PipeLLMError], words: str
) -> None:
    with pytest.raises(PipeLLMError, match=words) as caught:
        load(mesh, model)
    assert type(caught.value) is error
    serves()


def test_a_model_that_does_not_fit_says_what_it_needs_and_what_there_is(
    mesh: Mesh, serves: Callable[[], None]
) -> None:
    with pytest.raises(OutOfCapacityError) as caught:
        load(mesh, "large")
    said = re.search(r"([\d.]+) MiB of weights.* make ([\d.]+) MiB.* have ([\d.]+) MiB", str(caught.value))
    assert said, str(caught.value)
    weights, needed, available = (float(number) * 2**20 for number in said.groups())
    listed = {model.name: model for model in mesh.client.models(timeout_s=10)}["large"]
    assert weights == pytest.approx(listed.file_bytes, rel=0.01)  # all F32, as the stages hold them
    assert needed > weights
    # Both stages take their memory from one host.
    assert available == pytest.approx(STAGE_MEMORY_BYTES, rel=0.01)


def test_a_template_that_loops_forever_is_cut_short(mesh: Mesh, serves: Callable[[], None]) -> None:
    load(mesh, "endless")
    dialogue = [{"role": "user", "content": "hello"}]
    started = time.monotonic()
    with pytest.raises(InvalidRequestError, match="endless.*chat template.*loop forever"):
        list(mesh.client.chat(dialogue))
    assert time.monotonic() - started < 10
    assert answers(mesh)  # without the template the model is as good as any


def test_a_template_that_reaches_for_attributes_is_refused(mesh: Mesh, serves: Callable[[], None]) -> None:
    load(mesh, "nosy")
    dialogue = [{"role": "user", "content": "hello"}]
    for ask in (mesh.client.apply_template, lambda messages: list(mesh.client.chat(messages))):
        with pytest.raises(UnsupportedModelError, match="nosy.*chat template.*__class__"):
            ask(dialogue)
    assert answers(mesh)


def test_a_model_without_a_tokenizer_is_served_by_ids(mesh: Mesh, serves: Callable[[], None]) -> None:
    loaded = load(mesh, "wordless")
    assert not loaded.has_tokenizer and not loaded.has_chat_template and loaded.vocab_size == 512
    client = mesh.client
    events = list(client.generate([1, 5, 9], max_tokens=6, temperature=0.0, return_ids=True, logprobs=2))
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert (finished.prompt_tokens, finished.generated_tokens) == (3, 6)
    deltas = [event for event in events if isinstance(event, Delta)]
    ids = [token for delta in deltas for token in delta.token_ids]
    assert len(ids) == 6 and all(0 <= token < 512 for token in ids)
    assert "".join(delta.text for delta in deltas) == ""
    # The continuation is the model's: what follows a part of it is its rest.
    again = list(client.generate([1, 5, 9, *ids[:4]], max_tokens=2, temperature=0.0, return_ids=True))
    assert [token for event in again if isinstance(event, Delta) for token in event.token_ids] == ids[4:]
    dialogue = [{"role": "user", "content": "hello"}]
    for refused in (
        lambda: list(client.generate(PROMPT)),
        lambda: list(client.chat(dialogue)),
        lambda: client.tokenize(PROMPT),
        lambda: client.detokenize(ids),
        lambda: client.apply_template(dialogue),
        lambda: list(client.generate([1, 5], stop="x")),
    ):
        with pytest.raises(UnsupportedModelError, match="wordless.*no tokenizer"):
            refused()
    with pytest.raises(InvalidRequestError, match="512"):
        list(client.generate([1, 512]))
    assert answers(mesh, [1, 5])


def test_a_request_whose_logits_are_not_numbers_ends_alone(mesh: Mesh, serves: Callable[[], None]) -> None:
    load(mesh, "spoilt")
    before = epoch(mesh)
    prompts = [[1, 5, 9], [1, SPOILT, 9], [1, 5, 7], [1, 9, SPOILT]]

    def ended(prompt: list[int]) -> Finished | PipeLLMError:
        try:
            options = {"max_tokens": 60, "temperature": 0.0, "ignore_eos": True, "timeout_s": 30.0}
            (*_, last) = mesh.client.generate(prompt, request_id=f"of {prompt}", **options)
        except PipeLLMError as error:
            return error
        assert isinstance(last, Finished)
        return last

    with ThreadPoolExecutor() as threads:
        endings = list(threads.map(ended, prompts))
    for prompt, ending in zip(prompts, endings, strict=True):
        if SPOILT in prompt:
            assert type(ending) is CorruptDataError
            assert f"request 'of {prompt}' ended after 0 tokens" in str(ending)
            assert "damaged" in str(ending) and "pipellm-stage verify" in str(ending)
        else:
            assert isinstance(ending, Finished) and ending.generated_tokens == 60
    assert epoch(mesh) == before
