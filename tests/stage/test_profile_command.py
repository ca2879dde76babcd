"""`pipellm-stage profile`: what it reports on the backends that run here, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from common.gguf.reader import GGUFFile
from stage import __main__ as daemon
from stage import profile_command
from stage.backends.cpu.backend import variants
from stage.backends.reference import ReferenceBackend
from stage.backends.timing import Model, Span, merged
from stage.model.registry import build_spec
from tests.gguf_files import write_tiny_llama

LAYERS = 3
BACKENDS = ["reference", pytest.param("cpu", marks=pytest.mark.skipif(not variants(), reason="not built"))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", layers=LAYERS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_part_has_its_time(
    backend: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    svg = tmp_path / "profile.svg"
    flags = ["--backend", backend, "--prompt", "24", "--depth", "8", "--threads", "1"]
    assert daemon.main(["profile", str(model), *flags, "--json", "--svg", str(svg)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_layers"] == LAYERS and found["backend"] == backend and found["read_bytes_per_s"] > 1e8
    for phase in (found["decode"], found["prefill"]):
        names = [part["name"] for part in phase["parts"]]
        assert names == ["embedding", "layer 0", "layer 1", "layer 2", "head"]
        assert all(part["seconds"] > 0 and part["bytes"] > 0 for part in phase["parts"])
        assert phase["tokens_per_s"] == pytest.approx(phase["tokens"] / phase["seconds"])
    assert found["decode"]["tokens"] == 1 and found["prefill"]["tokens"] == 24
    texts = [element.text for element in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert "layer 2" in texts and any(text.startswith("decode:") for text in texts if text)
    assert daemon.main(["profile", str(model), *flags]) == 0
    table = capsys.readouterr().out
    assert "of the read rate" in table and "layer 2" in table and "TFLOP/s" in table


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--prompt", "1"], "--prompt is 1, expected are 2 to"),
        (["--prompt", "5000"], "--prompt is 5000"),
        (["--depth", "-1"], "--depth is -1, expected are 0 to"),
        (["--svg", "/nonexistent/p.svg", "--prompt", "4", "--depth", "0"], "cannot write /nonexistent/p.svg"),
    ],
)
def test_what_cannot_be_done_is_said(
    flags: list[str], reason: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile_command.main([str(model), "--backend", "reference", *flags]) == 1
    assert reason in capsys.readouterr().err


def test_a_model_that_does_not_fit_says_what_is_missing(model: Path) -> None:
    with GGUFFile.open(model) as file:
        backend = ReferenceBackend(memory_bytes=100_000)
        with pytest.raises(Exception, match=r"(GiB|MiB) are missing"):
            profile_command.profile(file, backend, 16, 0)


def test_operations_and_bytes_are_counted(model: Path) -> None:
    with GGUFFile.open(model) as file:
        spec = build_spec(file)
        whole = Model(ReferenceBackend(), file, spec, 64)
        rows, columns = 0, 0
        matrices = [t for name, t in file.tensors.items() if name.startswith("blk.") and len(t.shape) == 2]
        weights = sum(int(np.prod(tensor.shape)) for tensor in matrices)
        rows, columns = spec.vocab_size, spec.hidden_size
        attention = spec.layers[0].attention
        attended = 4 * attention.num_heads * attention.head_dim * (9 + 10)  # of two rows after 8 tokens
        expected = 2 * (2 * weights + rows * columns) + LAYERS * attended
        assert whole.flops(2, 8) == pytest.approx(expected, rel=0.01)  # norms are counted as products
        one, longer = whole.part_bytes(1, 8), whole.part_bytes(1, 9)
        assert [b - a for a, b in zip(one, longer, strict=True)] == [0, *whole.kv_bytes_per_token, 0]


def test_spans_of_one_name_become_one() -> None:
    spans = [Span("a", 1, 1.0, 10), Span("b", 1, 5.0, 0), Span("a", 2, 2.0, 20)]
    assert merged(spans) == (Span("b", 1, 5.0, 0), Span("a", 3, 3.0, 30))
    assert Span("a", 3, 3.0, 30).bytes_per_s == 10 and Span("none", 0, 0.0, 5).bytes_per_s == 0


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ([], "looks at a GPU's streams; the reference backend has none"),
        (["--gpu-memory", "lots"], "gpu_memory: 'lots' is no amount of memory"),
        (["--placement", "0=nowhere"], "placement: '0=nowhere' is not of the form"),
    ],
)
def test_streaming_needs_streams(
    flags: list[str], reason: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert daemon.main(["profile", str(model), "--backend", "reference", "--streaming", *flags]) == 1
    assert reason in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_streamed_weights_have_a_timeline(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    svg, trace = tmp_path / "t.svg", tmp_path / "t.json"
    flags = ["--backend", "cuda", "--depth", "40", "--placement", "0:2=streamed,2=host", "--json"]
    flags += ["--streaming", "--svg", str(svg), "--trace", str(trace)]
    assert profile_command.main([str(model), *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["link_share"] <= 1.1 and found["bytes_copied"] > 0 and found["busy_s"]["host"] > 0
    ElementTree.parse(svg)
    assert len(json.loads(trace.read_text())["traceEvents"]) > 8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_kernels_are_timed_on_a_gpu(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--backend", "cuda", "--prompt", "128", "--depth", "40", "--json"]
    assert profile_command.main([str(model), *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    decode = found["decode"]
    assert sum(kernel["calls"] for kernel in decode["kernels"]) >= decode["num_launches"] >= 5 * LAYERS
    assert any("attention_decode" in kernel["name"] for kernel in decode["kernels"])
    assert decode["eager_s"] > decode["issue_s"] > 0
    read = sum(kernel["bytes"] for kernel in decode["kernels"])
    assert read == pytest.approx(decode["bytes"], rel=0.5)  # padded to whole tiles, and without norms
