"""The CPU backend against the reference backend, layer by layer, and its behaviour as a citizen."""

from __future__ import annotations

import os
import threading

import numpy as np
import psutil
import pytest
import torch
from gguf import GGMLQuantizationType as GGMLType
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ConfigError, InvalidRequestError, UnsupportedModelError
from stage.backends.base import Batch, make_batch
from stage.backends.cpu import CpuBackend, variants
from stage.backends.reference import ReferenceBackend
from stage.model.spec import Activation, EmbeddingSpec, RopeKind, TensorRef
from stage.weights.quants import RawTensor
from tests.stage.backends.cpu.random_weights import random_layer, random_raw

if not variants():
    pytest.skip("the native CPU backend was not built here (no C++ compiler)", allow_module_level=True)

SMALL_BLOCKS = [GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q5_0, GGMLType.Q5_1, GGMLType.Q8_0, GGMLType.IQ4_NL,
                GGMLType.MXFP4, GGMLType.F16, GGMLType.BF16, GGMLType.F32]  # fmt: skip


@pytest.fixture(scope="module", params=variants())
def backend(request: pytest.FixtureRequest) -> CpuBackend:
    made = CpuBackend(threads=2, variant=request.param, accuracy="exact", kv_dtype="f32")
    request.addfinalizer(made.close)
    return made


def two_steps(rng: np.random.Generator, lengths: list[int], block_size: int) -> tuple[int, list[Batch]]:
    """A prefill of each sequence in a batch, then a batch that decodes one and extends the others."""
    blocks = [-(-(length + 4) // block_size) for length in lengths]
    order = rng.permutation(sum(blocks)).astype(np.int32)
    tables = np.split(order, np.cumsum(blocks)[:-1])
    prefill = [(0, length, table) for length, table in zip(lengths, tables, strict=True)]
    extend = [(length, 1 + i % 3, table) for i, (length, _, table) in enumerate(
        (length, None, table) for length, table in zip(lengths, tables, strict=True))]  # fmt: skip
    decode = [(length + 3, 1, table) for length, table in zip(lengths, tables, strict=True)]
    filler = [(length, 3, table) for length, table in zip(lengths, tables, strict=True)]
    return sum(blocks), [make_batch(step, block_size) for step in (prefill, extend, filler, decode)]


def compare(backend: CpuBackend, rng: np.random.Generator, lengths: list[int], **layer: object) -> None:
    spec, raw = random_layer(rng, **layer)  # type: ignore[arg-type]
    reference = ReferenceBackend()
    num_blocks, batches = two_steps(rng, lengths, 8)
    caches = [b.allocate_kv([spec], num_blocks, 8) for b in (backend, reference)]
    layers = [b.prepare_layer(spec, raw) for b in (backend, reference)]
    for batch in batches:
        hidden = torch.from_numpy(rng.standard_normal((batch.num_rows, 256)).astype(np.float32))
        ours = backend.run_layer(layers[0], caches[0], batch, hidden.clone())
        expected = reference.run_layer(layers[1], caches[1], batch, hidden)
        difference = (ours - expected).abs()
        assert difference.square().mean().sqrt() < 1e-3 * expected.std()
        assert difference.max() < 1e-2 * expected.std()  # attention may turn on one small product


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_layers_of_any_shape(backend: CpuBackend, data: st.DataObject) -> None:
    draw = data.draw
    head_dim = draw(st.sampled_from([8, 12, 32, 80, 128, 256]))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    compare(
        backend,
        np.random.default_rng(draw(st.integers(0, 2**32))),
        lengths=draw(st.lists(st.integers(1, 90), min_size=1, max_size=3)),
        weight_types=[draw(st.sampled_from(SMALL_BLOCKS)) for _ in range(3)]
        if head_dim % 32 == 0
        else [GGMLType.F32, GGMLType.F16],
        heads=(kv_heads * draw(st.sampled_from([1, 2, 3, 5])), kv_heads, head_dim),
        ffn=32 * draw(st.integers(1, 12)),
        window=draw(st.sampled_from([None, 1, 7, 33])),
        softcap=draw(st.sampled_from([None, 5.0])),
        rope=draw(st.sampled_from(list(RopeKind))),
        activation=draw(st.sampled_from(list(Activation))),
        bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        post_norm=draw(st.booleans()),
    )


@pytest.mark.parametrize("weight_types", [[GGMLType.F32], [GGMLType.Q4_K, GGMLType.Q6_K], [GGMLType.MXFP4]])
def test_experts(backend: CpuBackend, weight_types: list[GGMLType]) -> None:
    rng = np.random.default_rng(11)
    compare(backend, rng, [40, 1, 3], weight_types=weight_types, heads=(4, 2, 64), experts=(8, 3))


@pytest.mark.parametrize("experts", [(8, 3), None])
@pytest.mark.parametrize("rows", [1, 2, 9, 700])
@pytest.mark.parametrize("weight_types", [[GGMLType.F32], [GGMLType.Q4_K, GGMLType.Q6_K], [GGMLType.MXFP4]])
def test_a_feed_forward_alone_is_the_layer_whose_attention_says_nothing(
    backend: CpuBackend, weight_types: list[GGMLType], rows: int, experts: tuple[int, int] | None
) -> None:
    """Bit for bit as within a layer; and as the reference computes it."""
    rng = np.random.default_rng(rows)
    spec, raw = random_layer(rng, weight_types, heads=(4, 2, 64), experts=experts, post_norm=rows == 2)
    silent = spec.attention.output.weight
    zeros = RawTensor(np.zeros((256, 256 * 4), np.uint8), GGMLType.F32, (256, 256))
    raw = {**raw, silent: zeros}
    reference = ReferenceBackend()
    batch = make_batch([(0, rows, np.arange(-(-rows // 16), dtype=np.int32))], 16)
    hidden = torch.from_numpy(rng.standard_normal((rows, 256)).astype(np.float32))
    whole, alone = (hidden.clone() for _ in range(2))
    prepared = backend.prepare_layer(spec, raw)
    backend.run_layer(prepared, backend.allocate_kv([spec], 64, 16), batch, whole)
    backend.run_feed_forward(prepared, alone)
    assert torch.equal(whole, alone)
    kv = reference.allocate_kv([spec], 64, 16)
    expected = reference.run_layer(reference.prepare_layer(spec, raw), kv, batch, hidden)
    difference = (alone - expected).abs()
    assert difference.square().mean().sqrt() < 1e-3 * expected.std()
    assert not torch.equal(alone, hidden)


def test_a_long_context_is_split_and_put_together(backend: CpuBackend) -> None:
    compare(backend, np.random.default_rng(5), [1100, 513], weight_types=[GGMLType.F16], heads=(3, 1, 64))


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("f16", 5e-3), ("q8_0", 0.1)])
def test_smaller_caches_are_close(kv_dtype: str, tolerance: float) -> None:
    rng = np.random.default_rng(2)
    spec, raw = random_layer(rng, [GGMLType.F16], heads=(4, 2, 80))
    exact, small = CpuBackend(threads=2, kv_dtype="f32"), CpuBackend(threads=2, kv_dtype=kv_dtype)
    assert small.kv_bytes_per_token(spec) < exact.kv_bytes_per_token(spec) * 0.6
    num_blocks, batches = two_steps(rng, [70], 16)
    caches = [b.allocate_kv([spec], num_blocks, 16) for b in (exact, small)]
    layers = [b.prepare_layer(spec, raw) for b in (exact, small)]
    for batch in batches:
        hidden = torch.from_numpy(rng.standard_normal((batch.num_rows, 256)).astype(np.float32))
        want = exact.run_layer(layers[0], caches[0], batch, hidden.clone())
        got = small.run_layer(layers[1], caches[1], batch, hidden.clone())
        assert 0 < (got - want).abs().max() < tolerance * want.std()
    exact.close()
    small.close()


@pytest.mark.parametrize(
    ("weight_types", "heads"),
    [([GGMLType.Q4_K, GGMLType.Q6_K], (8, 1, 64)), ([GGMLType.Q4_1], (24, 3, 12))],
)
def test_the_number_of_threads_changes_no_bit(
    weight_types: list[GGMLType], heads: tuple[int, int, int]
) -> None:
    results = []
    for threads in (1, 2, 3):
        rng = np.random.default_rng(4)
        spec, raw = random_layer(rng, weight_types, heads=heads, post_norm=True)
        backend = CpuBackend(threads=threads)
        num_blocks, batches = two_steps(rng, [600, 20], 16)
        cache, layer = backend.allocate_kv([spec], num_blocks, 16), backend.prepare_layer(spec, raw)
        hidden = [
            torch.from_numpy(rng.standard_normal((b.num_rows, 256)).astype(np.float32)) for b in batches
        ]
        results.append([backend.run_layer(layer, cache, b, h) for b, h in zip(batches, hidden, strict=True)])
        backend.close()
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_weights_stay_in_the_files_pages() -> None:
    spec, raw = random_layer(np.random.default_rng(0), [GGMLType.Q4_0])
    backend = CpuBackend(threads=1)
    weights = sum(tensor.nbytes for tensor in raw.values())
    assert weights <= backend.stored_bytes(spec, raw) < weights + 16384
    backend.close()


def small_run(backend: CpuBackend) -> torch.Tensor:
    rng = np.random.default_rng(9)
    spec, raw = random_layer(rng, [GGMLType.Q4_0])
    cache, layer = backend.allocate_kv([spec], 4, 16), backend.prepare_layer(spec, raw)
    batch = make_batch([(0, 20, np.arange(4, dtype=np.int32))], 16)
    hidden = torch.from_numpy(rng.standard_normal((20, 256)).astype(np.float32))
    return backend.run_layer(layer, cache, batch, hidden)


def test_a_forked_child_computes_with_threads_of_its_own() -> None:
    backend = CpuBackend(threads=2)
    expected = small_run(backend)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(small_run(backend), expected) else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert torch.equal(small_run(backend), expected)
    backend.close()


def test_callers_on_several_threads_take_turns() -> None:
    backend = CpuBackend(threads=2)
    expected = small_run(backend)
    results: list[bool] = []

    def call() -> None:
        results.extend(torch.equal(small_run(backend), expected) for _ in range(10))

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(results) == 30 and all(results)
    backend.close()


def test_an_idle_engine_takes_no_processor_time_and_closing_ends_its_threads() -> None:
    process = psutil.Process()
    before = process.num_threads()
    backend = CpuBackend(threads=3)
    small_run(backend)
    assert process.num_threads() == before + 2
    threading.Event().wait(0.05)  # past the spinning
    start = sum(process.cpu_times()[:2])
    threading.Event().wait(0.5)
    assert sum(process.cpu_times()[:2]) - start < 0.2
    backend.close()
    backend.close()
    assert process.num_threads() == before


def test_ten_thousand_calls_leak_nothing() -> None:
    backend = CpuBackend(threads=2)
    rng = np.random.default_rng(9)
    spec, raw = random_layer(rng, [GGMLType.F32], hidden=32, heads=(1, 1, 32), ffn=32)
    cache, layer = backend.allocate_kv([spec], 4, 16), backend.prepare_layer(spec, raw)
    hidden = torch.zeros((1, 32))

    def run(times: int) -> int:
        for i in range(times):
            batch = make_batch([(i % 60, 1, np.arange(4, dtype=np.int32))], 16)
            backend.run_layer(layer, cache, batch, hidden)
        return int(psutil.Process().memory_info().rss)

    warm = run(1000)
    assert run(10_000) - warm < 4 << 20
    backend.close()


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(ConfigError, match="accuracy is 'perfect'"):
        CpuBackend(accuracy="perfect")
    with pytest.raises(ConfigError, match="kv_dtype is 'f8'"):
        CpuBackend(kv_dtype="f8")
    with pytest.raises(ConfigError, match="variant.*'mmx'"):
        CpuBackend(variant="mmx")
    backend = CpuBackend(threads=1)
    raw = random_raw(np.random.default_rng(0), GGMLType.Q8_0, (10, 64))
    spec = EmbeddingSpec(TensorRef("token_embd.weight"))
    embedding = backend.prepare_embedding(spec, {spec.weight: raw})
    for ids in ([10], [-1]):
        with pytest.raises(InvalidRequestError, match=r"\[0, 10\)"):
            backend.embed(embedding, np.array(ids))
    layer, _ = random_layer(np.random.default_rng(0), [GGMLType.F32], heads=(1, 1, 1024))
    from stage.backends.cpu.plan import check_layer

    with pytest.raises(UnsupportedModelError, match="heads of 1024"):
        check_layer(layer)
    backend.close()
