"""What decides a step's shape on the GPU, without one."""

from __future__ import annotations

import pytest

from common.errors import InvalidRequestError
from stage.backends.cuda.decode import ROW_BUCKETS, row_bucket
from stage.backends.cuda.forward import context_bucket
from stage.backends.cuda.kv_cache import HEAD_STRIDES, head_stride


@pytest.mark.parametrize(
    ("length", "bucket"), [(1, 512), (512, 512), (513, 1024), (4096, 4096), (4097, 8192), (131072, 131072)]
)
def test_context_buckets(length: int, bucket: int) -> None:
    assert context_bucket(length) == bucket


def test_row_buckets() -> None:
    assert [row_bucket(n) for n in (1, 2, 3, 8, 9, 33, 64)] == [1, 2, 4, 8, 16, 64, 64]
    with pytest.raises(InvalidRequestError, match="up to 64 rows, not 65"):
        row_bucket(ROW_BUCKETS[-1] + 1)


def test_every_head_size_has_a_stride_the_matrix_units_take() -> None:
    for head_dim in range(8, HEAD_STRIDES[-1] + 1, 8):
        stride = head_stride(head_dim)
        assert head_dim <= stride < head_dim + 64
        assert stride % 32 == 0
