"""deploy/systemd/install.sh refuses invalid packages before it changes anything."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SCRIPT = ROOT / "deploy" / "systemd" / "install.sh"
WHY = "dependency confusion"


def install(*arguments: str, cwd: Path = ROOT, **environment: str) -> str:
    """Run the script with a Python that always fails, so that it stops after its checks."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PACKAGE", "PIP_INDEX_URL")}
    ended = subprocess.run(
        ["sh", str(SCRIPT), *arguments],
        cwd=cwd,
        env={**kept, "PYTHON": "false", **environment},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode == 1
    assert not ended.stdout
    return ended.stderr


def test_a_missing_package_is_refused_with_an_explanation() -> None:
    output = install()
    assert output.startswith("PACKAGE is not set.")
    assert WHY in output
    assert "PACKAGE='.[demo]'" in output
    assert "PACKAGE is not set." in install("wheels")
    assert "PACKAGE is not set." in install(PACKAGE="")


@pytest.mark.parametrize(
    "package", ["lightyear-node", "lightyear-node[demo]", "lightyear_node==0.1.0", "other"]
)
def test_a_package_name_is_not_looked_up_on_pypi(package: str) -> None:
    output = install(PACKAGE=package)
    assert "would look up on PyPI" in output
    assert WHY in output


def test_paths_urls_and_private_indexes_are_accepted(tmp_path: Path) -> None:
    wheel = tmp_path / "lightyear_node-0.1.0-py3-none-any.whl"
    wheel.touch()
    for output in (
        install(PACKAGE="."),
        install(PACKAGE=".[demo]"),
        install(PACKAGE=f"{wheel}[demo]"),
        install(PACKAGE=wheel.name, cwd=tmp_path),
        install(PACKAGE="lightyear-node @ https://wheels.hospital.example/lightyear_node.whl"),
        install("wheels", PACKAGE="lightyear-node[demo]"),
        install(PACKAGE="lightyear-node", PIP_INDEX_URL="https://index.hospital.example/simple"),
    ):
        assert WHY not in output
        # The next checks: root, and a Python that is new enough.
        assert "run this as root" in output or "false is older than 3.11" in output
