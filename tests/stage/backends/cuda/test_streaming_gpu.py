"""Layers off the GPU compute what resident ones do: bit for bit where streamed, whatever is delayed or
poisoned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GGMLType

from benchmarks.synth_model import Shape, write
from common.errors import CorruptDataError
from common.gguf.reader import GGUFFile
from stage.backends.base import DecodeRow, RawTensors, make_batch
from stage.backends.cuda import race_check
from stage.model.registry import build_spec
from stage.model.spec import tensor_refs
from stage.placement import Place, keep_hosts
from stage.sampler import SamplingOptions
from stage.weights.loader import raw_tensors
from tests.stage.backends.cuda.random_weights import random_raw

pytestmark = pytest.mark.gpu

SHAPE = Shape("llama", 9, 512, 8, 2, 64, 1024, 1000)
GREEDY = SamplingOptions(0.0, 0, 1.0, 0.0, 1.0, 1.0, 0, 0.0, 0.0, 0)
BLOCK_SIZE = 16
R, S, H = Place.RESIDENT, Place.STREAMED, Place.HOST
IDS = np.random.default_rng(1).integers(0, SHAPE.vocab_size, 300).tolist()
BLOCKS = np.arange(30, dtype=np.int32)[::-1].copy()


@pytest.fixture(scope="module", params=["q4_k_m", "q8_0", "f16", "bf16", "f32"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / f"{request.param}.gguf"
    write(path, SHAPE, request.param)
    return path


class Model:
    """A whole model with its layers in given places."""

    def __init__(
        self,
        path: Path,
        places: tuple[Place, ...],
        batch_places: tuple[Place, ...] | None = None,
        pinned_bytes: int = 1 << 30,
        prefetch: bool = True,
    ) -> None:
        from stage.backends.cuda.backend import CudaBackend

        self.file = GGUFFile.open(path)
        self.spec = spec = build_spec(self.file, 512)
        self.backend = backend = CudaBackend(torch.device("cuda", 0))
        few, many = dict(enumerate(places)), dict(enumerate(batch_places or places))
        backend.offload(self.file, spec.layers, few, many, pinned_bytes, 2, prefetch)
        self.kv = backend.allocate_kv(spec.layers, 32, BLOCK_SIZE)
        self.embedding = backend.prepare_embedding(spec.embedding, self._raw(spec.embedding))
        self.layers = [backend.prepare_layer(layer, self._raw(layer)) for layer in spec.layers]
        self.head = backend.prepare_head(spec.head, self._raw(spec.head))
        self.decoder = backend.decoder(self.embedding, self.layers, self.head, self.kv, 512)

    @property
    def offloaded(self) -> Any:
        return self.backend.offloaded

    def _raw(self, part: object) -> RawTensors:
        return raw_tensors(self.file, tensor_refs(part))

    def forward(self, start: int, ids: list[int]) -> torch.Tensor:
        """Logits f32 [rows, vocab], on the GPU."""
        return self.step([(start, ids, BLOCKS)])

    def step(self, sequences: list[tuple[int, list[int], np.ndarray]]) -> torch.Tensor:
        """(start position, tokens, block table) each."""
        batch = make_batch([(start, len(ids), table) for start, ids, table in sequences], BLOCK_SIZE)
        x = self.backend.embed(
            self.embedding, np.concatenate([np.asarray(ids, np.int32) for _, ids, _ in sequences])
        )
        for layer in self.layers:
            x = self.backend.run_layer(layer, self.kv, batch, x)
        return self.backend.logits(self.head, x)

    def decode(self, start: int, token: int, steps: int) -> list[int]:
        rows = [DecodeRow(0, start, [*[0] * start, token], BLOCKS, GREEDY)]
        return [row[0].token_id for row in self.decoder.issue(rows, steps).wait()]


@pytest.fixture
def load() -> Iterator[Callable[..., Model]]:
    models: list[Model] = []

    def make(*args: object, **kwargs: object) -> Model:
        models.append(Model(*args, **kwargs))  # type: ignore[arg-type]
        return models[-1]

    with torch.inference_mode():
        yield make
    for model in models:
        model.backend.close()


def results(model: Model) -> tuple[torch.Tensor, ...]:
    """A long chunk, a short one behind it, single rows, then decode: all logits, keys and tokens."""
    logits = [model.forward(0, IDS[:100]), model.forward(100, IDS[100:120])]
    logits += [model.forward(120 + i, [IDS[120 + i]]) for i in range(3)]
    drawn = model.decode(123, IDS[123], 40)
    logits.append(model.forward(163, IDS[163:263]))
    drawn += model.decode(263, IDS[263], 10)
    return (*logits, torch.tensor(drawn))


PLACES = {
    "all streamed": (S,) * 9,
    "alternating": (S, R, S, R, S, R, S, R, S),
    "the last ones": (R, R, R, R, R, R, S, S, S),
    "one": (R, R, R, R, S, R, R, R, R),
    "two": (R, S, R, R, R, R, S, R, R),
}


@pytest.mark.parametrize("name", PLACES)
def test_streamed_layers_give_the_resident_ones_bits(
    path: Path, load: Callable[..., Model], name: str
) -> None:
    want = results(load(path, (R,) * 9))
    got = results(load(path, PLACES[name]))
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a.cpu(), b.cpu())


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("direct", [False, True])
def test_layers_read_from_the_file_give_the_same_bits(
    path: Path, load: Callable[..., Model], prefetch: bool, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = GGUFFile.open(path)
    spec = build_spec(file, 512)
    want = results(load(path, (R,) * 9))
    if direct:
        memory = type("Memory", (), {"available": 0, "total": 1 << 40})
        monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    layer_bytes = sum(raw.nbytes + 8192 for raw in raw_tensors(file, tensor_refs(spec.layers[0])).values())
    model = load(path, (S,) * 9, pinned_bytes=6 * layer_bytes, prefetch=prefetch)
    assert 0 < len(model.offloaded._blobs.pinned) < 6
    for a, b in zip(want, results(model), strict=True):
        assert torch.equal(a.cpu(), b.cpu())


@pytest.mark.parametrize(
    "places", [(S, H, R, S, H, H, R, S, H), (H,) * 9, (R, R, R, H, H, R, R, R, R), (R,) * 8 + (H,)]
)
def test_host_layers_agree_nearly(path: Path, load: Callable[..., Model], places: tuple[Place, ...]) -> None:
    want, got = load(path, (R,) * 9), load(path, places)
    both: list[list[torch.Tensor]] = []
    for model in (want, got):
        # First the GPU computes host layers too, their weights streamed; then the host does, and lends its K
        # and V to the GPU.
        logits = [model.forward(0, IDS[:100])]
        logits += [model.forward(100 + i, [IDS[100 + i]]) for i in range(4)]
        logits += [model.forward(104, IDS[104:110]), model.forward(110, IDS[110:200])]
        both.append(logits)
    assert torch.equal(both[0][0], both[1][0])
    for a, b in zip(both[0][1:], both[1][1:], strict=True):
        p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
        assert float((p.exp() * (p - q)).sum(-1).mean()) < 1e-4
    first = got.decode(200, IDS[200], 20)
    assert first == got.decode(200, IDS[200], 20)
    eager = [int(got.forward(200, [IDS[200]]).argmax())]
    for i in range(19):
        eager.append(int(got.forward(201 + i, [eager[-1]]).argmax()))
    assert first == eager


def test_steps_of_one_and_of_many_rows_share_their_sequences(path: Path, load: Callable[..., Model]) -> None:
    """The host computes some layers for one row and the GPU for three: each sees what the other wrote."""
    places = (S, H, R, S, H, H, R, S, H)
    want, got = load(path, (R,) * 9), load(path, places, batch_places=keep_hosts(places, 1))
    tables = [np.arange(8 * i, 8 * i + 8, dtype=np.int32) for i in range(3)]
    both: list[list[torch.Tensor]] = []
    for model in (want, got):
        logits = [model.step([(0, IDS[:40], tables[0]), (0, IDS[:30], tables[1]), (0, IDS[:21], tables[2])])]
        lengths = [40, 30, 21]
        for rows in ([0, 1, 2], [0], [0], [1], [0, 1, 2], [0, 1, 2], [2], [0, 1, 2]):
            step = [(lengths[i], IDS[lengths[i] : lengths[i] + 1], tables[i]) for i in rows]
            logits.append(model.step(step))
            for i in rows:
                lengths[i] += 1
        step = [(length, IDS[length : length + 20], tables[i]) for i, length in enumerate(lengths)]
        logits.append(model.step(step))
        both.append(logits)
    for a, b in zip(*both, strict=True):
        p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
        assert float((p.exp() * (p - q)).sum(-1).mean()) < 1e-4


SE, HE = Place.STREAMED_EXPERTS, Place.HOST_EXPERTS


@pytest.fixture(scope="module", params=["q4_k_m", "bf16"])
def experts_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / f"experts-{request.param}.gguf"
    write(path, replace(SHAPE, ffn_size=256, experts=(8, 2)), request.param)
    return path


@pytest.mark.parametrize("places", [(SE,) * 9, (SE, R, SE, S, R, SE, R, R, SE), (S,) * 9])
@pytest.mark.parametrize("disturbed", [False, True])
def test_streamed_experts_give_the_resident_ones_bits(
    experts_path: Path, load: Callable[..., Model], places: tuple[Place, ...], disturbed: bool
) -> None:
    want = results(load(experts_path, (R,) * 9))
    model = load(experts_path, places)
    if disturbed:
        race_check.disturb(model.backend)
    for a, b in zip(want, results(model), strict=True):
        assert torch.equal(a.cpu(), b.cpu())


@pytest.mark.parametrize("places", [(HE,) * 9, (R, HE, SE, H, HE, S, R, HE, SE)])
def test_experts_on_the_host_agree_nearly(
    experts_path: Path, load: Callable[..., Model], places: tuple[Place, ...]
) -> None:
    want, got = load(experts_path, (R,) * 9), load(experts_path, places, batch_places=keep_hosts(places, 1))
    divergences = []
    for start, end in ((0, 100), *((100 + i, 101 + i) for i in range(8)), (108, 200)):
        p, q = (model.forward(start, IDS[start:end]).double().log_softmax(-1) for model in (want, got))
        divergences += (p.exp() * (p - q)).sum(-1).tolist()
    divergences.sort()
    assert np.mean(divergences[:-4]) < 1e-4  # where two experts all but tie, another one may be taken
    first = got.decode(200, IDS[200], 20)
    assert first == got.decode(200, IDS[200], 20)
    eager = [int(got.forward(200, [IDS[200]]).argmax())]
    for i in range(19):
        eager.append(int(got.forward(201 + i, [eager[-1]]).argmax()))
    assert first == eager


# --- races --------------------------------------------------------------------------------------------------


def test_delays_and_poison_change_nothing(path: Path, load: Callable[..., Model]) -> None:
    want = results(load(path, (R,) * 9))
    model = load(path, PLACES["alternating"])
    race_check.disturb(model.backend)
    for a, b in zip(want, results(model), strict=True):
        assert torch.equal(a.cpu(), b.cpu())


@pytest.mark.parametrize("slots", ["_raw", "_tiles"])
@pytest.mark.parametrize("event", ["full", "free"])
def test_without_any_one_event_the_race_is_seen(
    path: Path, load: Callable[..., Model], slots: str, event: str
) -> None:
    """The check above would not pass by luck: each of the four waits is needed."""
    want = results(load(path, (R,) * 9))
    model = load(path, (S,) * 9)
    stream = model.offloaded.stream
    removed = [getattr(slot, event) for slot in getattr(stream, slots)]
    wait = stream._wait
    stream._wait = lambda on, what: None if any(what is one for one in removed) else wait(on, what)
    delayed = {("_raw", "full"): "copy", ("_raw", "free"): "repack", ("_tiles", "full"): "repack"}
    target = delayed.get((slots, event), "compute")

    def hook(what: str, on: torch.cuda.Stream, slot: torch.Tensor) -> None:
        with torch.cuda.stream(on):
            if what != "compute":
                slot.fill_(0xEE)
            if what == target:
                torch.cuda._sleep(3_000_000)

    stream.hook = hook
    try:
        got = results(model)
    except CorruptDataError:
        return  # what was drawn from are no numbers: seen
    assert not all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(want, got, strict=True))


# --- the kernel ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ggml_type",
    [GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.Q5_0, GGMLType.Q3_K, GGMLType.BF16, GGMLType.F32],
    ids=lambda one: one.name,
)
def test_repacking_on_the_gpu(ggml_type: GGMLType) -> None:
    from stage.backends.cuda.launch import Kernels
    from stage.backends.cuda.repack import pack
    from stage.backends.cuda.repacker import MatrixRecipe, Repacker, Source

    device = torch.device("cuda", 0)
    raw = random_raw(ggml_type, 1000, 2560, 0)
    packed = pack(torch.from_numpy(raw.data.copy()), ggml_type, 2560)
    want, row_bytes = packed.tiles, raw.data.shape[1]
    recipe = MatrixRecipe(
        ggml_type, (Source(0, 1000, 0),), False, row_bytes, 2560, 1, 0, factor=1 / packed.inverse
    )
    blob = torch.from_numpy(raw.data.copy()).to(device)
    slot = torch.zeros(want.numel(), dtype=torch.uint8, device=device)
    Repacker(Kernels(device)).run(recipe, blob.data_ptr(), slot.data_ptr())
    assert torch.equal(slot.cpu(), want.reshape(-1))
