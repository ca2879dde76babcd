"""Fixtures shared by all tests: the folder of test cases, and the rule that GPU tests need a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import stage  # noqa: F401  before any test imports torch: it says how idle computing threads wait

ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any("gpu" in item.keywords for item in items):
        return
    import torch

    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def cases() -> Path:
    """The folder of test cases (`PIPELLM_CASES`, default ../shared/cases); the test is skipped without it."""
    folder = Path(os.environ.get("PIPELLM_CASES", ROOT.parent / "shared" / "cases"))
    if not folder.is_dir():
        pytest.skip(f"no test cases at {folder} (set PIPELLM_CASES)")
    return folder
