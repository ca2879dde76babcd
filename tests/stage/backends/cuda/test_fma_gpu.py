"""The kernels for GPUs below 8.0 on whatever GPU is there, as PTX for 7.5 that its driver compiles: the tests
of the other family, run again through this one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from gguf import GGMLQuantizationType as GGMLType

from tests.stage.backends.cuda.test_attention_gpu import test_decode_and_prefill
from tests.stage.backends.cuda.test_linear_gpu import (
    operand,
    segment_of,
    test_a_norm_folded_into_the_products_around_it,
    test_as_many_rows_as_a_head_has,
    test_every_type_in_every_family,
    test_gate_and_up_together,
    test_two_types_side_by_side_with_bias_and_residual,
)
from tests.stage.backends.cuda.test_models_gpu import (
    test_a_part_replayed_gives_the_same_bits_as_layer_by_layer,
    test_golden_logits,
    test_graphs_and_eager_give_the_same_bits,
    test_sequences_of_a_mixed_batch_do_not_mix,
)

__all__ = [
    "test_a_norm_folded_into_the_products_around_it",
    "test_a_part_replayed_gives_the_same_bits_as_layer_by_layer",
    "test_as_many_rows_as_a_head_has",
    "test_decode_and_prefill",
    "test_every_type_in_every_family",
    "test_gate_and_up_together",
    "test_golden_logits",
    "test_graphs_and_eager_give_the_same_bits",
    "test_sequences_of_a_mixed_batch_do_not_mix",
    "test_two_types_side_by_side_with_bias_and_residual",
]

pytestmark = pytest.mark.gpu

ARCH = "compute_75"
OTHER_FAMILY = {"matvec.cu", "matmul.cu", "attention.cu", "warpgroup.cu", "attention_warpgroup.cu"}


@pytest.fixture(scope="module", autouse=True)
def launched() -> Iterator[set[str]]:
    """Every `Kernels` is made for 7.5; the sources that were launched from."""
    from stage.backends.cuda import backend, launch

    sources: set[str] = set()

    class Watched(launch.Kernels):
        def launch(self, source, *args, **kwargs) -> None:  # type: ignore[no-untyped-def]
            sources.add(source)
            super().launch(source, *args, **kwargs)

    made = partial(Watched, arch=ARCH)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "Kernels", made)
        patch.setattr(backend, "Kernels", made)
        yield sources


@pytest.fixture(scope="module")
def ops(launched: set[str]):  # type: ignore[no-untyped-def]
    from stage.backends.cuda.launch import Kernels
    from stage.backends.cuda.linear import LinearOps

    return LinearOps(Kernels(torch.device("cuda", 0)))


@pytest.mark.parametrize("ggml_type", [GGMLType.Q4_K, GGMLType.Q8_0], ids=lambda t: t.name)
def test_a_row_does_not_depend_on_how_many_there_are(ops, ggml_type: GGMLType) -> None:  # type: ignore[no-untyped-def]
    from stage.backends.cuda.linear import Epilogue, Linear, Operand

    rows, columns = 200, 2560
    segment, _ = segment_of(ggml_type, rows, columns, seed=9)
    x = operand(64, columns)
    results = []
    for tokens in (1, 2, 5, 16, 64):
        out = torch.full((tokens, rows), torch.nan, device="cuda")
        ops.run(Linear((segment,), columns, rows), Operand(x), tokens, out, Epilogue.STORE)
        results.append(out[0])
    assert all(torch.equal(results[0], other) for other in results)


@pytest.mark.parametrize("tokens_per_row", [1, 4])
def test_experts(ops, tokens_per_row: int) -> None:  # type: ignore[no-untyped-def]
    from stage.backends.cuda.linear import Epilogue, Linear, Segment
    from stage.backends.cuda.repack import PackedMatrix

    made = [segment_of(GGMLType.Q4_K, 520, 1024, seed) for seed in range(6)]
    one = made[0][0].matrix
    tiles = torch.stack([segment.matrix.tiles for segment, _ in made])
    stack = PackedMatrix(tiles, one.kernel_type, one.exponent, one.inverse, one.rows, one.columns)
    chosen = torch.randint(0, 6, (12,), dtype=torch.int32, device="cuda")
    x = operand(12 // tokens_per_row, 1024)
    out = torch.full((12, 520), torch.nan, device="cuda")
    linear = Linear((Segment(stack, 0, None),), 1024, 520)
    ops.run_experts(linear, x, chosen, tokens_per_row, out, Epilogue.STORE)
    exponents = {segment.matrix.exponent for segment, _ in made}
    assert exponents == {one.exponent}, "one exponent serves a stack"
    for i, expert in enumerate(chosen.tolist()):
        want = x[i // tokens_per_row, :1024].double() @ made[expert][1].T
        assert float((out[i].double() - want).norm() / want.norm()) < 1e-3


def test_no_matrix_unit_was_used(launched: set[str]) -> None:
    assert {"fma_linear.cu", "fma_attention.cu"} <= launched
    assert not launched & OTHER_FAMILY
