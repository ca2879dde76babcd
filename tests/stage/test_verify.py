"""What `pipellm-stage verify` reports: no difference for the reference itself, and where there is one."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from common.gguf.reader import GGUFFile
from stage import verify
from stage.backends.reference import ReferenceBackend
from stage.memory_settings import parse_places
from stage.placement import Place
from tests.gguf_files import write_tiny_llama

WINDOWS = [np.arange(3, 43, dtype=np.int32), np.arange(100, 120, dtype=np.int32)]


class Perturbed(ReferenceBackend):
    """A backend that is a little wrong after its third layer."""

    name = "perturbed"

    def run_layer(self, layer, kv, batch, hidden_states):
        out = super().run_layer(layer, kv, batch, hidden_states)
        return out * 1.01 if layer.attention.layer == 2 else out


@pytest.fixture
def file(tmp_path):
    with GGUFFile.open(write_tiny_llama(tmp_path / "tiny.gguf", layers=4)) as opened:
        yield opened


@pytest.mark.parametrize("step_tokens", [0, 1, 7])
def test_the_reference_agrees_with_itself(file, step_tokens):
    agreement = verify.verify(file, ReferenceBackend(), WINDOWS, step_tokens)
    assert agreement.positions == 60
    assert agreement.max_kl < 1e-9 and agreement.same_top_token == 1.0
    assert max(agreement.layer_errors) < 1e-5


def test_where_a_backend_parts_is_seen(file):
    agreement = verify.verify(file, Perturbed(), WINDOWS, 0)
    assert agreement.layer_errors[0] == agreement.layer_errors[1] == 0
    assert agreement.layer_errors[2] == pytest.approx(0.01, rel=1e-3)
    assert 0 < agreement.mean_kl <= agreement.max_kl


def test_kl_is_the_textbook_s():
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.5, 0.25]])
    expected = 0.5 * np.log(2) - 0.25 * np.log(2)
    assert float(verify._kl(p.log(), q.log())) == pytest.approx(expected, abs=1e-7)


def test_the_command_reports_json_and_refuses_too_short_a_text(tmp_path, capsys):
    model = write_tiny_llama(tmp_path / "tiny.gguf", layers=2)
    text = tmp_path / "prose.txt"
    text.write_text("once upon a time there was a little dog and a big cat " * 40)
    arguments = [str(model), "--text", str(text), "--backend", "reference", "--windows", "2"]
    assert verify.main([*arguments, "--window-tokens", "32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["positions"] == 64
    assert verify.main([*arguments, "--window-tokens", "100000"]) == 1
    assert "too few for 2 windows" in capsys.readouterr().err


def test_the_soak_by_command(tmp_path, capsys, monkeypatch):
    model = write_tiny_llama(tmp_path / "tiny.gguf", layers=1)
    arguments = [str(model), "--backend", "reference", "--soak", "60", "--json"]
    assert verify.main(arguments) == 0
    report = json.loads(capsys.readouterr().out)["soak"]
    assert report["forwards"] >= 60
    assert report["played again"] is report["with delays"] is True
    plays = iter([[(1, 5, 40, 0.0)], [(1, 5, 40, 0.0)], [(1, 5, 41, 0.0)]])
    monkeypatch.setattr(verify.soak, "play", lambda *_: next(plays))
    assert verify.main(arguments[:-1]) == 1
    assert "with delays       DIFFERS first in sequence 1 at position 5: [40, 0.0]" in capsys.readouterr().out


def test_streaming_is_checked_on_a_gpu_alone(tmp_path, capsys):
    model = write_tiny_llama(tmp_path / "tiny.gguf", layers=1)
    arguments = [str(model), "--soak", "3", "--streaming", "--backend", "reference"]
    assert verify.main(arguments) == 1
    assert "--streaming" in capsys.readouterr().err


def test_places_take_turns():
    text = verify.placement_of(3, (Place.STREAMED, Place.HOST))
    assert parse_places(text) == {0: Place.STREAMED, 1: Place.HOST, 2: Place.STREAMED}
