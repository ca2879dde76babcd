"""What a file that is not GGUF looks like, for an error that helps. Knows first bytes, nothing more."""

from __future__ import annotations

_SIGNATURES = (
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF8", "a GIF image"),
    (b"%PDF", "a PDF document"),
    (b"PK\x03\x04", "a zip archive (PyTorch checkpoints are some)"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (b"\xfd7zXZ", "an xz archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive"),
    (b"\x7fELF", "an executable or shared library"),
    (b"\x93NUMPY", "a numpy array"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x80\x02", "a Python pickle (old PyTorch checkpoints are some)"),
    (b"version https://git-lfs", "a Git LFS pointer (fetch the file itself with git lfs pull)"),
    (b"lmgg", "a GGML file, the format before GGUF (convert it)"),
    (b"fmgg", "a GGML file, the format before GGUF (convert it)"),
    (b"tjgg", "a GGML file, the format before GGUF (convert it)"),
    (b"algg", "a GGML adapter, the format before GGUF (convert it)"),
    (b"FUGG", "one whose bytes were swapped"),
    (bytes(16), "a download that never arrived (it begins with zeros)"),
)


def describe(head: bytes) -> str:
    """A few words for a file that starts with `head` (64 bytes are enough), to follow "it looks like"."""
    for signature, description in _SIGNATURES:
        if head.startswith(signature):
            return description
    text = head.lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html")):
        return "a web page (a download link that needs a login gives one)"
    if head[8:9] == b"{":
        return "a safetensors file (convert it)"
    if text.startswith((b"{", b"[")):
        return "a JSON file"
    return f"another kind of file (it starts with {head[:8]!r})"
