"""Small GGUF files for tests, written with the gguf package, so that no test needs a downloaded model.

`write_gguf` writes any metadata and tensors; `write_tiny_llama` writes a complete random llama with a
SentencePiece tokenizer, so that real text goes in and comes out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, TokenType
from gguf.quants import quantize

F32 = GGMLQuantizationType.F32

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_ARRAY_TYPES = {
    np.dtype(np.uint8): GGUFValueType.UINT8,
    np.dtype(np.int8): GGUFValueType.INT8,
    np.dtype(np.uint16): GGUFValueType.UINT16,
    np.dtype(np.int16): GGUFValueType.INT16,
    np.dtype(np.uint32): GGUFValueType.UINT32,
    np.dtype(np.int32): GGUFValueType.INT32,
    np.dtype(np.uint64): GGUFValueType.UINT64,
    np.dtype(np.int64): GGUFValueType.INT64,
    np.dtype(np.float32): GGUFValueType.FLOAT32,
    np.dtype(np.float64): GGUFValueType.FLOAT64,
}

_WORDS = (
    "the and a to of in is was it he she they you that for with on day one time little girl boy dog cat "
    "big happy play said very what who where hello world once upon there house tree sun"
)


def write_gguf(
    path: str | Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    quantization: Mapping[str, GGMLQuantizationType] | None = None,
    max_tensors_per_file: int = 0,
) -> Path:
    """Write one GGUF v3 model and return the path of its file (of its first part, when it is split).

    `metadata`: bool, str, int (stored as u32, or i32/u64 where it does not fit), float (f32), numpy scalars
    and non-empty arrays (stored with their own dtype), non-empty lists (of str, bool, int as i32, float as
    f32). `general.architecture` is "llama" unless given, `general.alignment` sets the alignment.
    `tensors`: in numpy order, shape (rows, columns); stored with their own dtype, or as `quantization`
    says for the name. `max_tensors_per_file` splits the model into PATH-00001-of-0000N.gguf.
    """
    path = Path(path)
    arch = metadata.get("general.architecture", "llama")
    writer = GGUFWriter(path, arch, split_max_tensors=max_tensors_per_file)
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if key == "general.alignment":
            writer.add_custom_alignment(value)
        elif isinstance(value, np.ndarray):
            writer.add_key_value(key, value.tolist(), GGUFValueType.ARRAY, _ARRAY_TYPES[value.dtype])
        else:
            writer.add_key_value(key, value, _value_type(value))
    for name, tensor in tensors.items():
        kind = (quantization or {}).get(name)
        data = np.ascontiguousarray(tensor if kind is None else quantize(tensor, kind))
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    parts: list[Path] = writer.format_shard_names(path)
    writer.close()
    return parts[0]


def write_tiny_llama(
    path: str | Path,
    *,
    layers: int = 4,
    width: int = 64,
    ff: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 512,
    context: int = 512,
    seed: int = 0,
    quantization: GGMLQuantizationType = F32,
    tokenizer: bool = True,
    chat_template: str | None = CHAT_TEMPLATE,
    max_tensors_per_file: int = 0,
    extra_metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write a random llama with a working tokenizer; return its path (the first part's, when split).

    Without `tokenizer` it has none, and no chat template. Matrices are stored as `quantization`, norms as
    F32. `extra_metadata` adds keys or replaces them. The same arguments give the same bytes.
    """
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": "Tiny Llama",
        "general.file_type": int(_file_type(quantization)),
        "general.quantization_version": 2,
        "llama.vocab_size": vocab,
        "llama.context_length": context,
        "llama.embedding_length": width,
        "llama.block_count": layers,
        "llama.feed_forward_length": ff,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": width // heads,
        "llama.rope.freq_base": 10000.0,
        **(tiny_tokenizer(vocab) if tokenizer else {"tokenizer.ggml.model": "no_vocab"}),
    }
    if tokenizer and chat_template is not None:
        metadata["tokenizer.chat_template"] = chat_template
    metadata.update(extra_metadata or {})
    tensors = _llama_tensors(layers, width, ff, width // heads * kv_heads, vocab, np.random.default_rng(seed))
    matrices = {name: quantization for name, tensor in tensors.items() if tensor.ndim == 2}
    return write_gguf(
        path, metadata, tensors, quantization=matrices, max_tensors_per_file=max_tensors_per_file
    )


def spoil_token(path: Path, token_id: int) -> Path:
    """Makes a token's embedding NaN, as a damaged file might: a prompt that holds it has logits of NaN."""
    (embedding,) = (one for one in GGUFReader(path, "r+").tensors if one.name == "token_embd.weight")
    embedding.data[token_id] = np.nan
    embedding.data.base.flush()
    return path


def tiny_tokenizer(vocab: int = 512) -> dict[str, Any]:
    """The `tokenizer.*` metadata of a SentencePiece BPE with byte fallback, `vocab` pieces long.

    Holds <unk> <s> </s>, 256 bytes, common words with every prefix of theirs (so that merging reaches
    them), the printable ASCII characters, and <|im_start|> <|im_end|> as the last two.
    """
    pieces = [("<unk>", TokenType.UNKNOWN), ("<s>", TokenType.CONTROL), ("</s>", TokenType.CONTROL)]
    pieces += [(f"<0x{byte:02X}>", TokenType.BYTE) for byte in range(256)]
    characters = ["▁", *map(chr, range(0x21, 0x7F))]
    chat = [("<|im_start|>", TokenType.CONTROL), ("<|im_end|>", TokenType.CONTROL)]
    room = vocab - len(pieces) - len(characters) - len(chat)
    if room < 0:
        raise ValueError(f"vocab is {vocab}, but the tokenizer needs at least {vocab - room} pieces")
    merges = list(dict.fromkeys(_word_prefixes()))[:room]
    normal = [*merges, *characters]
    first_normal = len(pieces)
    pieces += [(piece, TokenType.NORMAL) for piece in normal]
    pieces += [(f"<unused{i}>", TokenType.UNUSED) for i in range(room - len(merges))]
    pieces += chat
    scores = np.zeros(vocab, np.float32)
    scores[first_normal : first_normal + len(normal)] = -np.arange(len(normal), dtype=np.float32)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [piece for piece, _ in pieces],
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": np.array([kind for _, kind in pieces], np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": vocab - 1,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": True,
    }


def _word_prefixes() -> Iterator[str]:
    for word in _WORDS.split():
        spelled = "▁" + word
        yield from (spelled[:length] for length in range(2, len(spelled) + 1))


def _file_type(quantization: GGMLQuantizationType) -> LlamaFileType:
    return LlamaFileType.ALL_F32 if quantization == F32 else LlamaFileType[f"MOSTLY_{quantization.name}"]


def _value_type(value: Any) -> GGUFValueType:
    if isinstance(value, np.generic):
        return _ARRAY_TYPES[value.dtype]
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return GGUFValueType.ARRAY
    if isinstance(value, bool) or not isinstance(value, int):
        return GGUFValueType.get_type(value)
    if value < 0:
        return GGUFValueType.INT32 if value >= -(2**31) else GGUFValueType.INT64
    return GGUFValueType.UINT32 if value < 2**32 else GGUFValueType.UINT64


def _llama_tensors(
    layers: int, width: int, ff: int, kv_width: int, vocab: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return rng.normal(0, gain / np.sqrt(columns), (rows, columns)).astype(np.float32)

    def norm() -> np.ndarray:
        return rng.normal(1, 0.1, width).astype(np.float32)

    tensors = {"token_embd.weight": rng.normal(0, 1, (vocab, width)).astype(np.float32)}
    for i in range(layers):
        tensors |= {
            f"blk.{i}.attn_norm.weight": norm(),
            f"blk.{i}.attn_q.weight": matrix(width, width),
            f"blk.{i}.attn_k.weight": matrix(kv_width, width),
            f"blk.{i}.attn_v.weight": matrix(kv_width, width),
            f"blk.{i}.attn_output.weight": matrix(width, width),
            f"blk.{i}.ffn_norm.weight": norm(),
            f"blk.{i}.ffn_gate.weight": matrix(ff, width),
            f"blk.{i}.ffn_up.weight": matrix(ff, width),
            f"blk.{i}.ffn_down.weight": matrix(width, ff),
        }
    # The head is scaled up so that the logits stand apart and greedy choices are not near-ties.
    tensors |= {"output_norm.weight": norm(), "output.weight": matrix(vocab, width, gain=3.0)}
    return tensors
