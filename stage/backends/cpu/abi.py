"""The native library as ctypes sees it: the structs of native/plan.h, field by field, and its loading.

Knows nothing of models; `stage.backends.cpu.plan` fills the structs in.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

import numpy as np

from common.errors import PipeLLMError

ABI_VERSION = 5
# Another build of the library, such as one with sanitizers, instead of the installed one.
LIBRARY_VARIABLE = "PIPELLM_CPU_LIBRARY"


class Matrix(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("row_bytes", c_int64),
        ("expert_bytes", c_int64),
        ("bias", c_void_p),
        ("type", c_int32),
        ("rows", c_int32),
        ("cols", c_int32),
    )


class Norm(Structure):
    _fields_ = (("weight", c_void_p), ("eps", c_float), ("size", c_int32))


class LayerPlan(Structure):
    _fields_ = (
        ("attn_norm", Norm),
        ("q_norm", Norm),
        ("k_norm", Norm),
        ("attn_post_norm", Norm),
        ("ffn_norm", Norm),
        ("ffn_post_norm", Norm),
        ("q", Matrix),
        ("k", Matrix),
        ("v", Matrix),
        ("output", Matrix),
        ("router", Matrix),
        ("gate", Matrix),
        ("up", Matrix),
        ("down", Matrix),
        ("scale", c_float),
        ("softcap", c_float),
        ("hidden_size", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("window", c_int32),
        ("rope_kind", c_int32),
        ("rope_dim", c_int32),
        ("activation", c_int32),
        ("num_experts", c_int32),
        ("num_experts_used", c_int32),
    )


class KvLayer(Structure):
    _fields_ = (("k", c_void_p), ("v", c_void_p), ("type", c_int32), ("block_size", c_int32))


class SequenceRows(Structure):
    _fields_ = (
        ("block_table", c_void_p),
        ("row_start", c_int32),
        ("num_rows", c_int32),
        ("start_position", c_int32),
    )


class BatchRows(Structure):
    _fields_ = (
        ("sequences", POINTER(SequenceRows)),
        ("slots", c_void_p),
        ("rope", c_void_p),
        ("num_sequences", c_int32),
        ("rows", c_int32),
    )


_SIGNATURES = {
    "pipellm_variants": (c_char_p, ()),
    "pipellm_create": (c_void_p, (c_char_p, c_int32, c_void_p, c_int32, c_char_p, c_int32)),
    "pipellm_destroy": (None, (c_void_p,)),
    "pipellm_threads_used": (c_int32, (c_void_p,)),
    "pipellm_supports": (c_int32, (c_int32,)),
    "pipellm_run_layers": (c_int32, (c_void_p, c_int32, c_void_p, c_void_p, c_void_p, c_void_p)),
    "pipellm_run_feed_forward": (c_int32, (c_void_p, c_void_p, c_void_p, c_int32)),
    "pipellm_embed": (c_int32, (c_void_p, c_void_p, c_void_p, c_int32, c_float, c_void_p)),
    "pipellm_logits": (c_int32, (c_void_p, c_void_p, c_void_p, c_float, c_void_p, c_int32, c_void_p)),
    "pipellm_matmul": (c_int32, (c_void_p, c_void_p, c_void_p, c_int32, c_void_p)),
    "pipellm_rope": (None, (c_void_p, c_int32, c_void_p, c_int32, c_float, c_void_p)),
    "pipellm_read_seconds": (c_double, (c_void_p, c_void_p, c_int64)),
}


@cache
def library() -> ctypes.CDLL | None:
    """The native library, or None where the installation could not build it.

    Raises PipeLLMError for one built from other sources than this code.
    """
    path = Path(os.environ.get(LIBRARY_VARIABLE) or Path(__file__).with_name("_native.so"))
    if not path.exists():
        return None
    loaded = ctypes.CDLL(str(path))
    version = loaded.pipellm_abi_version()
    if version != ABI_VERSION:
        raise PipeLLMError(
            f"{path} has interface version {version}, this code needs {ABI_VERSION}: "
            "install the project again (pip install -e .) to rebuild it"
        )
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def address(array: np.ndarray) -> int:
    """Where an array's first element lies; the caller keeps the array alive."""
    return int(array.__array_interface__["data"][0])
