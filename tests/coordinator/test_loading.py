"""A plan for measured stages, and one that streams layers where the model would not fit otherwise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import OutOfCapacityError
from coordinator.config import CoordinatorConfig
from coordinator.loading import make_plan
from protos import model_pb2, stage_pb2

MB = 1 << 20


def profile(budget: int, offload: int) -> stage_pb2.ProfileResponse:
    return stage_pb2.ProfileResponse(
        num_layers=10, context_length=8192, layer_decode_s=1e-3, layer_weight_bytes=[100 * MB] * 10,
        layer_kv_bytes_per_token=[4096] * 10, embedding_bytes=MB, head_bytes=MB, memory_budget_bytes=budget,
        offload_budget_bytes=offload,
    )  # fmt: skip


def members(count: int) -> Any:
    return [
        SimpleNamespace(stage_id=f"s{i}", device=model_pb2.DeviceInfo(uuid=f"g{i}", boot_id="b"))
        for i in range(count)
    ]


def test_a_model_that_fits_no_memory_is_planned_with_streamed_layers() -> None:
    made = make_plan(members(1), [profile(500 * MB, 5000 * MB)], 0, CoordinatorConfig())
    assert [(window.layer_start, window.layer_end) for window in made.windows] == [(0, 10)]
    assert made.context_length == 4096
    assert made.num_kv_blocks * made.kv_block_size == 4096
    assert (
        make_plan(members(1), [profile(500 * MB, 5000 * MB)], 1000, CoordinatorConfig()).context_length
        == 1000
    )


def test_stages_whose_memory_is_enough_together_stream_nothing() -> None:
    made = make_plan(members(2), [profile(900 * MB, 9000 * MB)] * 2, 0, CoordinatorConfig())
    assert len(made.windows) == 2
    assert made.context_length == 8192


def test_what_does_not_fit_even_then_is_refused() -> None:
    for offload in (0, 600 * MB):
        with pytest.raises(OutOfCapacityError):
            make_plan(members(1), [profile(500 * MB, offload)], 0, CoordinatorConfig())


def test_stages_that_share_cores_count_as_equally_fast() -> None:
    slow = profile(5000 * MB, 0)
    slow.layer_decode_s = 9e-3  # measured while others were busy
    for shared in (True, False):
        stages = members(2)
        if shared:
            for stage in stages:
                stage.device.uuid = ""
        made = make_plan(stages, [profile(5000 * MB, 0), slow], 0, CoordinatorConfig())
        layers = [window.layer_end - window.layer_start for window in made.windows]
        assert layers == ([5, 5] if shared else [10])
