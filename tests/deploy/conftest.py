"""Containers and machines with systemd, built and started on a real engine.

All tests share one engine, wheelhouse and image, so they run one after another.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.doc_pages import block
from tests.support.docker_engine import IMAGE, Engine, NoEngine
from tests.support.needs import need
from tests.support.paths import ROOT

WHEELHOUSE = ROOT / "docker" / "wheelhouse"


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    try:
        found = Engine(ROOT / "build" / "engine")
    except NoEngine as problem:
        need(str(problem))
        raise
    yield found
    found.close()


@pytest.fixture(scope="session")
def wheelhouse() -> Path:
    """Collect everything that an offline installation needs."""
    fetch = block("docs/operators/air-gap.md", "fetch")
    subprocess.run(["bash", "-ec", fetch], cwd=ROOT, check=True)
    return WHEELHOUSE


@pytest.fixture(scope="session")
def image(engine: Engine, wheelhouse: Path) -> str:
    build = engine.run(
        "docker", "build", "-f", "docker/Dockerfile", "-t", IMAGE,
        "--build-arg", f"BASE_IMAGE={engine.base_image}", ".",
        DOCKER_BUILDKIT="0",
    )  # fmt: skip
    assert build.returncode == 0, build.stdout[-3000:] + build.stderr[-3000:]
    return IMAGE
