"""Where the parity tests find real models: `PIPELLM_MODELS`, else what `make model` has fetched."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT


@pytest.fixture(scope="session")
def real_model() -> Callable[[str], Path]:
    """The path of a real model file by its name; the test is skipped where there is none."""
    folder = Path(os.environ.get("PIPELLM_MODELS", ROOT / ".cache" / "models"))

    def find(file_name: str) -> Path:
        if not (folder / file_name).is_file():
            pytest.skip(f"no {file_name} in {folder} (set PIPELLM_MODELS, or fetch it)")
        return folder / file_name

    return find
