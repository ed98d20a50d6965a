"""Three sites with finished journals, for the commands that read them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.journals import three_sites


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    for site in three_sites(folder).values():
        site.close()
    return folder


@pytest.fixture
def sites(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "sites"))


@pytest.fixture
def home(sites: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of site-a, which is the working directory."""
    monkeypatch.chdir(sites / "site-a")
    return sites / "site-a"
