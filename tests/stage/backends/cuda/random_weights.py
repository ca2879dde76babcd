"""Random but sensible raw tensors of every type, for tests and benchmarks of kernels."""

from __future__ import annotations

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as GGMLType

from stage.weights.quants import RawTensor

# Where f16 scales lie in a block, and about how large they are for weights of about 0.02.
_SCALES: dict[GGMLType, tuple[tuple[int, float], ...]] = {
    GGMLType.Q4_0: ((0, 3e-3),),
    GGMLType.Q4_1: ((0, 3e-3), (2, -2e-2)),
    GGMLType.Q5_0: ((0, 1.5e-3),),
    GGMLType.Q5_1: ((0, 1.5e-3), (2, -2e-2)),
    GGMLType.Q8_0: ((0, 2e-4),),
    GGMLType.Q2_K: ((80, 1e-3), (82, 1.5e-3)),
    GGMLType.Q3_K: ((108, 3e-4),),
    GGMLType.Q4_K: ((0, 8e-5), (2, 6e-4)),
    GGMLType.Q5_K: ((0, 4e-5), (2, 6e-4)),
    GGMLType.Q6_K: ((208, 2e-5),),
    GGMLType.IQ4_NL: ((0, 2e-4),),
    GGMLType.IQ4_XS: ((0, 1e-5),),
}


def random_raw(ggml_type: GGMLType, rows: int, columns: int, seed: int) -> RawTensor:
    rng = np.random.default_rng(seed)
    block_elements, block_bytes = GGML_QUANT_SIZES[ggml_type]
    shape = (rows, columns)
    if ggml_type in (GGMLType.F32, GGMLType.F16, GGMLType.BF16):
        values = (rng.standard_normal(shape) * 0.02).astype(np.float32)
        if ggml_type == GGMLType.F16:
            data = values.astype(np.float16).view(np.uint8)
        elif ggml_type == GGMLType.BF16:
            data = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        else:
            data = values.view(np.uint8)
        return RawTensor(data, ggml_type, shape)
    blocks = rng.integers(0, 256, (rows, columns // block_elements, block_bytes), dtype=np.uint8)
    if ggml_type == GGMLType.MXFP4:
        blocks[..., 0] = rng.integers(118, 123, blocks.shape[:2], dtype=np.uint8)
    for at, size in _SCALES.get(ggml_type, ()):
        scales = (size * rng.uniform(0.5, 1.5, blocks.shape[:2])).astype(np.float16)
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    return RawTensor(blocks.reshape(rows, -1), ggml_type, shape)
