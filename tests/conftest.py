"""Fixtures that several files share. Imports stand inside: most tests need none of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The heads folder of a small run; tests leave it as it is."""
    from tests.heads_folder import small_run

    return small_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    return Path(shutil.copytree(trained, tmp_path / "heads"))
