"""The kernels' argument structures, field for field as the .cu files declare them."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_uint64, c_void_p


class LinearArgs(ctypes.Structure):
    _fields_ = [
        ("tiles", c_void_p * 2),
        ("bias", c_void_p * 2),
        ("inverse", c_float * 2),
        ("exponent", c_int * 2),
        ("row_tiles", c_int * 2),
        ("rows", c_int * 2),
        ("out_start", c_int * 2),
        ("column_tiles", c_int),
        ("num_tokens", c_int),
        ("x", c_void_p),
        ("out", c_void_p),
        ("half_out", c_void_p),
        ("x_stride", c_int),
        ("out_stride", c_int),
        ("activation", c_int),
        ("experts", c_void_p),
        ("expert_bytes", c_uint64 * 2),
        ("tokens_per_row", c_int),
        ("squares", c_void_p),
        ("num_squares", c_int),
        ("norm_size", c_float),
        ("norm_eps", c_float),
        ("norm_inverse", c_float),
        ("next_squares", c_void_p),
        ("next_weight", c_void_p),
        ("next_x", c_void_p),
        ("next_stride", c_int),
        ("tiled", c_int),
        ("partial", c_void_p),
        ("arrived", c_void_p),
    ]


class DequantizeArgs(ctypes.Structure):
    _fields_ = [
        ("tiles", c_void_p),
        ("out", c_void_p),
        ("exponent", c_int),
        ("power", c_int),
        ("column_tiles", c_int),
        ("rows", c_int),
        ("stride", c_int),
    ]


class EmbedArgs(ctypes.Structure):
    _fields_ = [
        ("tiles", c_void_p),
        ("tokens", c_void_p),
        ("out", c_void_p),
        ("exponent", c_int),
        ("scale", c_float),
        ("column_tiles", c_int),
        ("columns", c_int),
        ("vocabulary", c_int),
    ]


class NormArgs(ctypes.Structure):
    _fields_ = [
        ("x", c_void_p),
        ("weight", c_void_p),
        ("half_out", c_void_p),
        ("residual", c_void_p),
        ("size", c_int),
        ("out_stride", c_int),
        ("eps", c_float),
    ]


class OperandArgs(ctypes.Structure):
    _fields_ = [
        ("x", c_void_p),
        ("weight", c_void_p),
        ("out", c_void_p),
        ("squares", c_void_p),
        ("size", c_int),
        ("out_stride", c_int),
        ("tiled", c_int),
    ]


class GatedArgs(ctypes.Structure):
    _fields_ = [
        ("x", c_void_p),
        ("out", c_void_p),
        ("size", c_int),
        ("x_stride", c_int),
        ("out_stride", c_int),
        ("tiled", c_int),
        ("activation", c_int),
        ("up_start", c_int),
        ("factor", c_float),
    ]


class RopeArgs(ctypes.Structure):
    _fields_ = [
        ("qkv", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("block_tables", c_void_p),
        ("table_stride", c_int),
        ("inverse_frequencies", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("q", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("qkv_stride", c_int),
        ("num_heads", c_int),
        ("num_kv_heads", c_int),
        ("head_dim", c_int),
        ("head_stride", c_int),
        ("rope_dim", c_int),
        ("neox", c_int),
        ("magnitude", c_float),
        ("scale", c_float),
        ("norm_eps", c_float),
        ("block_shift", c_int),
    ]


class AttentionArgs(ctypes.Structure):
    _fields_ = [
        ("q", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("positions", c_void_p),
        ("block_tables", c_void_p),
        ("tiles", c_void_p),
        ("out", c_void_p),
        ("partial", c_void_p),
        ("arrived", c_void_p),
        ("num_tiles", c_int),
        ("table_stride", c_int),
        ("num_heads", c_int),
        ("num_kv_heads", c_int),
        ("group", c_int),
        ("group_shift", c_int),
        ("head_dim", c_int),
        ("out_stride", c_int),
        ("tiled", c_int),
        ("block_shift", c_int),
        ("window", c_int),
        ("softcap", c_float),
    ]


class GreedyArgs(ctypes.Structure):
    _fields_ = [
        ("logits", c_void_p),
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("records", c_void_p),
        ("step", c_void_p),
        ("partial", c_void_p),
        ("arrived", c_void_p),
        ("vocabulary", c_int),
    ]


class SampleArgs(ctypes.Structure):
    _fields_ = [
        ("logits", c_void_p),
        ("rows", c_void_p),
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("recent", c_void_p),
        ("counts", c_void_p),
        ("saved", c_void_p),
        ("records", c_void_p),
        ("step", c_void_p),
        ("sorted", c_void_p),
        ("sorted_ids", c_void_p),
        ("vocabulary", c_int),
        ("recent_stride", c_int),
    ]


class RouterArgs(ctypes.Structure):
    _fields_ = [
        ("x", c_void_p),
        ("norm_weight", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("chosen", c_void_p),
        ("shares", c_void_p),
        ("size", c_int),
        ("num_experts", c_int),
        ("num_used", c_int),
        ("eps", c_float),
    ]


class CombineArgs(ctypes.Structure):
    _fields_ = [
        ("y", c_void_p),
        ("shares", c_void_p),
        ("out", c_void_p),
        ("size", c_int),
        ("num_used", c_int),
        ("add", c_int),
    ]
