"""What runs in containers, and on machines with systemd: built and started for real.

One engine, one wheelhouse and one image for all; so these tests run one after another.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "federation"))

from engine import IMAGE, ROOT, Engine, NoEngine
from needs import need
from pages import block

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
    """Everything that an installation without internet needs."""
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
