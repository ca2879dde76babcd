"""Daemons on a GPU: graphs or not, one stage or two, streams together; a broken context ends the daemon."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from client import Client
from client.events import Delta, Finished
from tests.conftest import ROOT
from tests.e2e.daemons import Mesh

pytestmark = pytest.mark.gpu

CUDA = ("--backend", "cuda", "--device", "cuda:0")
PROMPT = list(range(3, 60))
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 1.2, "seed": 11, "top_k": 50, "repeat_penalty": 1.1}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Mesh]:
    with Mesh(tmp_path_factory.mktemp("gpu"), tiny_model, 1, stage_flags=CUDA) as running:
        yield running


def ids_of(client: Client, prompt: list[int], **options: Any) -> list[int]:
    events = list(client.generate(prompt, max_tokens=150, ignore_eos=True, return_ids=True, **options))
    assert isinstance(events[-1], Finished)
    return [token for event in events if isinstance(event, Delta) for token in event.token_ids]


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_without_graphs_and_on_two_stages_the_answer_is_the_same(
    mesh: Mesh, tmp_path: Path, tiny_model: Path, options: dict[str, Any]
) -> None:
    want = ids_of(mesh.client, PROMPT, **options)
    assert len(want) == 150
    assert ids_of(mesh.client, PROMPT, **options) == want
    for name, stages, flags in (("eager", 1, ("--no-graphs",)), ("two", 2, ()), ("two-grpc", 2, ())):
        (tmp_path / name).mkdir()
        carrier = "grpc" if name == "two-grpc" else "auto"
        with Mesh(
            tmp_path / name, tiny_model, stages, "--context-length", "512",
            carrier=carrier, stage_flags=(*CUDA, *flags),
        ) as other:  # fmt: skip
            plan = other.client.status(timeout_s=5).plan
            assert plan is not None and len(plan.windows) == stages
            assert ids_of(other.client, PROMPT, **options) == want, name


def test_many_streams_join_and_leave(mesh: Mesh) -> None:
    def one(index: int) -> int:
        with Client(mesh.address) as client:
            options = GREEDY if index % 2 else SAMPLED | {"seed": index}
            return len(
                ids_of(client, PROMPT[: 3 + index], **({"logprobs": 3} if index % 3 == 0 else {}), **options)
            )

    with ThreadPoolExecutor(24) as pool:
        assert list(pool.map(one, range(48))) == [150] * 48
    status = mesh.client.status(timeout_s=5)
    assert status.kv_blocks_free == status.kv_blocks_total


def test_an_illegal_access_ends_the_engine_as_a_lost_device(tiny_model: Path) -> None:
    """In a process of its own, whose context it breaks."""
    script = f"""
import queue, torch
from stage import soak
from stage.backends.cuda.backend import CudaBackend
from stage.backends.cuda.arguments import EmbedArgs
from stage.backends.cuda.decode import CudaDecoder
from common.errors import DeviceLostError
from common.gguf.reader import GGUFFile
from stage.model.registry import build_spec

issue = CudaDecoder.issue
def broken(self, rows, repeat):
    if self._placed:
        torch.zeros(8, device="cuda")[torch.full((1,), 1 << 40, device="cuda")] = 1
    return issue(self, rows, repeat)
CudaDecoder.issue = broken
with GGUFFile.open({str(tiny_model)!r}) as file, torch.inference_mode():
    spec = build_spec(file, 256)
    try:
        soak.play(file, spec, CudaBackend(torch.device("cuda", 0)), soak.make_schedule(1, 200, 512, 256))
    except DeviceLostError as error:
        print("lost:", error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert "lost:" in done.stdout, done.stdout + done.stderr
