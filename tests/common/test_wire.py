import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import CorruptDataError, PipeLLMError, UnsupportedVersionError
from common.wire import HEADER_BYTES, Frame, FrameKind


def hidden_frame(rows: int = 3, width: int = 5) -> Frame:
    payload = np.arange(rows * width, dtype=np.float32).reshape(rows, width)
    return Frame(FrameKind.HIDDEN_STATES, epoch=7, step_id=2**40, repeat=3, payload=payload,
                 sequence_number=9, window=2, rank=1)  # fmt: skip


@given(
    kind=st.sampled_from(FrameKind),
    dtype=st.sampled_from([np.float32, np.int32, np.uint8]),
    rows=st.integers(0, 4),
    columns=st.integers(1, 9),
    step_id=st.integers(0, 2**64 - 1),
)
def test_a_frame_comes_back_as_it_was_sent(kind, dtype, rows, columns, step_id):
    payload = np.arange(rows * columns).reshape(rows, columns).astype(dtype)
    sent = Frame(kind, 1, step_id, repeat=2, payload=payload, sequence_number=5, window=6, rank=7)
    got = Frame.decode(sent.encode())
    assert (got.kind, got.epoch, got.step_id, got.repeat) == (kind, 1, step_id, 2)
    assert (got.sequence_number, got.window, got.rank) == (5, 6, 7)
    assert got.payload.dtype == dtype
    assert got.payload.tobytes() == payload.tobytes()


def test_every_flipped_byte_is_noticed():
    data = hidden_frame().encode()
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        with pytest.raises(PipeLLMError):
            Frame.decode(bytes(damaged))


def test_a_cut_or_padded_frame_is_noticed():
    data = hidden_frame().encode()
    for wrong in (b"", data[:10], data[:HEADER_BYTES], data[:-1], data + b"\0"):
        with pytest.raises(CorruptDataError):
            Frame.decode(wrong)


def test_a_frame_of_another_version_is_named_so():
    data = bytearray(hidden_frame().encode())
    data[4] = 2
    with pytest.raises(UnsupportedVersionError, match="version 2"):
        Frame.decode(bytes(data))


def test_a_header_that_promises_more_than_there_is_allocates_nothing():
    data = bytearray(hidden_frame().encode())
    struct.pack_into("<I", data, HEADER_BYTES - 20, 2**31)
    with pytest.raises(CorruptDataError):
        Frame.decode(bytes(data))


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_cleanly(data):
    with pytest.raises(CorruptDataError):
        Frame.decode(data)
